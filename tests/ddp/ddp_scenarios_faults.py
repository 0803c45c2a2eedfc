"""Scenarios about what goes wrong: values that are not finite, ranks that differ, uses that are refused."""

import logging
from typing import Any
from unittest import mock

import torch
from ddp_parts import batch, bits, loss_of, net, sgd, train, wrap
from ddp_worker import Place
from torch import Tensor, nn

import rtopk
from rtopk import Dealt, MomentumCorrection, RAgeK, Threshold
from rtopk.ddp import buckets
from rtopk.replicas import control


def attempt(function: Any, *args: Any, **options: Any) -> str:
    """Return the type and text of what a call raises."""
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def poisoned(model: nn.Module, rank: int, step: int) -> Tensor:
    """On rank 1, step 2, one gradient is NaN."""
    loss = loss_of(model, rank, step)
    if (rank, step) == (1, 2):
        inner = model.module if hasattr(model, "module") else model
        loss = loss + float("nan") * inner[3].weight[0, 0]
    return loss


def not_finite(at: Place) -> dict[str, Any]:
    """NaN on rank 1: nobody's weights, momentum, residual or step moves; then training goes on."""
    found: dict[str, Any] = {}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    for scope in ("global", "bucket"):
        records.clear()
        model = net()
        state = rtopk.ddp.register(wrap(model), 0.05, scope=scope)
        optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
        train(state.model, optimizer, range(2), at.rank)
        before = bits([bits(model), bits(state.state_dict()), bits(optimizer.state_dict())])
        logging.getLogger("rtopk").addHandler(handler)
        train(state.model, optimizer, range(2, 3), at.rank, poisoned)
        logging.getLogger("rtopk").removeHandler(handler)
        after = bits([bits(model), bits(state.state_dict()), bits(optimizer.state_dict())])
        skipped, refusal = (state.skipped, state.skipping, state.step), state.refusal
        train(state.model, optimizer, range(3, 6), at.rank)
        # The same steps, had the bad one never been tried.
        other = net()
        twin = rtopk.ddp.register(wrap(other), 0.05, scope=scope)
        again = sgd(other, momentum=0.9, weight_decay=0.1)
        train(twin.model, again, range(2), at.rank)
        train(twin.model, again, range(3, 6), at.rank)
        found[scope] = {
            "same": before == after,
            "skipped": skipped,
            "said": list(records),
            "refusal": refusal,
            "weights": [bits(model), bits(other)],
            "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        }
    return found


def not_finite_stops(at: Place) -> dict[str, Any]:
    """on_nonfinite="raise" and max_skips raise on all ranks, and leave the state as it was."""
    model = net()
    state = rtopk.ddp.register(wrap(model), 0.05, on_nonfinite="raise")
    train(state.model, sgd(model), range(2), at.rank)
    before = bits(state.state_dict())
    said = attempt(train, state.model, sgd(model), range(2, 3), at.rank, poisoned)
    model = net()
    patient = rtopk.ddp.register(wrap(model), 0.05, max_skips=3)

    def always(model: nn.Module, rank: int, step: int) -> Tensor:
        return poisoned(model, 1, 2)

    many = attempt(train, patient.model, sgd(model), range(9), at.rank, always)
    return {
        "said": said,
        "same": before == bits(state.state_dict()),
        "many": many,
        "skipped": patient.skipped,
    }


def not_finite_in_a_closure(at: Place) -> dict[str, Any]:
    """A closure goes backward inside optimizer.step, as Lightning's does; NaN there is skipped as well."""
    found: dict[str, Any] = {}
    for how in ("positional", "named"):
        model = net()
        state = rtopk.ddp.register(wrap(model), 0.05)
        optimizer = sgd(model, momentum=0.9, weight_decay=0.1)
        log = []
        for step in range(4):

            def closure(step: int = step, optimizer: Any = optimizer, state: Any = state) -> Tensor:
                optimizer.zero_grad()
                loss = poisoned(state.model, at.rank, step)
                loss.backward()
                return loss.detach()

            before = bits([bits(model), bits(optimizer.state_dict())])
            loss = optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
            log.append([before == bits([bits(model), bits(optimizer.state_dict())]), loss is not None])
        found[how] = log
    return found


def broken_off(at: Place) -> dict[str, Any]:
    """Backward breaks off after some messages were sent: what is then saved is the state of before."""
    found: dict[str, Any] = {}

    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Tensor) -> Tensor:
            return inputs.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise ZeroDivisionError("broken layer")

    for memory in ("error-feedback", "momentum-correction"):
        model = net()
        state = rtopk.ddp.register(wrap(model), 0.05, scope="bucket", memory=memory)
        train(state.model, sgd(model), range(3), at.rank)
        before = bits(state.state_dict())
        model[0].register_forward_hook(lambda module, inputs, output: Breaks.apply(output))
        said = attempt(train, state.model, sgd(model), range(3, 4), at.rank)
        sent = state.round is not None and len(state.round.messages)
        saved = state.state_dict()
        again = attempt(state.load_state_dict, saved)
        found[memory] = [said, sent, before == bits(saved), again, before == bits(state.state_dict())]
    return found


