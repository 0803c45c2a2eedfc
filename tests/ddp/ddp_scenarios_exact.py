"""Scenarios about exactness: the hook against the reference, in every combination DDP allows."""

import copy
import gc
import itertools
import logging
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from ddp_parts import batch, bits, gap, loss_of, net, reference, sgd, train, wrap
from ddp_scenarios_faults import attempt
from ddp_worker import Place
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import rtopk
from rtopk import Dealt, MomentumCorrection, NoMemory, RandomK, RTopK, TopK, compat
from rtopk.layout import nothing

STEPS = 5  # DDP rebuilds its buckets after the first


VARIANTS: dict[str, dict[str, Any]] = {
    "global": {},
    "bucket": {"scope": "bucket"},
    "dealt": {"selector": Dealt(2)},
    "no_memory": {"memory": NoMemory},
    "momentum-correction": {"memory": lambda: MomentumCorrection(0.9, clip_norm=1.0)},
    "received": {"mean": "received"},
    "half_of_all": {"density": 0.5},  # averaged by the dense way
    "schedule": {"density": rtopk.warm_up(0.05, steps=3)},
    "all_reduce": {"exchange": "all-reduce"},
    "all_reduce_bucket": {"exchange": "all-reduce", "scope": "bucket", "values": "4bit"},
    "paper": {"preset": "paper"},
    "dgc": {"preset": "dgc"},
}
PUBLISHED: dict[str, dict[str, Any]] = {  # the reference has no presets
    "paper": {"selector": RTopK(nodes=2), "dense": nothing},
    "dgc": {"selector": TopK(), "memory": MomentumCorrection, "scope": "bucket"},
}
MORE: dict[str, dict[str, Any]] = {
    "4bit_bucket": {"values": "4bit", "rounding": "stochastic", "scope": "bucket"},
    "top_k": {"selector": TopK()},
    "random_k": {"selector": RandomK()},
    "dealt_bucket": {"selector": Dealt(2), "scope": "bucket"},
    "no_memory_nodes": {"memory": NoMemory, "mean": "nodes"},
    "momentum_bucket": {"memory": MomentumCorrection, "scope": "bucket"},
    "received_bucket": {"mean": "received", "scope": "bucket"},
    "seed": {"selector": RTopK(nodes=2), "seed": 3},
    "int8": {"values": "int8"},
    "all_reduce_received": {"exchange": "all-reduce", "mean": "received", "owner_density": 0.1},
    "all_reduce_no_memory": {"exchange": "all-reduce", "memory": NoMemory, "mean": "nodes"},
    "all_reduce_schedule": {
        "exchange": "all-reduce",
        "density": rtopk.warm_up(0.05, steps=3),
        "weights": [1.0, 3.0],
    },
    "all_reduce_momentum": {"exchange": "all-reduce", "memory": MomentumCorrection, "values": "fp16"},
}


def equals_reference(at: Place) -> dict[str, Any]:
    return _against_the_reference(at, VARIANTS)


def equals_reference_more(at: Place) -> dict[str, Any]:
    return _against_the_reference(at, MORE)


