"""Models, data and the slow, obvious reference of the DDP tests; used inside worker processes."""

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

from rtopk import Codec, ErrorFeedback, Layout, Sparsifier, defaults
from rtopk.exchange import Vector, make_exchange
from rtopk.layout import DenseRule, one_dimensional
from rtopk.schedule import as_schedule
from rtopk.seed import derive, generator
from rtopk.transport import InProcess

SMALL_BUCKETS = 0.0002  # MB: one bucket at first, four once DDP has rebuilt them


def net(seed: int = 0, **sizes: int) -> nn.Module:
    """An MLP with biases and a norm; the same weights on every rank."""
    hidden = sizes.get("hidden", 40)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(20, hidden),
            nn.ReLU(),
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 30),
            nn.Tanh(),
            nn.Linear(30, 5),
        )


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Different data on each rank and in each step."""
    rng = generator(7, "data", rank, step)
    return torch.randn(16, 20, generator=rng), torch.randn(16, 5, generator=rng)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


HELD: list[DDP] = []  # a state does not keep its model alive, and scenarios often hold the state alone


def wrap(model: nn.Module, group: dist.ProcessGroup | None = None, **options: object) -> DDP:
    ddp = DDP(model, **{"bucket_cap_mb": SMALL_BUCKETS, **options}, process_group=group)
    HELD.append(ddp)
    return ddp


def sgd(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.1), **options)


def train(
    ddp: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rank: int,
    loss: Callable[[nn.Module, int, int], Tensor] = loss_of,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss(ddp, rank, step).backward()
        optimizer.step()


def bits(tensors: object) -> str:
    """Name the bits of a model or of a nest of tensors and numbers."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, tensors.state_dict() if isinstance(tensors, nn.Module) else tensors)
    return digest.hexdigest()


def _feed(digest: "hashlib._Hash", value: object) -> None:
    if isinstance(value, Tensor):
        digest.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for name in sorted(value):
            digest.update(str(name).encode())
            _feed(digest, value[name])
    else:
        digest.update(repr(value).encode())


@torch.no_grad()
def gap(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between two models' weights."""
    return max(float((a - b).abs().max()) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def reference(
    model: nn.Module,
    steps: int,
    nodes: int,
    *,
    density: float = 0.05,
    selector: object = None,
    memory: Callable[[], object] = ErrorFeedback,
    mean: str = "nodes",
    values: str = "fp32",
    rounding: str = "nearest",
    scope: str = "global",
    seed: int = 0,
    exchange: str = "all-gather",
    owner_density: object = None,
    weights: list[float] | None = None,
    lr: float = 0.1,
    loss: Callable[[nn.Module, int, int], Tensor] = loss_of,
    dense: DenseRule = one_dimensional,
) -> nn.Module:
    """Train as the paper's Algorithm 1 says, all nodes in one process, one after the other."""
    parameters = dict(model.named_parameters())
    layouts = {"": Layout.of(model, dense)}
    if scope == "bucket":
        layouts = {name: Layout.of([(name, tensor)], dense) for name, tensor in parameters.items()}
    exchanges = {
        name: make_exchange(
            exchange,
            InProcess(nodes),
            Vector(
                layout.size,
                layout.dense_size,
                mean,
                weights,
                getattr(memory(), "keeps", True),
                derive(seed, name) if name else seed,
            ),
            Codec(values, rounding, layout.fingerprint, fixed=True, dense_size=layout.dense_size),
            as_schedule(density),
            owner_density,
        )
        for name, layout in layouts.items()
    }
    workers = [
        {
            name: Sparsifier(
                selector or defaults.selector(nodes, memory()),
                density,
                memory(),
                exchanges[name].codec,
                seed=derive(seed, name) if name else seed,
                node=node,
                layout=layout,
            )
            for name, layout in layouts.items()
        }
        for node in range(nodes)
    ]
    optimizer = sgd(model, lr=lr)
    for step in range(steps):
        gradients = []
        for node in range(nodes):
            parts = torch.autograd.grad(loss(model, node, step), list(parameters.values()))
            gradients.append(dict(zip(parameters, parts, strict=True)))
        for name, layout in layouts.items():
            payloads = []
            for node in range(nodes):
                own = {n: gradients[node][n] for n in layout.names}
                payloads.append(workers[node][name].compress(layout.flatten(own), step))
            average, _ = exchanges[name].mean(payloads, step)
            for n, gradient in layout.unflatten(average).items():
                parameters[n].grad = gradient
        optimizer.step()
    return model
