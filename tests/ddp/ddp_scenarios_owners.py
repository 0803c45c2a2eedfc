"""Scenarios about exchange="all-reduce": what the owners keep survives what happens to the ranks."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from ddp_parts import batch, bits, loss_of, net, reference, sgd, train, wrap
from ddp_worker import Place
from torch import Tensor

import rtopk
from rtopk.exchange.owner import Owner
from rtopk.replicas import checkpoint

HOW: dict[str, Any] = {"exchange": "all-reduce", "density": 0.05}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "4bit": {"values": "4bit", "owner_density": 0.1},
    "all": {"owner_density": "all"},
}


def equals_in_process(at: Place) -> dict[str, Any]:
    """More than two ranks: the in-process loop to the bit; and the whole union is the all-gather to the bit."""
    found: dict[str, Any] = {}
    for name, options in VARIANTS.items():
        model = net()
        state = rtopk.ddp.register(wrap(model), **HOW, **options)
        train(state.model, sgd(model), range(4), at.rank)
        found[name] = [bits(model), bits(reference(net(), 4, at.world, **HOW, **options))]
    found["all-gather"] = [found["all"][0], bits(reference(net(), 4, at.world))]
    return found


def counted(at: Place) -> dict[str, Any]:
    """What the statistics say is what the collectives carry to and from other ranks."""
    found = {}
    for owner_density in (None, "all"):
        model, sent, received = net(), [0], [0]
        state = rtopk.ddp.register(wrap(model), **HOW, owner_density=owner_density)
        train(state.model, sgd(model), range(2), at.rank)
        real_swap, real_gather = dist.all_to_all_single, dist.all_gather_single

        def swap(out: Tensor, own: Tensor, got: Any = None, sizes: Any = None, **how: Any) -> Any:
            for count, parts in ((sent, sizes), (received, got)):  # noqa: B023
                parts = parts or [out.numel() // at.world] * at.world
                count[0] += sum(parts) - parts[at.rank]
            return real_swap(out, own, got, sizes, **how)  # noqa: B023

        def gather(out: Tensor, own: Tensor, **how: Any) -> Any:
            sent[0] += own.numel()  # noqa: B023
            received[0] += out.numel() - own.numel()  # noqa: B023
            return real_gather(out, own, **how)  # noqa: B023

        dist.all_to_all_single, dist.all_gather_single = swap, gather
        try:
            train(state.model, sgd(model), range(2, 3), at.rank)
        finally:
            dist.all_to_all_single, dist.all_gather_single = real_swap, real_gather
        stats = state.stats
        found[str(owner_density)] = [stats.bytes_sent, sent[0], stats.bytes_received, received[0]]
    return found


def goes_on(at: Place) -> dict[str, Any]:
    """A new state that loads the old one trains on to the same bits, and starts as others see it."""
    whole = net()
    state = rtopk.ddp.register(wrap(whole), **HOW, scope="bucket")
    train(state.model, sgd(whole), range(3), at.rank)
    saved, weights = state.state_dict(), {n: t.clone() for n, t in whole.state_dict().items()}
    train(state.model, sgd(whole), range(3, 6), at.rank)
    model = net(seed=1)
    model.load_state_dict(weights)
    again = rtopk.ddp.register(wrap(model), **HOW, scope="bucket")
    again.load_state_dict(saved)
    same = bits(again.state_dict()) == bits(saved)
    train(again.model, sgd(model), range(3, 6), at.rank)
    return {
        "same": same,
        "bits": [bits(model), bits(whole)],
        "states": [bits(again.state_dict()), bits(state.state_dict())],
    }


def pending(state: Any) -> Tensor:
    """What the model will still receive from this rank's memory and share."""
    memory = state.state_dict()["memory"]
    flat = torch.cat([t.flatten() for t in memory["residual"].values()]) / state.world_size
    if "owner_residual" in memory:
        flat = flat + torch.cat([t.flatten() for t in memory["owner_residual"].values()])
    return flat


def owners_elastic(at: Place) -> dict[str, Any]:
    """4 -> 2 -> 3 ranks, and back to an all-gather: what the model will receive stays the same."""
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    folder, found = at.folder / "owners", {}
    model = net()
    state = rtopk.ddp.register(wrap(model, groups[4]), **HOW)
    train(state.model, sgd(model), range(4), at.rank)
    state.save(folder / "4")
    expected = pending(state)
    dist.all_reduce(expected)
    found["kept by owners"] = float(
        sum(t.abs().sum() for t in state.state_dict()["memory"]["owner_residual"].values())
    )
    for size, how in ((2, HOW), (3, HOW), (4, {"density": 0.05})):
        dist.barrier()
        total = torch.zeros_like(expected)
        if at.rank < size:
            model = net()
            other = rtopk.ddp.register(wrap(model, groups[size]), **how)
            other.load(folder / "4")
            total = pending(other)
            train(other.model, sgd(model), range(1), at.rank)
        dist.all_reduce(total)
        found[f"to {size}"] = float((total - expected).abs().max())
    dist.barrier()
    return found


def owner_fails(at: Place) -> dict[str, Any]:
    """An owner that cannot reduce makes all ranks raise, a NaN makes all skip, and nothing has changed."""
    logging.getLogger("rtopk").setLevel(logging.ERROR)
    model = net()
    state = rtopk.ddp.register(wrap(model), **HOW)
    train(state.model, sgd(model), range(2), at.rank)
    before, real, found = bits(state.state_dict()), Owner.reduce, {}

    def fail(*args: Any) -> Tensor:
        real(*args)
        raise MemoryError("no room")

    Owner.reduce = fail if at.rank == 1 else real  # type: ignore[method-assign]
    try:
        loss_of(state.model, at.rank, 2).backward()
    except Exception as error:
        found["stopped"] = f"{type(error).__name__}: {error}"
    Owner.reduce = real  # type: ignore[method-assign]
    found["unchanged"] = bits(state.state_dict()) == before
    inputs, _ = batch(at.rank, 3)
    (state.model(inputs).sum() * (float("nan") if at.rank == 2 else 1.0)).backward()
    found["skipped"] = [state.skipped, bits(state.state_dict()) == before, state.refusal]
    state.step += at.rank == 0
    try:
        model.zero_grad()
        loss_of(state.model, at.rank, 2).backward()
    except Exception as error:
        found["apart"] = f"{type(error).__name__}: {error}"
    return found


def read_back(at: Place) -> dict[str, Any]:
    """The file of a rank holds its share."""
    state = checkpoint.read_rank(at.folder / "owners" / "4", at.rank, 4)
    return {"kinds": sorted(state["memory"])}
