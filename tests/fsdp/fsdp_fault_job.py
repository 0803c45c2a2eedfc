"""examples/with_fsdp.py with an accident: rank 3 kills itself with SIGKILL in the middle of a backward pass.

It happens once, in the first life of the job, in step 27, when FSDP has reduced two of its modules: the other rank
of its site and its twin on the other site then wait for messages that will not come.
"""

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rtopk.fsdp import State

EXAMPLE = Path(__file__).parents[2] / "examples" / "with_fsdp.py"
reduce = State.reduce


def dying(state: State, *module: Any) -> None:
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first_life and dist.get_rank() == 3 and state.step == 27 and len(state.reduced) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    reduce(state, *module)


if __name__ == "__main__":
    spec = importlib.util.spec_from_file_location("with_fsdp", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    State.reduce = dying
    print(f"life {os.environ['TORCHELASTIC_RESTART_COUNT']} of rank {os.environ['RANK']}", flush=True)
    example.main()
