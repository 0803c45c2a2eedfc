"""One process of a launch: join the group, run scenarios one after the other, write what each returned.

A scenario is a function of `Place` in one of the modules `ddp_scenarios_*`, named on the command line as
module:function. What it raises is written too, so that one failure does not hide the others.
"""

import importlib
import json
import os
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    rank: int
    world: int
    folder: Path  # shared by the ranks and by all launches of a session


def main() -> None:
    rank, world, store, folder, *names = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # torch 2.8's own distributed checkpoint warns of itself.
    warnings.filterwarnings("default", "TypedStorage is deprecated", UserWarning)
    place = Place(int(rank), int(world), Path(folder))
    dist.init_process_group(
        os.environ.get("RTOPK_TEST_BACKEND", "gloo") or None,
        init_method=f"file://{store}",
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=float(os.environ.get("RTOPK_TEST_TIMEOUT", "300"))),
    )
    for name in names:
        module, function = name.split(":")
        started = time.monotonic()
        try:
            result = getattr(importlib.import_module(module), function)(place)
        except BaseException:
            result = {"raised": traceback.format_exc()}
        result["seconds"] = round(time.monotonic() - started, 2)
        Path(f"{store}.{function}.{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
