"""What differs between the versions of torch that are supported, 2.6 to 2.15: the only place that asks.

`make test-versions` runs the library's tests with several of them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rtopk

if not hasattr(rtopk, "_ENGINES"):
    raise ImportError(
        f"{rtopk.__file__} is of another project named rtopk (row-wise top-k on CUDA), installed over this one; "
        "delete that folder and install each into an environment of its own"
    )

FSDP = (2, 13)  # the oldest torch that `rtopk.fsdp` was run with: it uses names of FSDP2 that are not public


def version() -> tuple[int, int]:
    """Return major and minor version of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def require_torch(least: tuple[int, int], what: str) -> None:
    """Raise RuntimeError if torch is older than something needs."""
    if version() < least:
        raise RuntimeError(
            f"{what} needs torch {least[0]}.{least[1]} or newer, found {torch.__version__}; "
            f"pip install 'torch>={least[0]}.{least[1]}'"
        )


def all_gather_single(arrived: Tensor, own: Tensor, group: dist.ProcessGroup | None = None) -> Any:
    """Start to gather tensors of one size from all ranks into one; return what to wait for."""
    # torch 2.13 renamed it, and warns about the old name.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(arrived, own, group=group, async_op=True)
