"""Scenarios about checkpoints: resume in fresh processes, another number of ranks, files that do not fit."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_parts import bits, net, sgd, train, wrap
from ddp_scenarios_faults import attempt
from ddp_worker import Place
from torch import Tensor, nn

import rtopk
from rtopk.replicas import checkpoint

TOTAL = 4
# Stopped after 1 step DDP has not rebuilt its buckets yet; after 2 it has.
VARIANTS = list(itertools.product(("global", "bucket"), ("error-feedback", "momentum-correction"), (1, 2)))


def _start(at: Place, scope: str, memory: str) -> tuple[nn.Module, torch.optim.Optimizer, rtopk.ddp.State]:
    model = net()
    state = rtopk.ddp.register(wrap(model), rtopk.warm_up(0.05, steps=3), scope=scope, memory=memory)
    return model, sgd(model, weight_decay=0.01), state


def _folder(at: Place, *variant: object) -> Path:
    return at.folder / "resume" / "-".join(map(str, variant))


def first_half(at: Place) -> dict[str, Any]:
    """Train all steps undisturbed; and train some, save and leave."""
    found = {}
    for variant in VARIANTS:
        scope, memory, stop = variant
        model, optimizer, state = _start(at, scope, memory)
        train(state.model, optimizer, range(TOTAL), at.rank)
        found[str(variant)] = {"weights": bits(model), "state": bits(state.state_dict())}
        model, optimizer, state = _start(at, scope, memory)
        train(state.model, optimizer, range(stop), at.rank)
        folder = _folder(at, *variant)
        state.save(folder)
        if at.rank == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "model.pt"
            )
        found[str(variant)]["saved"] = bits(state.state_dict()["memory"])
    return found


def second_half(at: Place) -> dict[str, Any]:
    """Go on in fresh processes."""
    found = {}
    for variant in VARIANTS:
        scope, memory, stop = variant
        model, optimizer, state = _start(at, scope, memory)
        saved = torch.load(_folder(at, *variant) / "model.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load(_folder(at, *variant))
        train(state.model, optimizer, range(stop, TOTAL), at.rank)
        found[str(variant)] = {"weights": bits(model), "state": bits(state.state_dict())}
    return found


def switch_scope(at: Place) -> dict[str, Any]:
    """A state is keyed by parameter, so one of scope 'global' goes on in scope 'bucket'."""
    _, optimizer, state = _start(at, "global", "error-feedback")
    train(state.model, optimizer, range(2), at.rank)
    other = rtopk.ddp.register(wrap(net()), rtopk.warm_up(0.05, steps=3), scope="bucket")
    other.load_state_dict(state.state_dict())
    return {"same": bits(other.state_dict()) == bits(state.state_dict())}


def does_not_fit(at: Place) -> dict[str, Any]:
    """Files and states that must be refused, with the state left as it was."""
    _, optimizer, state = _start(at, "global", "error-feedback")
    train(state.model, optimizer, range(2), at.rank)
    good = at.folder / "fit" / "good"
    state.save(good)
    dist.barrier()
    train(state.model, optimizer, range(2, 3), at.rank)
    before = bits(state.state_dict())
    found: dict[str, Any] = {}

    def spoil(name: str, change: Any) -> None:
        folder = at.folder / "fit" / name
        if at.rank == 0:
            shutil.copytree(good, folder)
            change(folder)
        dist.barrier()
        found[name] = attempt(state.load, folder)

    one = checkpoint.file_name(1, at.world)
    spoil("truncated", lambda f: (f / one).write_bytes((f / one).read_bytes()[:-100]))
    spoil("empty", lambda f: (f / one).write_bytes(b""))
    spoil("flipped", lambda f: (f / one).write_bytes(_flip((f / one).read_bytes())))
    spoil("swapped", lambda f: shutil.copy(f / checkpoint.file_name(0, at.world), f / one))
    spoil("missing", lambda f: (f / one).unlink())
    spoil("steps", lambda f: checkpoint.save({**checkpoint.read(f / one), "step": 7}, f))
    spoil(
        "other_seed",
        lambda f: [checkpoint.save({**checkpoint.read(p), "seed": 9}, f) for p in f.glob("*.state")],
    )
    wider = net(hidden=48)
    wide = rtopk.ddp.register(wrap(wider), 0.05)
    found["other_model"] = attempt(wide.load, good)
    velocity = rtopk.ddp.register(wrap(net()), 0.05, memory="momentum-correction")
    found["other_memory"] = attempt(velocity.load, good)
    states = [checkpoint.read(good / checkpoint.file_name(rank, at.world)) for rank in range(at.world)]
    found["next_rank"] = attempt(state.load_state_dict, states[1 - at.rank])
    found["nan"] = attempt(state.load_state_dict, _with_nan(states[at.rank]))
    found["format"] = attempt(state.load_state_dict, {"format": 0})
    same = before == bits(state.state_dict())
    partial = sorted(path.name for path in good.iterdir())
    return {"said": found, "same": same, "files": partial, "loads": attempt(state.load, good)}


def own_disks(at: Place) -> dict[str, Any]:
    """Machines that share no disk: each rank's folder holds its own file; and a folder of two jobs."""
    _, optimizer, state = _start(at, "global", "error-feedback")
    train(state.model, optimizer, range(2), at.rank)
    before = bits(state.state_dict())
    own = at.folder / f"disk-of-{at.rank}"
    state.save(own)
    train(state.model, optimizer, range(2, 3), at.rank)
    found: dict[str, Any] = {"said": attempt(state.load, own), "same": before == bits(state.state_dict())}
    # Rank 1 finds, at the same step, the set of a job with one rank only; rank 0 its own.
    if at.rank == 1:
        alone = {**checkpoint.read(own / checkpoint.file_name(1, 2)), "rank": 0, "world_size": 1}
        checkpoint.save(alone, own)
    found["jobs"] = attempt(state.load, own)
    if at.rank == 1:  # what no rank could foresee must not leave the others waiting
        checkpoint.save({**alone, "memory": ["no tensors"]}, own)
    found["strange"] = attempt(state.load, own)
    found["unchanged"] = before == bits(state.state_dict())
    return found


