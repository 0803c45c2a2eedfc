"""One replica group as a process: trains digits with compressed DiLoCo under torchft.

    python replica_job.py NUMBER FOLDER LIGHTHOUSE

It trains until the round that the file `goal` of the folder names. Whoever starts it can make it stop between
sending and committing: a file `hold-NUMBER` in the folder makes it write
`held-NUMBER` there and wait until the first is gone. It appends a line of JSON to `log-NUMBER` for every round.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

import rtopk.torchft
from rtopk.seed import generator
from rtopk.state_file import digest_bits
from rtopk.studies.tasks import digits

EVERY, WAIT = 8, timedelta(seconds=20)


def main(number: int, folder: Path, lighthouse: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = digits("test")
    model = task.make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    class HeldManager(Manager):
        def should_commit(self, timeout=None):
            hold, held = folder / f"hold-{number}", folder / f"held-{number}"
            if hold.exists():
                held.touch()
                while hold.exists():
                    time.sleep(0.01)
            return super().should_commit(timeout)

    manager = HeldManager(
        pg=rtopk.torchft.ProcessGroup(ProcessGroupGloo(timeout=WAIT)),
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=f"replica{number}",
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        timeout=WAIT,
        quorum_timeout=timedelta(seconds=90),
        quorum_retries=20,
    )
    inputs, targets = task.train
    goal = folder / "goal"
    own = torch.arange(number, len(targets), 3)
    draws = generator("batches", number, os.getpid())
    with rtopk.torchft.DiLoCo(manager, [model], inner, outer, EVERY, density=0.1, values="4bit") as trainer:
        fragment = trainer._fragments[0]
        while not goal.exists() or manager.current_step() < int(goal.read_text()):
            before = manager.current_step()
            for _ in range(EVERY):
                batch = own[torch.randint(len(own), (16,), generator=draws)]
                loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
                inner.zero_grad()
                loss.backward()
                inner.step()
            common = list(fragment.original_parameters.values())
            line = {
                "step": manager.current_step(),
                "committed": manager.current_step() > before,
                "weights": digest_bits(*common).hex(),
                "receipt": list(trainer.books[0].receipts)[-1:],
                "process": os.getpid(),
                "loss": float(loss.detach()),
                "bytes": trainer.books[0].bytes_sent,
            }
            with (folder / f"log-{number}").open("a") as log:
                log.write("\n" + json.dumps(line))
    fragment.restore_parameters()
    (folder / f"end-{number}").write_text(json.dumps(task.evaluate(model)))
    (folder / f"leave-{number}").touch()
    while len(list(folder.glob("leave-*"))) < 3:  # nobody leaves while another heals
        time.sleep(0.05)
    os._exit(0)  # torchft's threads would keep it


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