def grad_scaler(at: Place) -> dict[str, Any]:
    """A scale that moves every second step changes nothing; an overflow on one rank is skipped by all."""

    def run(scaler: torch.amp.GradScaler, give: bool, scope: str) -> tuple[str, Any]:
        model = net()
        state = rtopk.ddp.register(wrap(model), 0.05, scaler=scaler if give else None, scope=scope)
        optimizer = sgd(model)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(state.model, at.rank, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        return bits(model), state

    found: dict[str, Any] = {}
    for scope in ("global", "bucket"):
        plain, _ = run(torch.amp.GradScaler("cpu", enabled=False), True, scope)
        moving, state = run(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), True, scope)
        untold, _ = run(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), False, scope)
        found[scope] = {"plain": plain, "moving": moving, "untold": untold, "scale": state.scale}
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    state = rtopk.ddp.register(wrap(model), 0.05, scaler=scaler)
    optimizer = sgd(model, momentum=0.9)
    history = []
    for step in range(4):
        before = bits([bits(model), bits(state.state_dict())])
        optimizer.zero_grad()
        loss = loss_of(state.model, at.rank, step)
        if (at.rank, step) == (0, 1):
            loss = loss * 3e38 * 3e38
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        history.append([before == bits([bits(model), bits(state.state_dict())]), scaler.get_scale()])
    found["overflow"] = {
        "history": history,
        "weights": bits(model),
        "skipped": state.skipped,
        "why": state.refusal,
    }
    return found


def autocast(at: Place) -> dict[str, Any]:
    """autocast to bf16 and clipping by the user: replicas equal, loss falls."""
    model = net()
    state = rtopk.ddp.register(wrap(model), 0.05)
    optimizer = sgd(model)
    losses = []
    for step in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            inputs, targets = batch(at.rank, step % 4)
            loss = nn.functional.mse_loss(state.model(inputs).float(), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return {"weights": bits(model), "first": sum(losses[:4]) / 4, "last": sum(losses[-4:]) / 4}


class Own:
    """A selector of the user's, without a repr of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        return rtopk.top_k(vector, k)


def options_differ(at: Place) -> dict[str, Any]:
    """Every rank names what differs; the group works afterwards."""
    odd = at.rank == 1
    tries: dict[str, dict[str, Any]] = {
        "density": {"density": 0.01 if odd else 0.02},
        "one_step": {"density": (lambda step: 0.02 if step == 5 else 0.01) if odd else (lambda step: 0.01)},
        "own_selector": {"selector": Own(3.0 if odd else 2.0)},
        "schedule": {"density": (lambda step: 0.01 if step < 50 else 0.02) if odd else (lambda step: 0.01)},
        "seed": {"seed": 5 if odd else 4},
        "mean": {"mean": "received" if odd else "nodes"},
        "scope": {"scope": "bucket" if odd else "global"},
        "memory": {"memory": (lambda: MomentumCorrection(0.5)) if odd else (lambda: MomentumCorrection(0.9))},
        "selector": {"selector": rtopk.TopK() if odd else rtopk.RTopK(r_over_k=3)},
        "dense": {"dense": rtopk.layout.nothing if odd else rtopk.layout.one_dimensional},
        "one_is_wrong": {"density": 1.5 if odd else 0.5},
        "all_are_wrong": {"density": 1.5},
        "wrong_scope": {"scope": "layer"},
    }
    found = {name: attempt(rtopk.ddp.register, wrap(net()), **options) for name, options in tries.items()}
    model = net()
    table = [0.25, 0.05]  # a schedule that ends with the job
    state = rtopk.ddp.register(wrap(model), lambda step: table[step])
    train(state.model, sgd(model), range(2), at.rank)
    return {"said": found, "weights": bits(model)}


def drift(at: Place) -> dict[str, Any]:
    """verify_every: one of rank 1's weights changes; all ranks stop at the next check."""
    model = net()
    state = rtopk.ddp.register(wrap(model), 0.05, verify_every=3)
    train(state.model, sgd(model), range(4), at.rank)
    if at.rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] += 1e-4  # one bit might round away in the steps before the check
    said = [attempt(train, state.model, sgd(model), range(s, s + 1), at.rank) for s in (4, 5, 6)]
    return {"said": said, "step": state.step}


