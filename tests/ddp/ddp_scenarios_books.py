"""Random loops over two models with one trunk: what came in is applied, waits in gradients or is kept back.

Gradients do not depend on weights, so the sums can be followed: after every operation weights moved + gradients
waiting + mean residual = mean of all gradients that went into an exchange which all ranks took.
"""

import logging
import random
from typing import Any

import torch
import torch.distributed as dist
from ddp_parts import wrap
from ddp_worker import Place
from torch import Tensor, nn

import rtopk
from rtopk.seed import generator

OPERATIONS = ["good"] * 4 + ["bad", "local", "step", "step", "clear"]
CASES: dict[str, dict[str, Any]] = {
    "global": {"scope": "global"},
    "bucket, views": {"scope": "bucket", "gradient_as_bucket_view": True, "in_place": True},
    "all-reduce": {"scope": "global", "exchange": "all-reduce"},
    "all-reduce, unused": {
        "scope": "bucket",
        "find_unused_parameters": True,
        "exchange": "all-reduce",
        "owner_density": 0.2,
    },
    "unused, raises": {"scope": "global", "find_unused_parameters": True, "on_nonfinite": "raise"},
}


class Linear(nn.Module):
    """The sum of weights times given numbers, which are then the gradients."""

    def __init__(self, trunk: nn.Parameter) -> None:
        super().__init__()
        self.trunk = trunk
        self.head, self.bias = nn.Parameter(torch.zeros(6, 11)), nn.Parameter(torch.zeros(4))

    def forward(self, numbers: list[Tensor]) -> Tensor:
        parts = [(p * n).sum() for p, n in zip(self.parameters(), numbers, strict=True)]
        return torch.stack(parts).sum()


def books(at: Place) -> dict[str, Any]:
    logging.getLogger("rtopk").setLevel(logging.ERROR)
    return {name: _run(at, seed, **how) for seed, (name, how) in enumerate(CASES.items())}


def _run(
    at: Place,
    seed: int,
    scope: str,
    in_place: bool = False,
    on_nonfinite: str = "skip",
    exchange: str = "all-gather",
    owner_density: float | None = None,
    **ddp: bool,
) -> dict[str, Any]:
    rng = random.Random(seed)  # the same on all ranks
    trunk = nn.Parameter(torch.zeros(7, 9))
    models = [Linear(trunk), Linear(trunk)]
    states = [
        rtopk.ddp.register(
            wrap(model, **ddp),
            0.3,
            scope=scope,
            on_nonfinite=on_nonfinite,
            exchange=exchange,
            owner_density=owner_density,
        )
        for model in models
    ]
    parameters = list(dict.fromkeys(p for model in models for p in model.parameters()))
    optimizers = [torch.optim.SGD(part, lr=1.0) for part in (parameters[:1], parameters[1:])]
    came, local = ({p: torch.zeros_like(p) for p in parameters} for _ in range(2))
    waits: int | None = None  # the model with gradients of no_sync, which nobody else has
    worst, done = 0.0, dict.fromkeys(OPERATIONS, 0)
    for number in range(60):
        what, which = rng.choice(OPERATIONS), rng.randrange(2)
        held = {p: p.grad for p in parameters if p.grad is not None and not bool(p.grad.isnan().any())}
        spoilt = any(p.grad is not None and p not in held for p in parameters)
        if waits is not None and (what in ("step", "clear") or which != waits):
            continue  # local gradients must be exchanged first, or replicas drift apart
        if spoilt and what in ("good", "local"):
            what = "clear"
        done[what] += 1
        model, state = models[which], states[which]
        draw = generator(seed, number, at.rank)
        numbers = [torch.randn(p.shape, generator=draw) for p in model.parameters()]
        if what == "local":
            with state.model.no_sync():
                state.model(numbers).backward()
            waits = which
        elif what in ("good", "bad"):
            factor = float("nan") if what == "bad" and at.rank == rng.randrange(2) else 1.0
            try:
                (factor * state.model(numbers)).backward()
            except rtopk.ddp.GradientNotFinite:
                assert what == "bad"
            waits = None
        elif what == "step":  # one of the two
            optimizers[which].step()
            optimizers[which].zero_grad(set_to_none=not in_place)
        else:
            for p, gradient in held.items():
                came[p] -= gradient
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=not in_place)
        for p, n in zip(model.parameters(), numbers, strict=True):
            if what == "local":
                local[p] += n
            elif what in ("good", "bad"):
                came[p] += _mean(local[p] + n) if what == "good" else 0.0
                local[p].zero_()
        kept = {p: torch.zeros_like(p) for p in parameters}
        for state in states:
            memory = state.state_dict()["memory"]
            for name, residual in memory["residual"].items():
                kept[state.parameters[name]] += residual
            for name, residual in memory.get("owner_residual", {}).items():
                kept[state.parameters[name]] += at.world * residual  # it is kept for all
        for p in parameters:
            lost = p.grad is None or bool(p.grad.isnan().any())
            waiting = torch.zeros_like(p) if lost else p.grad - local[p]
            balance = came[p] + p.detach() - waiting - _mean(kept[p])
            worst = max(worst, float(balance.abs().max()))
    return {"worst": worst, "done": done, "weights": [p.tolist() for p in parameters]}


def _mean(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
