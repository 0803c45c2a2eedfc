"""One line for PyTorch DDP: `rtopk.ddp.register(ddp_model, density=0.001)`.

From then on backward exchanges rTop-k payloads instead of whole gradients. What is not sent stays in a
residual and is sent later. Nothing else in the training loop changes. See docs/ddp.md.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by identity.

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from rtopk import layout
from rtopk.aggregate import Mean
from rtopk.ddp.control import GradientNotFinite, RanksDisagree
from rtopk.ddp.optimizers import refuse_momentum, watch
from rtopk.ddp.options import Counts, OnNonFinite, Options, Scope, compare
from rtopk.ddp.refusals import refuse, unwrap
from rtopk.ddp.rounds import take
from rtopk.ddp.state import Scaler, State
from rtopk.ddp.stats import Stats
from rtopk.memory import Memory
from rtopk.schedule import Schedule
from rtopk.select import Rule
from rtopk.state_file import StateError
from rtopk.transport import AllGather

__all__ = [
    "GradientNotFinite",
    "RanksDisagree",
    "State",
    "StateError",
    "Stats",
    "hook",
    "register",
]


def hook(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Exchange a bucket; DDP calls this."""
    return take(state, bucket)


def register(
    model: nn.Module,
    density: float | Schedule = 0.001,
    *,
    selector: Rule | None = None,
    memory: str | Callable[[], Memory] = "error-feedback",
    values: str = "fp32",
    rounding: Literal["nearest", "stochastic"] = "nearest",
    mean: Mean | None = None,
    weights: Sequence[float] | None = None,
    clip_norm: float | None = None,
    scope: Scope = "global",
    dense: layout.DenseRule = layout.one_dimensional,
    dense_steps: int = 0,
    counts: Counts = "steps",
    seed: int = 0,
    verify_every: int = 0,
    on_nonfinite: OnNonFinite = "skip",
    max_skips: int = 50,
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    attach: bool = True,
) -> State:
    """Make a DDP model exchange rTop-k payloads. Call it on every rank, with the same options.

    density: share of the entries to send, in addition to the dense ones, or a schedule such as rtopk.warm_up.
    selector: which entries to send. Default: k drawn from the 2 k largest, RTopK(r_over_k=2); on one rank, the k
        largest. The paper's is RTopK(nodes=world size); with Dealt(world size) no two ranks send the same entry.
    memory: "error-feedback", "momentum-correction", "none", or a function that returns a memory.
    values: how values are sent: unchanged as "fp32", or rounded to "fp16", "bf16", "int8", "4bit", "2bit".
    rounding: "nearest" or "stochastic"; the rounding error stays in the residual.
    mean: "nodes" divides by the world size, "received" by the number of ranks that sent the entry. Default:
        "nodes", or "received" without a memory.
    weights: the ranks' weights in the mean, for instance their numbers of examples; equal by default.
    clip_norm: clip each rank's gradient to this norm before it is added to the memory, as DGC does.
    scope: "global" selects over the whole model, with one collective at the end of backward; "bucket" selects
        within each tensor and sends each bucket during backward.
    dense: which tensors are always sent in full; one-dimensional ones (biases, norms) by default.
    dense_steps: send everything for this many steps first; the schedule starts after them.
    counts: what the schedule counts: "steps", or "epochs" as set by state.set_epoch.
    seed: the seed of all draws; each rank and step derives its own.
    verify_every: compare a hash of the weights between ranks every so many steps; 0 is never.
    on_nonfinite: if a rank's gradient has NaN or Inf, "skip" the step on all ranks or "raise" on all.
    max_skips: raise after this many skipped rounds in a row.
    scaler: the GradScaler of the loop, if it has one.
    optimizer: if given, it is checked now rather than in its first step.
    attach: register the hook with DDP; False leaves that to a framework.
    """
    ddp = unwrap(model)
    transport = AllGather(ddp.process_group, next(ddp.parameters()).device)
    refusal: Exception | None = None
    description: dict[str, str] = {}
    try:
        refuse(ddp, attach)
        options = Options.check(
            transport.nodes,
            density,
            selector,
            memory,
            values=values,
            rounding=rounding,
            mean=mean,
            weights=None if weights is None else tuple(map(float, weights)),
            clip_norm=clip_norm,
            scope=scope,
            dense=dense,
            dense_steps=dense_steps,
            counts=counts,
            seed=seed,
            verify_every=verify_every,
            on_nonfinite=on_nonfinite,
            max_skips=max_skips,
        )
        state = State(ddp, options, transport, scaler)
        if optimizer is not None and state.corrects_momentum:
            refuse_momentum(optimizer, state)
        description = {**options.describe(), "parameters": f"layout {state.layout.fingerprint:016x}"}
    except Exception as error:
        refusal = error
    compare(transport, description, refusal)
    watch(state)
    if attach:
        ddp.register_comm_hook(state, hook)
    return state