def refused(at: Place) -> dict[str, Any]:
    """What cannot work is refused with the reason."""
    register = rtopk.ddp.register
    twice = wrap(net())
    register(twice, 0.05)
    sparse = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    momentum, other = wrap(net()), wrap(net())
    own_precision = wrap(net())
    own_precision.mixed_precision = object()  # what DDP(mixed_precision=...) leaves; on CPU it cannot be made
    complex_model = nn.Linear(3, 3, dtype=torch.complex64)
    thawed = net()
    thawed[0].requires_grad_(False)
    wrapped = wrap(thawed)
    thawed[0].requires_grad_(True)
    found = {
        "thawed": attempt(register, wrapped, 0.05),
        "not_ddp": attempt(register, net(), 0.05),
        "twice": attempt(register, twice, 0.05),
        "sparse": attempt(register, wrap(sparse), 0.05),
        "mixed_precision": attempt(register, own_precision, 0.05),
        "complex": attempt(register, wrap(complex_model), 0.05),
        "memory": attempt(register, wrap(net()), 0.05, memory="velocity"),
        "no_memory": attempt(register, wrap(net()), 0.05, memory=3),
        "no_density": attempt(register, wrap(net()), None),
        "half_steps": attempt(register, wrap(net()), 0.05, dense_steps=1.5),
        "no_seed": attempt(register, wrap(net()), 0.05, seed="a"),
        "not_its_own": attempt(register, wrap(net()), 0.05, optimizer=sgd(other, momentum=0.9)),
        "values": attempt(register, wrap(net()), 0.05, values="fp64"),
        "dealt": attempt(register, wrap(net()), 0.05, selector=Dealt(at.world + 1)),
        "threshold": attempt(register, wrap(net()), 0.05, selector=Threshold(0.1)),
        "aged": attempt(register, wrap(net()), 0.05, selector=RAgeK(nodes=at.world)),
        "clip_in_bucket": attempt(
            register, wrap(net()), 0.05, scope="bucket", memory=lambda: MomentumCorrection(clip_norm=1.0)
        ),
        "momentum": attempt(
            register, momentum, 0.05, memory=MomentumCorrection, optimizer=sgd(momentum, momentum=0.9)
        ),
        "nadam": attempt(
            register,
            other,
            0.05,
            memory="momentum-correction",
            optimizer=torch.optim.NAdam(other.parameters()),
        ),
    }
    model = net()
    state = register(wrap(model), 0.05, memory="momentum-correction")
    found["momentum_in_step"] = attempt(train, state.model, sgd(model, momentum=0.9), range(1), at.rank)
    adam = torch.optim.Adam(model.parameters())
    found["adam_in_step"] = attempt(train, state.model, adam, range(1, 2), at.rank)
    found["plain_sgd"] = attempt(train, state.model, sgd(model), range(2, 3), at.rank)
    other = net(1)
    plain = wrap(other)
    found["other_model"] = attempt(train, plain, sgd(other, momentum=0.9), range(1), at.rank)
    joining = net()
    state = register(wrap(joining), 0.05)

    def uneven() -> None:
        with state.model.join():
            loss_of(state.model, at.rank, 0).backward()

    found["join"] = attempt(uneven)
    return {"said": found}


