"""What differs between the versions of torch that are supported, 2.6 to 2.15, and what all of them get wrong.

No other file asks which torch it is. `make test-versions` runs the library's tests with several of them.
"""

import atexit
import time
from contextlib import suppress
from pathlib import Path
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


# -- the end of the program

GLOO = "pt_gloo_runloop"  # the name of the threads that run Gloo's collectives
TASKS = Path("/proc/self/task")  # Linux; elsewhere nothing is waited for
PATIENCE = 5.0  # seconds


@atexit.register
def let_gloo_finish() -> None:
    """Wait until Gloo's threads are idle, so that none of them needs the interpreter while that ends.

    A collective is done a moment before its thread lets go of its tensors, which takes the interpreter's lock. If
    the interpreter ends in that moment, which a busy machine makes longer, it ends the thread inside a destructor,
    and the process dies of SIGABRT after all work was done (pytorch issue 190489). `destroy_process_group` joins
    the threads only if nothing else holds the group. DDP does, and so do default arguments in torch.distributed.nn,
    which is imported with the first optimizer.
    """
    deadline, idle = time.monotonic() + PATIENCE, 0
    while idle < 3 and time.monotonic() < deadline:  # a thread on its way from one lock to another looks idle
        states = _gloo_states()
        if not states:
            return
        idle = idle + 1 if states.isdisjoint("RD") else 0
        time.sleep(0.001)  # without the lock, which they may be waiting for


def _gloo_states() -> set[str]:
    """Return what Gloo's threads do: S if one sleeps, R or D if one runs or waits for a processor or a disk."""
    states = set()
    for task in TASKS.glob("*/stat"):
        with suppress(OSError):  # it has ended
            name, state = task.read_text().partition("(")[2].rsplit(") ", 1)
            if name == GLOO:
                states.add(state[0])
    return states