def _against_the_reference(at: Place, variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    told = {"no_memory": {"mean": "received"}}  # what the hook does unasked
    found: dict[str, Any] = {}
    for name, options in variants.items():
        model = net()
        state = rtopk.ddp.register(wrap(model), **{"density": 0.05, **options})
        train(state.model, sgd(model), range(STEPS), at.rank)
        expected = reference(net(), STEPS, at.world, **{**told.get(name, {}), **PUBLISHED.get(name, options)})
        found[name] = [bits(model), bits(expected)]
    return found


def momentum_moves(at: Place) -> dict[str, Any]:
    """The optimizer's momentum becomes the memory's; a checkpoint of before cannot bring it back unseen."""
    found: dict[str, Any] = {}
    logging.getLogger("rtopk").setLevel(logging.ERROR)
    for nesterov in (False, True):
        model, plain = net(), net()
        optimizer = sgd(model, momentum=0.8, weight_decay=0.01, nesterov=nesterov)
        before = copy.deepcopy(optimizer.state_dict())
        state = rtopk.ddp.register(wrap(model), 0.05, optimizer=optimizer)  # by default
        held = (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["weight_decay"])
        train(state.model, optimizer, range(3), at.rank)
        optimizer.load_state_dict(before)
        train(state.model, optimizer, range(3, 5), at.rank)
        other = rtopk.ddp.register(
            wrap(plain), 0.05, memory=lambda nesterov=nesterov: MomentumCorrection(0.8, nesterov=nesterov)
        )
        train(other.model, sgd(plain, weight_decay=0.01 / (1.0 - 0.8)), range(5), at.rank)
        trained = [bits(model), bits(plain)]
        # What was saved with momentum 0 says what it was.
        saved, again = copy.deepcopy(optimizer.state_dict()), sgd(net(), momentum=0.5)
        again.load_state_dict(saved)
        again.param_groups[0]["momentum"] = 0.3  # as OneCycleLR leaves it
        memory = rtopk.replicas.momentum.memory_for(again, lambda parameter: True)
        # Where the memory has no momentum, it is the optimizer's again.
        leaves = net()
        kept = sgd(leaves, momentum=0.8, weight_decay=0.01, nesterov=nesterov)
        other = rtopk.ddp.register(wrap(leaves), 0.05, memory="error-feedback", optimizer=kept)
        kept.load_state_dict(saved)
        train(other.model, kept, range(1), at.rank)
        held_again = kept.param_groups[0]
        state.return_momentum()
        group = optimizer.param_groups[0]
        # Without the hook the optimizer goes on as before, though the state is still there; with it, it must not.
        plainly = attempt(train, DDP(model), optimizer, range(2), at.rank)
        hooked = attempt(train, state.model, optimizer, range(1), at.rank)
        found[str(nesterov)] = {
            "goes_on": [plainly, "it would act twice" in hooked],
            "held": held,
            "bits": trained,
            "again": memory().momentum,
            "left": [held_again["momentum"], round(held_again["weight_decay"], 9)],
            "back": [group["momentum"], round(group["weight_decay"], 9), "rtopk_momentum" in group],
        }
    model = net()
    groups = [{"params": [p], "momentum": 0.1 * i} for i, p in enumerate(model.parameters())]
    try:
        rtopk.ddp.register(
            wrap(model), memory="momentum-correction", optimizer=torch.optim.SGD(groups, lr=0.1)
        )
    except ValueError as error:
        found["differ"] = str(error)
    stays = {
        "differ": groups,
        "dampening": [{"params": list(model.parameters()), "dampening": 0.5, "momentum": 0.5}],
        "others": [{"params": [*model.parameters(), torch.nn.Parameter(torch.ones(3))], "momentum": 0.5}],
    }
    for name, kept in stays.items():
        optimizer = torch.optim.SGD(kept, lr=0.1)
        before = [group["momentum"] for group in optimizer.param_groups]
        state = rtopk.ddp.register(wrap(model), optimizer=optimizer)
        found[f"{name}_stays"] = [
            before == [group["momentum"] for group in optimizer.param_groups],
            state.options.memory,
        ]
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        found[kind.__name__] = _first_beta_moves(at, kind)
    found["others_stay"] = [_stays(kind, **has) for kind, has in OTHERS]
    wrapped = torch.optim.AdamW(net().parameters())
    found["innermost"] = rtopk.replicas.momentum.innermost(_Wrapping(_Wrapping(wrapped))) is wrapped
    kept = sgd(model, momentum=0.9)
    state = rtopk.ddp.register(wrap(model), memory="error-feedback", optimizer=kept)
    found["asked"] = [state.options.memory, kept.param_groups[0]["momentum"]]
    logging.getLogger("rtopk").setLevel(logging.NOTSET)
    return found


# Their momentum is of something else than gradients, and Muon's weight decay has no part in it.
OTHERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.NAdam, {"betas": (0.8, 0.99), "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.8, "weight_decay": 0.1}),
]
if hasattr(torch.optim, "Muon"):  # torch 2.9 has it
    OTHERS.append((torch.optim.Muon, {"momentum": 0.8, "weight_decay": 0.1}))


def _stays(kind: Any, **has: Any) -> bool:
    """Whether register leaves an optimizer as it is, and keeps error feedback."""
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = kind(model.parameters(), lr=0.1, **has)
    state = rtopk.ddp.register(wrap(model), 0.1, optimizer=optimizer)
    return optimizer.param_groups[0].items() >= has.items() and state.options.memory == "error-feedback"


class _Wrapping(torch.optim.Optimizer):
    """What Accelerate and Lightning make of an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def _first_beta_moves(at: Place, kind: Any) -> dict[str, Any]:
    """Adam's momentum moves like SGD's; weight decay that is added to the gradient grows, AdamW's does not."""
    model, plain = net(), net()
    options: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    optimizer = kind(model.parameters(), betas=(0.8, 0.95), **options)
    before = copy.deepcopy(optimizer.state_dict())
    state = rtopk.ddp.register(wrap(model), 0.05, optimizer=optimizer)
    group = optimizer.param_groups[0]
    held = [list(group["betas"]), group["weight_decay"]]
    train(state.model, optimizer, range(3), at.rank)
    optimizer.load_state_dict({**before, "state": optimizer.state_dict()["state"]})  # groups of before
    train(state.model, optimizer, range(3, 5), at.rank)
    other = rtopk.ddp.register(wrap(plain), 0.05, memory=lambda: MomentumCorrection(0.8))
    options["weight_decay"] = 0.1 / (1.0 - 0.8) if kind is torch.optim.Adam else 0.1
    train(other.model, kind(plain.parameters(), betas=(0.0, 0.95), **options), range(5), at.rank)
    state.return_momentum()
    group = optimizer.param_groups[0]
    back = [list(group["betas"]), group["weight_decay"], "rtopk_momentum" in group]
    return {"held": held, "bits": [bits(model), bits(plain)], "back": back}


def buckets_are_rebuilt(at: Place) -> dict[str, Any]:
    """Count buckets, collectives and their bytes in every step."""
    found: dict[str, Any] = {}
    real = compat.all_gather_single
    for scope in ("global", "bucket"):
        buckets: list[int] = []
        exchanged: list[int] = []

        def counting(state, bucket, seen=buckets):  # type: ignore[no-untyped-def]
            if bucket.index() == 0:
                seen.append(0)
            seen[-1] += 1
            return rtopk.ddp.hook(state, bucket)

        def gather(out: Tensor, own: Tensor, group: Any = None, *, seen: list[int] = exchanged) -> Any:
            seen.append(own.numel())
            return real(out, own, group)

        model = net()
        ddp = wrap(model)
        state = rtopk.ddp.register(ddp, 0.05, scope=scope, attach=False)
        ddp.register_comm_hook(state, counting)
        compat.all_gather_single = gather
        try:
            train(ddp, sgd(model), range(3), at.rank)
        finally:
            compat.all_gather_single = real
        last = exchanged[-buckets[-1] :] if scope == "bucket" else exchanged[-1:]
        found[scope] = {
            "buckets": buckets,
            "collectives": len(exchanged),
            "last_bytes": sum(last),
            "sent": state.stats.bytes_sent,
            "received": state.stats.bytes_received,
        }
    return found


def dense_phase_is_plain_ddp(at: Place) -> dict[str, Any]:
    """With density 1 the hook is DDP's own mean: bug 5, DDP does not divide for a hook."""
    plain, hooked = net(), net()
    ddp = wrap(plain)
    train(ddp, sgd(plain), range(3), at.rank)
    state = rtopk.ddp.register(wrap(hooked), 0.05, dense_steps=3)
    train(state.model, sgd(hooked), range(3), at.rank)
    apart = gap(plain, hooked)
    dense = state.stats.entries
    train(state.model, sgd(hooked), range(3, 4), at.rank)
    return {"gap": apart, "dense": dense, "size": state.layout.size, "after": state.stats.entries}


def ddp_options(at: Place) -> dict[str, Any]:
    """static_graph, gradient_as_bucket_view and find_unused_parameters change nothing."""
    expected = {scope: bits(reference(net(), STEPS, at.world, scope=scope)) for scope in ("global", "bucket")}
    found = {}
    choices = ("static_graph", "gradient_as_bucket_view", "find_unused_parameters")
    for choice, scope in itertools.product(choices, expected):
        model = net()
        state = rtopk.ddp.register(wrap(model, **{choice: True}), 0.05, scope=scope)
        train(state.model, sgd(model), range(STEPS), at.rank)
        found[f"{choice}, {scope}"] = [bits(model), expected[scope]]
    return found


def accumulation(at: Place) -> dict[str, Any]:
    """no_sync: the hook sees the sum of the micro-batches, once."""

    def both(model: nn.Module, rank: int, step: int) -> Tensor:
        return loss_of(model, rank, 2 * step) + loss_of(model, rank, 2 * step + 1)

    model = net()
    ddp = wrap(model)
    state = rtopk.ddp.register(ddp, 0.05)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, at.rank, 2 * step).backward()
        loss_of(ddp, at.rank, 2 * step + 1).backward()
        optimizer.step()
    expected = reference(net(), STEPS, at.world, loss=both)
    return {"gap": gap(model, expected), "rounds": state.step, "weights": bits(model)}


