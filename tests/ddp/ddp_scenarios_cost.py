"""Scenarios about what a step takes: memory, and the process groups that carry it."""

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp_parts import bits, net, sgd, train, wrap
from ddp_worker import Place
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import rtopk

ENTRIES = 1_000_000  # 4 MB a vector: far above what else moves in a step


def _peak(function: Any) -> int:
    """Return the largest resident size, in bytes, while a function runs."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    function()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def memory(at: Place) -> dict[str, Any]:
    """Peak resident memory of a step with the hook, above that of plain DDP, in vectors of the model."""

    def run(**options: Any) -> float:
        ddp = DDP(nn.Linear(ENTRIES // 1000, 1000, bias=False))

        def steps() -> None:
            for _ in range(2):
                ddp.zero_grad()
                ddp(torch.ones(1, ENTRIES // 1000)).square().mean().backward()

        steps()
        plain = _peak(steps)
        rtopk.ddp.register(ddp, **options)
        return (_peak(steps) - plain) / (4 * ENTRIES)

    found: dict[str, Any] = {}
    cases: dict[str, dict[str, Any]] = {
        "dense": {"dense_steps": 9},
        "quarter": {"density": 0.25},
        "sparse": {},
    }
    for name, options in list(cases.items())[: 1 if at.world == 8 else 3]:
        run(**options)  # compiles, and takes what is taken once in a process
        gc.collect()
        found[name] = round(run(**options), 2)
        gc.collect()
    return found


def without_backend(at: Place) -> dict[str, Any]:
    """init_process_group() without a backend: payloads travel where the parameters are."""
    model = net()
    state = rtopk.ddp.register(wrap(model), 0.05)
    train(state.model, sgd(model), range(3), at.rank)
    return {"backend": dist.get_backend(), "device": str(state.transport.device), "weights": bits(model)}
