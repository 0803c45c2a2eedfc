"""What four ranks do in the FSDP tests: two sites of two ranks each, or other meshes where a test says so."""

import contextlib
import itertools
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from ddp_parts import batch, bits, loss_of, net
from ddp_worker import Place
from fsdp_parts import Reference, full, meshes, native, registered, residuals, shard, weights, whole
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import rtopk.fsdp
from rtopk import MomentumCorrection, RTopK


def sgd(model: nn.Module, **options: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, loss: Any = loss_of
) -> None:
    for step in steps:
        loss(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def momentum_moves(at: Place) -> dict[str, Any]:
    """The optimizer's momentum becomes the memory's, by default."""
    logging.getLogger("rtopk").setLevel(logging.ERROR)
    mesh = meshes()
    model = shard(net(), mesh["shard"])
    optimizer = sgd(model)
    rtopk.fsdp.register(model, mesh["replicate"], density=0.05, optimizer=optimizer)
    train(model, optimizer, range(3), at.rank)
    other, _ = registered(mesh, memory=MomentumCorrection)
    train(other, sgd(other, momentum=0.0), range(3), at.rank)
    logging.getLogger("rtopk").setLevel(logging.NOTSET)
    return {"bits": [weights(model), weights(other)], "left": optimizer.param_groups[0]["momentum"]}


def tied(seed: int = 0) -> nn.Module:
    """Two layers that share their weight, inside one sharded module."""
    model = net(seed)
    middle = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in middle.parameters():
            nn.init.normal_(parameter, std=0.1)
    middle[2].weight = middle[0].weight
    model.insert(3, middle)
    return model


def frozen() -> nn.Module:
    model = net()
    model[3].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    return model


def checkpointed() -> nn.Module:
    model = net()
    for i in (0, 3):
        model[i] = checkpoint_wrapper(model[i])
    return model


def compiled() -> nn.Module:
    model = net()
    model[0].compile(backend="eager")
    model[3].compile(backend="eager")
    return model


def grouped(mesh: Any) -> nn.Module:
    """Two layers sharded as one: FSDP reduces them at once."""
    model = net()
    fully_shard([model[0], model[3]], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def accumulating(model: nn.Module, rank: int, step: int) -> Tensor:
    """Two micro-batches without a reduction, then one with."""
    for micro in (1, 2):
        model.set_requires_gradient_sync(False)
        loss_of(model, rank, 100 * step + micro).backward()
    model.set_requires_gradient_sync(True)
    return loss_of(model, rank, step)


def twice(model: nn.Module, rank: int, step: int) -> Tensor:
    """A whole backward, reduced and exchanged, before the one that the optimizer sees."""
    loss_of(model, rank, 100 * step + 1).backward()
    return loss_of(model, rank, step)


def clipping(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DENSE: dict[str, dict[str, Any]] = {
    "global": {},
    "bucket, accumulation": {"scope": "bucket", "loss": accumulating},
}
MORE_DENSE: dict[str, dict[str, Any]] = {
    "bucket": {"scope": "bucket"},
    "tied": {"make": tied},
    "bf16 parameters, fp32 reduction": {"how": {"mp_policy": LOW}},
    "global, twice": {"loss": twice},
    "clipping": {"loop": clipping},
    "bucket, twice": {"scope": "bucket", "loss": twice},
    "global, accumulation": {"loss": accumulating},
    "adamw": {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)},
    "no resharding after forward": {"how": {"reshard_after_forward": False}},
    "resharding after forward": {"how": {"reshard_after_forward": True}},
    "activation checkpointing": {"make": checkpointed},
    "compiled blocks": {"make": compiled},
    "frozen": {"make": frozen},
}


def dense_is_native(at: Place) -> dict[str, Any]:
    """With density 1 the exchange is the mean that native hybrid sharding takes: same bits."""
    return against_native(at, DENSE)


def more_dense_is_native(at: Place) -> dict[str, Any]:
    return against_native(at, MORE_DENSE)


def against_native(at: Place, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train settings with our exchange and with FSDP's own."""
    mesh, found = meshes(), {}

    def compare(name: str, *, make: Any = net, how: Any = None, loop: Any = train, optimizer: Any = sgd,
                loss: Any = None, **options: Any) -> None:  # fmt: skip
        ours, _ = registered(mesh, make(), how, density=1.0, **options)
        theirs = native(mesh, make(), **(how or {}))
        with warnings.catch_warnings():
            if make is compiled:
                warnings.simplefilter("ignore")  # Dynamo's own, in torch 2.15: a .grad of no leaf
            for model in (ours, theirs):
                loop(model, optimizer(model), range(4), at.rank, **({"loss": loss} if loss else {}))
        found[name] = [weights(ours), weights(theirs)]

    for name, setting in settings.items():
        compare(name, **setting)
    scope = "global" if settings is DENSE else "bucket"
    models = [grouped(mesh["shard"]), grouped(mesh)]
    rtopk.fsdp.register(models[0], mesh["replicate"], density=1.0, scope=scope)
    for model in models:
        train(model, sgd(model), range(4), at.rank)
    found[f"{scope}, sharded together"] = [weights(model) for model in models]
    return found


def bf16_reduction(at: Place) -> dict[str, Any]:
    """Native hybrid sharding adds replicas in bf16, we in fp32: compare both with the fp32 reduction."""
    mesh, gaps = meshes(), {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        how = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)}
        ours, theirs = registered(mesh, None, how, density=1.0)[0], native(mesh, **how)
        for model in (ours, theirs):
            train(model, sgd(model), range(4), at.rank)
        both = zip(whole(ours).values(), whole(theirs).values(), strict=True)
        gaps[name] = max(float((a - b).abs().max()) for a, b in both)
    return gaps


def equals_reference(at: Place) -> dict[str, Any]:
    mesh = meshes()
    variants: dict[str, dict[str, Any]] = {
        "global": {},
        "bucket": {"scope": "bucket"},
        "draws": {"selector": RTopK(r_over_k=2)},
        "4bit": {"values": "4bit", "seed": 3},
        "momentum correction": {"memory": MomentumCorrection},
        "all-reduce": {"exchange": "all-reduce"},
        "all-reduce, bucket": {"exchange": "all-reduce", "scope": "bucket", "values": "4bit"},
    }
    found: dict[str, Any] = {}
    for name, options in variants.items():
        model, state = registered(mesh, verify_every=2, **options)
        train(model, sgd(model, momentum=0.0), range(5), at.rank)
        reference = Reference(net(), 2, 2, **options)
        optimizer = sgd(reference.model, momentum=0.0)
        for step in range(5):
            reference.step(step, optimizer)
        found[name] = [weights(model), bits(dict(reference.model.named_parameters()))]
        own = reference.nodes[at.rank % 2][at.rank // 2]
        residuals = {
            key: tensor
            for sparsifier in own.values()
            for key, tensor in sparsifier.layout.unflatten(sparsifier.memory.residual).items()
        }
        found[f"{name}, residual"] = [bits(state.state_dict()["memory"]["residual"]), bits(residuals)]
    return found


def balance(at: Place) -> dict[str, Any]:
    """sent + residual = what came in, on every shard, with uneven shards and quantised values."""
    mesh = meshes()
    found = {}
    for scope, exchange in (("global", "all-gather"), ("bucket", "all-gather"), ("global", "all-reduce")):
        model, state = registered(mesh, None, scope=scope, exchange=exchange, values="4bit", density=0.02)
        applied = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in state.tensors.items()}
        came = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in state.tensors.items()}
        plain = shard(net(), mesh["shard"])
        for step in range(8):
            loss_of(plain, at.rank, step).backward()
            loss_of(model, at.rank, step).backward()
            for name, p in plain.named_parameters():
                came[name] += p.grad.to_local().double()
            for name, p in model.named_parameters():
                applied[name] += p.grad.to_local().double()
            plain.zero_grad()
            model.zero_grad()
        worst = 0.0
        memory = state.state_dict()["memory"]
        for name, residual in memory["residual"].items():
            if "owner_residual" in memory:
                residual = residual + 2 * memory["owner_residual"][name]  # it is kept for both replicas
            both = torch.stack([came[name], residual.double()])
            dist.all_reduce(both, group=mesh["replicate"].get_group())
            worst = max(worst, float(((both[0] - both[1]) / 2 - applied[name]).abs().max().nan_to_num()))
        entries = state.stats.entries
        found[scope if exchange == "all-gather" else exchange] = [worst, entries, state.layout.size]
    return found


def tiny(at: Place) -> dict[str, Any]:
    """Shards without an entry: one row over two ranks, for a tensor and for a whole model."""
    mesh = meshes()

    def one_row() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(nn.Linear(20, 1, bias=False))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        inputs, targets = batch(rank, step)
        return nn.functional.mse_loss(model(inputs), targets[:, :1])

    found = {}
    for scope in ("global", "bucket", "all-reduce"):
        how = {"exchange": scope} if scope == "all-reduce" else {"scope": scope}
        ours, state = registered(mesh, one_row(), density=1.0, **how)
        theirs = native(mesh, one_row())
        for model in (ours, theirs):
            train(model, sgd(model), range(3), at.rank, loss)
        found[scope] = [weights(ours), weights(theirs)]
        found[f"{scope}, sizes"] = state.layout.size
    return found


def not_finite(at: Place) -> dict[str, Any]:
    """NaN in the gradient of one shard of one site: all four ranks skip that step and no other."""
    mesh, found = meshes(), {}
    for scope in ("global", "bucket"):
        model, state = registered(
            mesh, scope=scope, exchange="all-reduce" if scope == "global" else "all-gather"
        )
        optimizer = sgd(model)
        train(model, optimizer, range(2), at.rank)
        before, residual = weights(model), bits(state.state_dict()["memory"])
        momentum = bits(
            {str(i): s["momentum_buffer"].to_local() for i, s in enumerate(optimizer.state.values())}
        )
        last = next(p for n, p in model.named_parameters() if n == "5.weight")
        poison = last.register_post_accumulate_grad_hook(
            lambda p: p.grad.to_local().fill_(float("nan")) if at.rank == 2 else None
        )
        loss_of(model, at.rank, 2).backward()
        poison.remove()
        nan = all(bool(p.grad.to_local().isnan().all()) for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        after = [weights(model), bits(state.state_dict()["memory"])]
        moved = bits(
            {str(i): s["momentum_buffer"].to_local() for i, s in enumerate(optimizer.state.values())}
        )
        train(model, optimizer, range(3, 5), at.rank)
        found[scope] = {
            "nan": nan, "unchanged": after == [before, residual] and moved == momentum, "refusal": state.refusal,
            "skipped": state.skipped, "steps": state.step, "goes on": weights(model) != before,
        }  # fmt: skip
    model, state = registered(mesh, on_nonfinite="raise")
    model[5].register_forward_pre_hook(lambda m, i: (i[0] * float("inf"),) if at.rank == 1 else None)
    try:
        loss_of(model, at.rank, 0).backward()
        found["stopped"] = ""
    except Exception as error:
        found["stopped"] = f"{type(error).__name__}: {error}"
    return found


def interrupted(at: Place) -> dict[str, Any]:
    """An error in the middle of backward: the state is that before it, and going on is refused, as FSDP cannot."""
    mesh, found = meshes(), {}

    def stop(grad: Tensor) -> None:
        raise KeyError("an error of the user's")

    for scope in ("global", "bucket"):
        model, state = registered(mesh, scope=scope)
        optimizer = sgd(model)
        train(model, optimizer, range(1), at.rank)
        before = bits(state.state_dict())
        handle = model[3].register_forward_hook(lambda m, i, o: o.register_hook(stop) and None)
        with contextlib.suppress(KeyError):
            loss_of(model, at.rank, 9).backward()
        handle.remove()
        found[f"{scope}, saved"] = bits(state.state_dict()) == before
        optimizer.zero_grad()
        found[scope] = _error(lambda model=model: loss_of(model, at.rank, 1).backward())
        found[f"{scope}, still"] = bits(state.state_dict()) == before
    return found


class Recomputing(nn.Sequential):
    """Recompute the first layers in a backward pass inside the backward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        layers = list(self)  # a slice of this would be another of its kind
        hidden = checkpoint(nn.Sequential(*layers[:4]), inputs.requires_grad_(), use_reentrant=True)
        return nn.Sequential(*layers[4:])(hidden)


def reentrant(at: Place) -> dict[str, Any]:
    """A backward pass inside another is refused: rounds would end too early."""
    model, _ = registered(meshes(), Recomputing(*net()))
    return {"stopped": _error(lambda: loss_of(model, at.rank, 0).backward())}


class Branches(nn.Sequential):
    """A model whose middle layer takes part in some steps only."""

    skips = False

    def forward(self, inputs: Tensor) -> Tensor:
        for i, layer in enumerate(self):
            if not (self.skips and i == 1):
                inputs = layer(inputs)
        return inputs


def branches(mesh: Any, **options: Any) -> tuple[Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Branches(nn.Linear(20, 24), nn.Linear(24, 24), nn.Linear(24, 5))
    return registered(mesh, model, **options) if options else (native(mesh, model), None)


def idle(at: Place) -> dict[str, Any]:
    """The residual of a layer that takes no part in a step is neither sent nor changed."""
    mesh, found = meshes(), {}
    for name, options in {
        "global": {"scope": "global"},
        "bucket": {"scope": "bucket"},
        "clipping": {"clip_norm": 0.1},
        "momentum": {"memory": MomentumCorrection},
        "momentum, bucket": {"memory": MomentumCorrection, "scope": "bucket"},
    }.items():
        model, state = branches(mesh, **options)
        optimizer = sgd(model, momentum=0.0)
        train(model, optimizer, range(3), at.rank)
        kept = state.state_dict()["memory"]["residual"]
        before = whole(model)
        model.skips = True
        loss_of(model, at.rank, 3).backward()
        gradient = model[1].weight.grad
        optimizer.step()
        optimizer.zero_grad()
        now, after = state.state_dict()["memory"]["residual"], whole(model)
        model.skips = False
        train(model, optimizer, range(4, 6), at.rank)
        found[name] = {
            "kept": torch.equal(kept["1.weight"], now["1.weight"]) and bool(kept["1.weight"].any()),
            "others moved": not torch.equal(kept["0.weight"], now["0.weight"]),
            "still": torch.equal(before["1.weight"], after["1.weight"]),
            "no gradient": gradient is None,
            "replicas": weights(model),
        }
    return found


def idle_from_the_start(at: Place) -> dict[str, Any]:
    """A layer that has never taken part, with every way to accumulate."""
    mesh, found = meshes(), {}
    for scope in ("global", "bucket"):
        for memory in ("error-feedback", "momentum-correction", "none"):
            model, state = branches(mesh, scope=scope, memory=memory)
            model.skips = True
            train(model, sgd(model, momentum=0.0), range(2), at.rank)
            found[f"{scope}, {memory}"] = [weights(model), state.step]
    return found


def idle_in_a_second_backward(at: Place) -> dict[str, Any]:
    """Two whole backwards in a step, a layer in one of them only: equal to native hybrid sharding."""
    mesh, found = meshes(), {}
    for scope in ("global", "bucket"):
        for first in (False, True):
            models = [branches(mesh, scope=scope, density=1.0)[0], branches(mesh)[0]]
            for model in models:
                optimizer = sgd(model)
                for step in range(3):
                    for micro, skips in enumerate((first, not first)):
                        model.skips = skips
                        loss_of(model, at.rank, 10 * step + micro).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found[f"{scope}, {first}"] = [weights(model) for model in models]
    return found


def idle_after_a_deferral(at: Place) -> dict[str, Any]:
    """A layer in the micro-batch without an all-reduce, and not in the last: its gradient is exchanged too."""
    mesh, found = meshes(), {}
    for scope in ("global", "bucket"):
        models = [branches(mesh, scope=scope, density=1.0)[0], branches(mesh)[0]]
        for model in models:
            if model is models[0]:
                model.set_requires_all_reduce(False)
            loss_of(model, at.rank, 0).backward()
            if model is models[0]:
                model.set_requires_all_reduce(True)
                model.skips = True
                loss_of(model, at.rank, 1).backward()
        found[scope] = [bits({"": full(model[1].weight.grad)}) for model in models]
    return found


def cleared_after_a_deferral(at: Place) -> dict[str, Any]:
    """Exchange, defer once or twice, clear all gradients: the next mean is that of its own backward."""
    mesh, found = meshes(), {}
    for to_none, deferrals, skips in itertools.product((True, False), (1, 2), (False, True)):
        model, other = (branches(mesh, density=1.0)[0] for _ in range(2))
        loss_of(model, at.rank, 0).backward()
        model.set_requires_all_reduce(False)
        model.skips = skips  # a layer that the deferring backward leaves out has a mean that waits, too
        for step in range(deferrals):
            loss_of(model, at.rank, 1 + step).backward()
        model.skips = False
        model.set_requires_all_reduce(True)
        model.zero_grad(set_to_none=to_none)
        for one in (model, other):
            loss_of(one, at.rank, 5).backward()
        found[f"{to_none} {deferrals} {skips}"] = [
            [bits({"": full(p.grad)}) for p in one.parameters()] for one in (model, other)
        ]
    return found


def clipped(at: Place) -> dict[str, Any]:
    """`clip_norm` bounds the gradient of a site, over its shards, as clipping each site's before the mean does."""
    mesh, limit = meshes(), 0.01
    model, _ = registered(mesh, density=1.0, clip_norm=limit)
    plain = shard(net(), mesh["shard"])
    worst = 0.0
    for one in (model, plain):
        loss_of(one, at.rank, 0).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        mean = full(theirs.grad).clone()
        dist.all_reduce(mean, group=mesh["replicate"].get_group())
        worst = max(worst, float((full(ours.grad) - mean / 2).abs().max()))
    return {"worst": worst, "largest": max(float(full(p.grad).abs().max()) for p in model.parameters())}


class Experts(nn.Module):
    """Each site uses an expert of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 5)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.table = nn.Embedding(6, 16)
        self.site = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.experts[self.site](self.first(inputs))
        if self.site == 0:
            hidden = hidden + self.table.weight[1]  # one row, so that other shards get zeros
        return self.last(hidden)


def experts(at: Place) -> dict[str, Any]:
    """Parameters that only one site uses: replicas stay alike with weight decay, and clipping returns."""
    mesh, found = meshes(), {}
    for scope in ("global", "bucket"):
        for density in (0.02, 1.0):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = Experts()
            model.site = at.rank // 2
            for part in (model.first, *model.experts):
                fully_shard(part, mesh=mesh["shard"])
            fully_shard(model, mesh=mesh["shard"])
            rtopk.fsdp.register(model, mesh["replicate"], density=density, scope=scope)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
            given = []
            for step in range(4):
                loss_of(model, at.rank, step).backward()
                given.append([p.grad is not None for p in model.parameters()])
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found[f"{scope}, {density}"] = [weights(model), given]
    return found


def what_users_do(at: Place) -> dict[str, Any]:
    """Loads that replace parameters, layers thawed too late, a divisor, micro-batches without an all-reduce."""
    mesh, found = meshes(), {}

    def loaded(model: nn.Module) -> None:
        model.load_state_dict(model.state_dict(), assign=True)

    def divided(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
                module.set_gradient_divide_factor(8.0)

    for name, change in (("assign", loaded), ("divisor", divided)):
        ours, _ = registered(mesh, density=1.0, verify_every=1)
        theirs = native(mesh)
        for model in (ours, theirs):
            change(model)
            train(model, sgd(model), range(3), at.rank)
        found[name] = [weights(ours), weights(theirs)]

    for place in (0, 3, 5):  # one module alone has a divisor
        ours, _ = registered(mesh, density=1.0)
        theirs = native(mesh)
        for model in (ours, theirs):
            for module in (model[0], model[3], model):
                module.set_force_sum_reduction_for_comms(True)
            (model if place == 5 else model[place]).set_gradient_divide_factor(8.0)
            train(model, sgd(model), range(3), at.rank)
        found[f"divisor of {place}"] = [weights(ours), weights(theirs)]

    def micro(model: nn.Module, rank: int, step: int) -> Tensor:
        model.set_requires_all_reduce(False)
        for i in (1, 2):
            loss_of(model, rank, 100 * step + i).backward()
        model.set_requires_all_reduce(True)
        return loss_of(model, rank, step)

    for scope in ("global", "bucket"):
        ours, state = registered(mesh, density=1.0, scope=scope)
        theirs = native(mesh)
        for model in (ours, theirs):
            train(model, sgd(model), range(3), at.rank, micro)
        found[f"no all-reduce, {scope}"] = [weights(ours), weights(theirs), state.step]

    model, _ = registered(mesh, frozen())
    train(model, sgd(model), range(1), at.rank)
    model[3].weight.requires_grad_(True)
    found["thawed"] = _error(lambda: loss_of(model, at.rank, 1))

    model = shard(net(), mesh["shard"])
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    found["in backward"] = _error(lambda: rtopk.fsdp.register(model, mesh["replicate"]))
    model, _ = registered(mesh)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    found["in backward, later"] = _error(lambda: loss_of(model, at.rank, 0).backward())

    def zeroed(model: nn.Module) -> bool:
        optimizer = sgd(model, momentum=0.0)
        for step in range(3):
            loss_of(model, at.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return True

    for scope in ("global", "bucket"):
        model, state = branches(mesh, scope=scope)
        zeroed(model)
        kept = state.state_dict()["memory"]["residual"]["1.weight"]
        model.skips = True
        loss_of(model, at.rank, 3).backward()
        now = state.state_dict()["memory"]["residual"]["1.weight"]
        found[f"zeros, {scope}"] = [
            torch.equal(kept, now) and bool(kept.any()),
            model[1].weight.grad is not None,
        ]
    return found


def _error(attempt: Any) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def shards_apart(at: Place) -> dict[str, Any]:
    """A state loaded on one shard of each site only: all ranks stop."""
    model, state = registered(meshes())
    train(model, sgd(model), range(1), at.rank)
    if at.rank % 2 == 0:
        state.load_state_dict({**state.state_dict(), "step": 7})
    return {"stopped": _error(lambda: train(model, sgd(model), range(1), at.rank))}


def options_differ(at: Place) -> dict[str, Any]:
    """A difference on one rank, in one site or one shard, is an error on all four."""
    mesh, found = meshes(), {}
    for name, options in {
        "one rank": {"density": 0.1 if at.rank == 3 else 0.05},
        "one site": {"seed": at.rank // 2},
        "one shard": {"values": "fp16" if at.rank % 2 else "fp32"},
        "one rank is wrong": {"density": 2.0 if at.rank == 0 else 0.05},
        "all are wrong": {"density": 2.0},
    }.items():
        try:
            registered(mesh, **options)
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def drift(at: Place) -> dict[str, Any]:
    """Weights of one shard that differ between the sites are found, and all four ranks stop."""
    model, _ = registered(meshes(), verify_every=1)
    optimizer = sgd(model)
    train(model, optimizer, range(1), at.rank)
    if at.rank == 3:
        with torch.no_grad():
            model[0].weight.to_local()[0, 0] += 1.0
    try:
        train(model, optimizer, range(1, 2), at.rank)
        return {"raised_here": ""}
    except RuntimeError as error:
        return {"raised_here": f"{type(error).__name__}: {error}"}


def other_start(at: Place) -> dict[str, Any]:
    """Replicas that start from different weights are found in the first step, on all ranks."""
    model, _ = registered(meshes(), net(seed=at.rank // 2))
    try:
        train(model, sgd(model), range(1), at.rank)
        return {"raised_here": ""}
    except RuntimeError as error:
        return {"raised_here": str(error)}


def refused(at: Place) -> dict[str, Any]:
    mesh = meshes()

    def embedding() -> nn.Module:
        return fully_shard(nn.Sequential(nn.Embedding(10, 4, sparse=True)), mesh=mesh["shard"])

    def partly() -> nn.Module:
        model = net()
        fully_shard(model[0], mesh=mesh["shard"])
        return model

    def again() -> nn.Module:
        return registered(mesh)[0]

    def side_by_side() -> nn.Module:
        model = net()
        for layer in (model[0], model[2], model[3], model[5]):
            fully_shard(layer, mesh=mesh["shard"])
        return model

    def all_frozen() -> nn.Module:
        return shard(net().requires_grad_(False), mesh["shard"])

    def on_meta() -> nn.Module:
        return shard(net().to("meta"), mesh["shard"])

    tries: dict[str, Any] = {
        "one rank's mesh": lambda: rtopk.fsdp.register(
            shard(net(), mesh["shard"]), mesh["shard" if at.rank == 3 else "replicate"]
        ),
        "side by side": lambda: rtopk.fsdp.register(side_by_side(), mesh["replicate"]),
        "all frozen": lambda: rtopk.fsdp.register(all_frozen(), mesh["replicate"]),
        "meta": lambda: rtopk.fsdp.register(on_meta(), mesh["replicate"]),
        "2-D": lambda: rtopk.fsdp.register(shard(net(), mesh), mesh["replicate"]),
        "no mesh": lambda: rtopk.fsdp.register(shard(net(), mesh["shard"]), 0.01),
        "2-D mesh given": lambda: rtopk.fsdp.register(shard(net(), mesh["shard"]), mesh),
        "the shard's mesh given": lambda: rtopk.fsdp.register(shard(net(), mesh["shard"]), mesh["shard"]),
        "ranks in another order": lambda: registered(
            DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("replicate", "shard"))
        ),
        "hook": lambda: rtopk.fsdp.register(again(), mesh["replicate"]),
        "fsdp1": lambda: rtopk.fsdp.register(
            FullyShardedDataParallel(net(), device_id=torch.device("cpu")), mesh["replicate"]
        ),
        "plain": lambda: rtopk.fsdp.register(net(), mesh["replicate"]),
        "sparse": lambda: rtopk.fsdp.register(embedding(), mesh["replicate"]),
        "memory clips": lambda: registered(mesh, memory=lambda: MomentumCorrection(clip_norm=0.5)),
        "partly": lambda: rtopk.fsdp.register(partly(), mesh["replicate"]),
        "ddp": lambda: rtopk.ddp.register(shard(net(), mesh["shard"])),
        "momentum": lambda: (
            lambda m: rtopk.fsdp.register(m, mesh["replicate"], memory=MomentumCorrection, optimizer=sgd(m))
        )(shard(net(), mesh["shard"])),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            attempt()
            found[name] = ""
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


# -- resume


def first_half(at: Place, until: int = 10) -> dict[str, Any]:
    """Train, then write a checkpoint: the model and optimizer through DCP, the state both ways."""
    found = {}
    for scope in ("global", "bucket"):
        model, state = registered(meshes(), scope=scope)
        optimizer = sgd(model)
        train(model, optimizer, range(until), at.rank)
        folder = at.folder / f"fsdp-{scope}-{until}"
        state.save(folder / "state")
        dcp.save(_all_of(model, optimizer, state), checkpoint_id=str(folder / "dcp"))
        found[scope] = [weights(model), bits(residuals(state))]
    return found


def kinds_through_dcp(at: Place) -> dict[str, Any]:
    """DCP gives a job only what it asks for: one with other options must not lose the rest unnoticed."""
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "velocity": {"memory": MomentumCorrection},
        "owner_residual": {"exchange": "all-reduce"},
    }
    for kind, options in ways.items():
        model, state = registered(meshes(), **options)
        train(model, sgd(model, momentum=0.0), range(2), at.rank)
        folder = str(at.folder / f"fsdp-kinds-{kind}")
        dcp.save({"rtopk": state.sharded()}, checkpoint_id=folder)
        other = registered(meshes())[1]
        before = bits(other.state_dict())
        refusal = _error(
            lambda other=other, folder=folder: dcp.load({"rtopk": other.sharded()}, checkpoint_id=folder)
        )
        found[kind] = [refusal, bits(other.state_dict()) == before]
    state = registered(meshes())[1]
    key, saved = next(iter(state.sharded().state_dict().items()))
    state.sharded().load_state_dict({key: {**saved, "format": 1, "step": 3}})  # from before kinds were told
    return {**found, "older": state.step}


def owners_through_dcp(at: Place) -> dict[str, Any]:
    """What owners keep goes through DCP: a new state trains on to the same bits."""
    how = {"exchange": "all-reduce", "scope": "bucket"}
    model, state = registered(meshes(), **how)
    train(model, sgd(model), range(4), at.rank)
    folder = str(at.folder / "fsdp-owners")
    dcp.save({"model": model.state_dict(), "rtopk": state.sharded()}, checkpoint_id=folder)
    again, other = registered(meshes(), net(seed=5), **how)
    loaded = {"model": again.state_dict(), "rtopk": other.sharded()}
    dcp.load(loaded, checkpoint_id=folder)
    again.load_state_dict(loaded["model"])
    same = bits(other.state_dict()) == bits(state.state_dict())
    kept = sum(float(t.abs().sum()) for t in state.state_dict()["memory"]["owner_residual"].values())
    for one in (model, again):
        train(one, sgd(one), range(4, 6), at.rank)
    return {"same": same, "kept": kept, "bits": [weights(model), weights(again)]}


def _all_of(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> dict[str, Any]:
    moments = {
        f"{i}": s["momentum_buffer"] for i, s in enumerate(optimizer.state.values()) if "momentum_buffer" in s
    }
    return {"model": model.state_dict(), "momentum": moments, "rtopk": state.sharded()}


def _resumed(at: Place, scope: str, through: str, replicas: int = 2, step: int = 10) -> tuple[Any, Any, Any]:
    folder = at.folder / f"fsdp-{scope}-{step}"
    model, state = registered(meshes(replicas), net(seed=5), scope=scope)
    optimizer = sgd(model)
    for parameter in model.parameters():  # so that the optimizer has its buffers
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    loaded = _all_of(model, optimizer, state)
    if through != "dcp":
        del loaded["rtopk"]
    dcp.load(loaded, checkpoint_id=str(folder / "dcp"))
    model.load_state_dict(loaded["model"])
    if through != "dcp":
        state.load(folder / "state")
    return model, optimizer, state


def second_half(at: Place, until: int = 10, scopes: tuple[str, ...] = ("global",)) -> dict[str, Any]:
    """As many steps again in fresh processes, from files and from DCP, against the reference over all."""
    found = {}
    for scope in scopes:
        expected = [None]
        if at.rank == 0:
            reference = Reference(net(), 2, 2, scope=scope)
            optimizer = sgd(reference.model)
            for step in range(2 * until):
                reference.step(step, optimizer)
            expected = [bits(dict(reference.model.named_parameters()))]
        dist.broadcast_object_list(expected)
        for through in ("files", "dcp"):
            model, optimizer, state = _resumed(at, scope, through, step=until)
            train(model, optimizer, range(until, 2 * until), at.rank)
            found[f"{scope}, {through}"] = [weights(model), expected[0], state.step]
    return found


def first_fifty(at: Place) -> dict[str, Any]:
    return first_half(at, 50)


def last_fifty(at: Place) -> dict[str, Any]:
    return second_half(at, 50, ("global", "bucket"))


def other_replicas(at: Place) -> dict[str, Any]:
    """One site, or three, go on from the files of two: what the model will receive stays the same."""
    replicas = at.world // 2
    model, optimizer, state = _resumed(at, "global", "files", replicas)
    residual = state.state_dict()["memory"]["residual"]
    found: dict[str, Any] = {"step": state.step}
    old = [
        rtopk.replicas.checkpoint.read_rank(at.folder / "fsdp-global-10" / "state", old, 2, state.shard)[
            "memory"
        ]
        for old in range(2)
    ]
    worst = 0.0
    for name, tensor in residual.items():
        total = tensor.double() / replicas
        dist.all_reduce(total, group=state.transport.group)
        expected = sum(o["residual"][name].double() for o in old) / 2
        worst = max(worst, float((total - expected).abs().max()))
    train(model, optimizer, range(10, 13), at.rank)
    return {**found, "worst": worst, "weights": weights(model)}


def other_shards(at: Place) -> dict[str, Any]:
    """Two sites of another number of ranks go on from DCP: the same residual, cut anew."""
    model, optimizer, state = _resumed(at, "global", "dcp", 2)
    sums = residuals(state)
    try:
        state.load(at.folder / "fsdp-global-10" / "state")
        refusal = ""
    except rtopk.fsdp.StateError as error:
        refusal = str(error)
    found = {"residual": bits(sums), "model": weights(model), "step": state.step, "refusal": refusal}
    train(model, optimizer, range(10, 13), at.rank)
    return {**found, "weights": weights(model)}