class TwoHeads(nn.Module):
    """The second head takes part only where asked."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = net(), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        hidden = self.body(inputs)
        return self.one(hidden) + (self.two(hidden) if both else 0.0)


def unused(at: Place) -> dict[str, Any]:
    """Step 1: head two is unused on all ranks; step 2: on rank 1 only. Its residual waits."""
    found: dict[str, Any] = {}
    for scope in ("global", "bucket"):
        model = TwoHeads()
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        ddp = wrap(model, find_unused_parameters=True)
        # Every entry of the residual is worth sending, so a drain would show at once.
        # Draws, since the half that is largest might leave out one head.
        drawn = rtopk.RTopK(r_over_k=2)
        state = rtopk.ddp.register(ddp, 0.5, selector=drawn, scope=scope, memory="momentum-correction")
        both = [[True, True], [False, False], [True, False], [True, True]]  # [step][rank]
        log = []
        for step, use in enumerate(both):
            before = state.state_dict()["memory"]
            model.zero_grad()
            ddp(batch(at.rank, step)[0], use[at.rank]).square().mean().backward()
            after = state.state_dict()["memory"]
            log.append(
                {
                    "kept": all(
                        bits(before[kind]["two.weight"]) == bits(after[kind]["two.weight"]) for kind in before
                    ),
                    "held": float(before["residual"]["two.weight"].abs().max()),
                    "no_gradient": model.two.weight.grad is None,
                    "others_moved": bits(before["residual"]["one.weight"])
                    != bits(after["residual"]["one.weight"]),
                    "gradient": bits(model.two.weight.grad) if model.two.weight.grad is not None else "",
                }
            )
        found[scope] = log
    return found


def frozen(at: Place) -> dict[str, Any]:
    """A layer frozen half-way: its residual and weights rest, the others go on, and it can thaw."""
    model = net()
    ddp = wrap(model, find_unused_parameters=True)
    state = rtopk.ddp.register(ddp, 0.05)
    optimizer = sgd(model)
    train(ddp, optimizer, range(2), at.rank)
    kept = (bits(model[0].weight), bits(state.state_dict()["memory"]["residual"]["0.weight"]))
    model[0].requires_grad_(False)
    other = bits(model[5].weight)
    train(ddp, optimizer, range(2, 4), at.rank)
    frozen = (bits(model[0].weight), bits(state.state_dict()["memory"]["residual"]["0.weight"]))
    moved = other != bits(model[5].weight)
    model[0].requires_grad_(True)
    train(ddp, optimizer, range(4, 6), at.rank)
    thawed = kept[0] != bits(model[0].weight)
    return {"rested": kept == frozen, "moved": moved, "thawed": thawed, "weights": bits(model)}


def failure_on_one_rank(at: Place) -> dict[str, Any]:
    """A selector that breaks on rank 1 in step 1: it raises its error, the others say who."""

    class Breaks:
        def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
            if at.rank == 1 and state.step == 1:
                raise ZeroDivisionError("broken selector")
            return rtopk.top_k(vector, k)

        def __repr__(self) -> str:
            return "Breaks()"

    model = net()
    state = rtopk.ddp.register(wrap(model), 0.05, selector=Breaks())
    train(state.model, sgd(model), range(1), at.rank)
    before = bits(state.state_dict())
    said = attempt(train, state.model, sgd(model), range(1, 2), at.rank)
    return {"said": said, "same": before == bits(state.state_dict()), "elsewhere": _out_of_memory(at)}


def _out_of_memory(at: Place) -> dict[str, str]:
    """Rank 1 runs out of memory before it has selected anything: where a round begins, is fed, or is checked."""

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("full")

    said = {}
    for place in ("snapshot", "put", "hash_weights", "mean_in"):
        model = net()
        state = rtopk.ddp.register(wrap(model), 0.05, verify_every=2)
        train(state.model, sgd(model), range(2), at.rank)
        owner: Any = {"hash_weights": control, "mean_in": buckets}.get(
            place, state.groups[0].sparsifier.memory
        )
        with mock.patch.object(owner, place, full if at.rank == 1 else getattr(owner, place)):
            said[place] = attempt(train, state.model, sgd(model), range(2, 3), at.rank)
        train(state.model, sgd(model), range(2, 3), at.rank)  # and goes on
        assert state.step == 3
    return said


def tensorboard(at: Place) -> dict[str, Any]:
    """The statistics arrive in a real TensorBoard file."""
    import warnings

    model = net()
    state = rtopk.ddp.register(wrap(model), 0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter

        folder = at.folder / f"tensorboard-{at.rank}"
        writer = SummaryWriter(folder)
        state.log_to(writer, every=2)
        train(state.model, sgd(model), range(5), at.rank)
        writer.close()
        events = EventAccumulator(str(folder)).Reload()
        tags = events.Tags()["scalars"]
        steps = [event.step for event in events.Scalars("rtopk/bytes_sent")]
        last = events.Scalars("rtopk/residual_norm")[-1].value
    return {"tags": tags, "steps": steps, "norm": [last, state.stats.residual_norm]}