def memory_formats(at: Place) -> dict[str, Any]:
    """A channels_last convolution lies in the bucket in another order than its indices say."""

    def conv() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 2))

    def take(model: nn.Module, rank: int, step: int) -> Tensor:
        inputs, _ = batch(rank, step)
        return model(inputs.reshape(-1)[:192].reshape(4, 3, 4, 4)).square().mean()

    # The same numbers in memory order: compare with a contiguous model by tolerance, residuals by name.
    found: dict[str, Any] = {}
    weights, residuals = [], []
    for layout in (torch.contiguous_format, torch.channels_last):
        model = conv().to(memory_format=layout)
        state = rtopk.ddp.register(wrap(model), 0.05, scope="global")
        train(state.model, sgd(model), range(STEPS), at.rank, take)
        weights.append([p.detach().clone() for p in model.parameters()])
        residuals.append(state.state_dict()["memory"]["residual"]["2.weight"])
    found["gap"] = max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True))
    found["residual_gap"] = float((residuals[0] - residuals[1]).abs().max())
    found["residual"] = float(residuals[0].abs().max())
    return found


def half_precision(at: Place) -> dict[str, Any]:
    """A model in bf16 with one layer in fp32: residuals are fp32, replicas stay equal."""
    model = net()
    for number in (0, 2, 3):
        model[number].to(torch.bfloat16)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.inner[4](
                self.inner[3](self.inner[2](self.inner[1](self.inner[0](inputs.bfloat16()))))
            )
            return self.inner[5](hidden.float())

    state = rtopk.ddp.register(wrap(Mixed()), 0.05)
    before = loss_of(state.model, at.rank, 0).item()
    train(state.model, sgd(model), range(30), at.rank)
    return {
        "weights": bits({n: p.float() for n, p in model.named_parameters()}),
        "dtypes": sorted({str(t.dtype) for t in state.state_dict()["memory"]["residual"].values()}),
        "loss": [before, loss_of(state.model, at.rank, 0).item()],
    }