def _flip(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]


def _with_nan(state: dict[str, Any]) -> dict[str, Any]:
    residual = {name: tensor.clone() for name, tensor in state["memory"]["residual"].items()}
    residual["0.weight"][0, 0] = float("nan")
    return {**state, "memory": {"residual": residual}}


def distributed_checkpoint(at: Place) -> dict[str, Any]:
    """Save and load through torch.distributed.checkpoint: every rank gets its own residuals back."""
    import warnings

    import torch.distributed.checkpoint as dcp

    model, optimizer, state = _start(at, "global", "error-feedback")
    train(state.model, optimizer, range(2), at.rank)
    fresh_model, _, fresh = _start(at, "global", "error-feedback")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        dcp.save({"model": model.state_dict(), "rtopk": state.sharded()}, checkpoint_id=at.folder / "dcp")
        loaded = {"model": fresh_model.state_dict(), "rtopk": fresh.sharded()}
        dcp.load(loaded, checkpoint_id=at.folder / "dcp")
        found = {"saved": bits(state.state_dict()), "loaded": bits(fresh.state_dict()), "step": fresh.step}
        third = _start(at, "global", "momentum-correction")[2]
        dcp.save({"rtopk": third.sharded()}, checkpoint_id=at.folder / "dcp-velocity")
        found["others"] = attempt(
            dcp.load, {"rtopk": fresh.sharded()}, checkpoint_id=at.folder / "dcp-velocity"
        )
        # As it was written before there was a digest: the plain state under this rank's key.
        plain = {fresh.sharded()._key: state.state_dict()}
        dcp.save({"rtopk": plain}, checkpoint_id=at.folder / "dcp-old")
        _, _, third = _start(at, "global", "error-feedback")
        dcp.load({"rtopk": third.sharded()}, checkpoint_id=at.folder / "dcp-old")
        found["old"] = bits(third.state_dict())
        # One bit of this rank's residual.
        before = bits(fresh.state_dict())
        residual = state.state_dict()["memory"]["residual"]["0.weight"].numpy().tobytes()
        path = next(p for p in (at.folder / "dcp").glob("*.distcp") if residual in p.read_bytes())
        raw = path.read_bytes()
        place = raw.index(residual) + 8
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        dist.barrier()
        damaged = {"model": fresh_model.state_dict(), "rtopk": fresh.sharded()}
        found["flipped"] = attempt(dcp.load, damaged, checkpoint_id=at.folder / "dcp")
        found["same"] = before == bits(fresh.state_dict())
    return found


