"""examples/plain.py with an accident: rank 1 kills itself with SIGKILL in the middle of a step.

It happens once, in the first life of the job, when step 47's second bucket arrives: rank 0 is then inside the
same backward pass and waits for a message that will not come. RTOPK_TEST_EXCHANGE names the exchange.
"""

import functools
import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rtopk.ddp

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain.py"
plain_hook = rtopk.ddp.hook


def dying_hook(state, bucket):  # type: ignore[no-untyped-def]
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life and dist.get_rank() == 1 and state.step == 47 and bucket.index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain_hook(state, bucket)


class SmallBuckets(DistributedDataParallel):
    """So that a step has several buckets, and a middle."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, bucket_cap_mb=0.001)


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("plain", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    rtopk.ddp.hook = dying_hook if os.environ.get("RTOPK_TEST_DIES", "1") == "1" else plain_hook
    rtopk.ddp.register = functools.partial(
        rtopk.ddp.register, exchange=os.environ.get("RTOPK_TEST_EXCHANGE", "all-gather")
    )
    example.DistributedDataParallel = SmallBuckets
    print(f"life {os.environ['TORCHELASTIC_RESTART_COUNT']} of rank {os.environ['RANK']}", flush=True)
    example.main()