def one_process(at: Place) -> dict[str, Any]:
    """World size 1 is the same code: each rank in a group of its own."""
    groups = [dist.new_group([rank]) for rank in range(at.world)]
    model = net()
    state = rtopk.ddp.register(wrap(model, groups[at.rank]), 0.05)
    train(state.model, sgd(model), range(STEPS), rank=0)
    return {
        "weights": bits(model),
        "expected": bits(reference(net(), STEPS, 1)),
        "received": state.stats.bytes_received,
    }


def two_models(at: Place) -> dict[str, Any]:
    """Two DDP models in one process, one of them with its own options."""
    one, two = net(0), net(1)
    first = rtopk.ddp.register(wrap(one), 0.05)
    second = rtopk.ddp.register(wrap(two), 0.1, scope="bucket")
    for step in range(STEPS):
        for model, state in ((one, first), (two, second)):
            train(state.model, sgd(model), range(step, step + 1), at.rank)
    return {
        "one": [bits(one), bits(reference(net(0), STEPS, at.world))],
        "two": [bits(two), bits(reference(net(1), STEPS, at.world, density=0.1, scope="bucket"))],
    }


def compiled(at: Place) -> dict[str, Any]:
    """torch.compile inside and outside of DDP; the state has the plain model's names."""
    warnings.simplefilter("ignore")  # torch.compile's own
    try:
        return _compiled(at, "aot_eager")
    finally:
        warnings.simplefilter("error")


def compiled_by_inductor(at: Place) -> dict[str, Any]:
    """The same with the real compiler."""
    warnings.simplefilter("ignore")
    return _compiled(at, "inductor")


def _compiled(at: Place, backend: str) -> dict[str, Any]:
    inside, outside, plain = net(), net(), net()
    ddp = wrap(outside, bucket_cap_mb=25)
    whole = torch.compile(ddp, backend=backend)
    states = [
        rtopk.ddp.register(wrap(torch.compile(inside, backend=backend), bucket_cap_mb=25), 0.05),
        rtopk.ddp.register(whole, 0.05),
        rtopk.ddp.register(wrap(plain), 0.05),
    ]
    for model, runs, state in zip(
        (inside, outside, plain), (states[0].model, whole, states[2].model), states, strict=True
    ):
        train(runs, sgd(model), range(3), at.rank)
        assert state.step == 3
    return {
        "gaps": [gap(inside, plain), gap(outside, plain)],
        "weights": bits(inside) + bits(outside),
        "names": [s.layout.names for s in states],
    }


