"""One line for PyTorch DDP: `rtopk.ddp.register(ddp_model, density=0.001, optimizer=optimizer)`.

From then on backward exchanges sparse payloads instead of whole gradients. What is not sent stays in a
residual and is sent later. Nothing else in the training loop changes. See docs/ddp.md.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by identity.

import torch
import torch.distributed as dist
from torch import nn

from rtopk.ddp.buckets import State, take
from rtopk.ddp.refusals import refuse, unwrap
from rtopk.replicas.control import GradientNotFinite, RanksDisagree
from rtopk.replicas.options import Options, takes
from rtopk.replicas.state import Stats, make_alike
from rtopk.state_file import StateError
from rtopk.transport import AllGather

__all__ = [
    "GradientNotFinite",
    "Options",
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


@takes(Options)
def register(model: nn.Module, options: Options) -> State:
    """Make a DDP model exchange rTop-k payloads. Call it on every rank, with the same options."""
    ddp = unwrap(model)
    transport = AllGather(ddp.process_group, next(ddp.parameters()).device)

    def make() -> State:
        refuse(ddp, options.attach)
        return State(ddp, options.resolved(transport.nodes), transport)

    state = make_alike(transport, make)
    if options.attach:
        ddp.register_comm_hook(state, hook)
    return state