def elastic(at: Place) -> dict[str, Any]:
    """4 -> 2 -> 3 ranks: what the model will receive from the residuals stays the same."""
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    found: dict[str, Any] = {}
    previous = None
    for size in (4, 2, 3):
        folder = at.folder / "elastic" / str(size)
        if at.rank < size:
            model = net()
            state = rtopk.ddp.register(wrap(model, groups[size]), 0.05, memory="momentum-correction")
            if previous is not None:
                state.load(previous)
                state.save(folder / "as-loaded")
            found[f"loaded_{size}"] = state.step
            train(state.model, sgd(model), range(2), at.rank)
            state.save(folder)
        dist.barrier()
        if previous is not None:
            found[f"to_{size}"] = {
                kind: _apart(_pending(previous, kind), _pending(folder / "as-loaded", kind))
                for kind in ("residual", "velocity")
            }
        previous = folder
    # What arrives in fact: a round of zero gradients at density 1 hands out the mean of all residuals.
    expected = _pending(previous, "residual")
    if at.rank < 2:
        model = net()
        state = rtopk.ddp.register(wrap(model, groups[2]), 1.0, memory="error-feedback")
        halves = _only_residual(at.folder / "elastic" / "plain", previous, at.rank)
        dist.barrier(groups[2])
        state.load(halves)
        (0.0 * sum(p.sum() for p in state.model(torch.zeros(1, 20)).unbind())).sum().backward()
        arrived = torch.cat([p.grad.flatten() for p in model.parameters()])
        found["arrived"] = _apart(expected, arrived)
        found["size"] = float(expected.abs().max())
    dist.barrier()
    return found


def copied_over(at: Place) -> dict[str, Any]:
    """Rank 1's file lies in the place of another rank's, and the number of ranks changes."""
    groups = {size: dist.new_group(list(range(size))) for size in (2, 4)}
    found: dict[str, Any] = {}
    for old, new, victim in ((4, 2, 3), (2, 4, 0)):
        folder = at.folder / "copied" / str(old)
        if at.rank < old:
            state = rtopk.ddp.register(wrap(net(), groups[old]), 0.05)
            train(state.model, sgd(state.model), range(2), at.rank)
            state.save(folder)
        dist.barrier()
        if at.rank == 0:
            shutil.copy(folder / checkpoint.file_name(1, old), folder / checkpoint.file_name(victim, old))
        dist.barrier()
        if at.rank < new:
            other = rtopk.ddp.register(wrap(net(), groups[new]), 0.05)
            before = bits(other.state_dict())
            said = attempt(other.load, folder)
            found[f"{old} to {new}"] = [said, before == bits(other.state_dict())]
        dist.barrier()
    # What a framework keeps in one file: a rank that is there twice.
    one = rtopk.ddp.register(wrap(net()), 0.05).state_dict()
    states = [{**one, "rank": rank, "world_size": 2} for rank in (0, 0)]
    alone = rtopk.ddp.register(wrap(net()), 0.05)
    found["twice"] = attempt(checkpoint.scatter, alone, states)
    return found


def _only_residual(folder: Path, source: Path, rank: int) -> Path:
    if rank == 0:
        for path in sorted(source.glob("*.state")):
            state = checkpoint.read(path)
            checkpoint.save({**state, "memory": {"residual": state["memory"]["residual"]}}, folder)
    return folder


def _pending(folder: Path, kind: str) -> Tensor:
    """Return the mean over the ranks of a job of what they keep back."""
    states = [checkpoint.read(path) for path in sorted(folder.glob("*.state"))]
    vectors = [
        torch.cat([tensor.flatten() for tensor in _ordered(state["memory"][kind])]) for state in states
    ]
    return torch.stack(vectors).double().sum(0) / states[0]["world_size"]


def _ordered(tensors: dict[str, Tensor]) -> list[Tensor]:
    return [tensors[name] for name, _ in net().named_parameters()]


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())