def every_coordinate(at: Place) -> dict[str, Any]:
    """A constant gradient at density 0.1: 60 steps send every position several times."""
    model = nn.Linear(100, 10, bias=False)
    nn.init.zeros_(model.weight)
    ddp = wrap(model)
    state = rtopk.ddp.register(ddp, 0.1)
    counts = torch.zeros(10, 100)
    entries = []
    for _ in range(60):
        model.weight.grad = None
        ddp(torch.ones(1, 100)).sum().backward()
        counts += model.weight.grad != 0
        entries.append(int((model.weight.grad != 0).sum()))
    quarters = [int(part.sum()) for part in counts.flatten().chunk(4)]
    return {
        "least": int(counts.min()),
        "quarters": quarters,
        "entries": [min(entries), max(entries)],
        "k": 100,
        "state": state.stats.entries,
    }


def epochs(at: Place) -> dict[str, Any]:
    """A schedule that counts epochs is told the epoch."""
    model = net()
    state = rtopk.ddp.register(wrap(model), rtopk.warm_up(0.01, steps=3), counts="epochs")
    densities = []
    for step in range(8):
        state.set_epoch(step // 2)
        train(state.model, sgd(model), range(step, step + 1), at.rank)
        densities.append(state.stats.density)
    return {"densities": densities, "weights": bits(model)}


def flushed(at: Place) -> dict[str, Any]:
    """Three sparse steps, one that sends everything, one sparse step; in both scopes. A load forgets the flush."""
    found = {}
    for scope in ("global", "bucket"):
        model = net()
        state = rtopk.ddp.register(wrap(model), 0.05, scope=scope)
        seen, start = [], state.state_dict()
        for step in range(5):
            if step == 3:
                state.flush()
            train(state.model, sgd(model), range(step, step + 1), at.rank)
            seen.append((state.stats.density, state.stats.residual_norm > 0.0))
        weights, again = bits(model), []
        state.load_state_dict(start)
        for step in range(5):
            train(state.model, sgd(model), range(step, step + 1), at.rank)
            again.append(state.stats.density)
        found[scope] = [seen, weights, again]
    return found


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.one, self.two, self.last = nn.Linear(20, 20), nn.Linear(20, 20), nn.Linear(20, 5)
        self.two.weight = self.one.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.two(torch.tanh(self.one(inputs)))))


class Flat(nn.Module):
    """No parameter of more than one dimension: nothing competes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(20)), nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * (inputs * self.weight)[:, :5]


class Sliced(nn.Module):
    """A parameter with gaps in memory: every second column of a larger tensor."""

    def __init__(self, gaps: bool = True) -> None:
        super().__init__()
        whole = torch.randn(20, 10, generator=torch.Generator().manual_seed(3))
        self.first = nn.Parameter(whole[:, ::2] if gaps else whole[:, ::2].contiguous())
        self.second = nn.Parameter(whole[:5, :5].contiguous())

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.first @ self.second


def odd_models(at: Place) -> dict[str, Any]:
    """Tied weights, vectors only, a parameter with gaps."""
    found: dict[str, Any] = {}
    pairs = {"tied": (Tied(), Tied()), "flat": (Flat(), Flat()), "sliced": (Sliced(), Sliced(gaps=False))}
    for (name, (model, twin)), scope in itertools.product(pairs.items(), ("global", "bucket")):
        model, twin = copy.deepcopy(model), copy.deepcopy(twin)
        if name == "sliced":
            model = Sliced()  # a copy of a slice has no gaps
        warnings.simplefilter("ignore")  # DDP's own, about gradients whose strides are not the parameter's
        state = rtopk.ddp.register(wrap(model), 0.05, scope=scope)
        train(state.model, sgd(model, lr=0.01), range(3), at.rank)
        warnings.simplefilter("error")
        expected = reference(twin, 3, at.world, scope=scope, lr=0.01)
        found[f"{name}, {scope}"] = gap(model, expected)
    return found


def what_is_dropped_is_freed(at: Place) -> dict[str, Any]:
    """A DDP model that nobody holds any more goes, with its residuals; one that is held may be copied."""
    model = net()
    ddp = DDP(model)
    alive = [weakref.ref(ddp), weakref.ref(model), weakref.ref(rtopk.ddp.register(ddp, 0.05))]
    train(ddp, sgd(model), range(2), at.rank)
    gc.collect()
    held = [ref() is not None for ref in alive]
    twin = copy.deepcopy(ddp)
    same = bits(twin.module) == bits(model)
    del ddp, model, twin
    gc.collect()
    return {"held": held, "left": [ref() is not None for ref in alive], "copied": same}
