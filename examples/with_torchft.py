"""Local steps that survive failures: three replicas train digits with compressed DiLoCo on torchft.

    python examples/with_torchft.py               # starts a lighthouse and three replicas on this machine
    python examples/with_torchft.py --kill        # kills one replica after five rounds, and starts it again

On real machines, start `torchft_lighthouse --min_replicas 2` on one of them, and this program once per replica:

    REPLICA=0 TORCHFT_LIGHTHOUSE=http://HOST:29510 python examples/with_torchft.py
"""

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta

os.environ.setdefault("RUST_LOG", "error")  # torchft logs every quorum otherwise

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torchft._torchft import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

import rtopk

REPLICAS, ROUNDS, EVERY = 3, 60, 10


def replica(number: int) -> None:
    """Train one replica; the lighthouse's address is in TORCHFT_LIGHTHOUSE."""
    torch.manual_seed(0)  # the same initial weights everywhere
    torch.set_num_threads(1)
    data = load_digits()
    inputs, targets = torch.tensor(data.data / 16.0, dtype=torch.float32), torch.tensor(data.target)
    own = torch.arange(number, 1400, REPLICAS)  # this replica's examples; the rest are for the test
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5, nesterov=True)

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # of this replica alone
    manager = Manager(
        pg=rtopk.torchft.ProcessGroup(ProcessGroupGloo(timeout=timedelta(seconds=20))),
        min_replica_size=2,
        use_async_quorum=False,
        replica_id=f"replica{number}",
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=20),
        quorum_retries=5,
    )
    random = torch.Generator().manual_seed(number)
    with rtopk.torchft.DiLoCo(
        manager, [model], inner, outer, sync_every=EVERY, density=0.02, values="4bit"
    ) as trainer:
        while manager.current_step() < ROUNDS:
            for _ in range(EVERY):
                batch = own[torch.randint(len(own), (32,), generator=random)]
                loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
                inner.zero_grad()
                loss.backward()
                inner.step()
            step, sent = manager.current_step(), trainer.books[0].bytes_sent
            if step % 10 == 0:
                right = (model(inputs[1400:]).argmax(1) == targets[1400:]).float().mean()
                print(f"replica {number}: round {step}, {manager.num_participants()} replicas, "
                      f"accuracy {100 * right:.1f}, {sent:,} bytes sent", flush=True)  # fmt: skip
            if "--kill" in sys.argv:
                time.sleep(0.3)  # so that the one that was killed returns in time
    os._exit(0)  # torchft's threads would keep the process


def start(number: int, lighthouse: str) -> "subprocess.Popen[bytes]":
    """Start a replica as a process of its own."""
    variables = {"REPLICA": str(number), "TORCHFT_LIGHTHOUSE": lighthouse}
    return subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **variables})


def main() -> None:
    """Start everything on this machine, or be the replica that REPLICA names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kill", action="store_true", help="kill a replica on the way, and start it again")
    options = parser.parse_args()
    if "REPLICA" in os.environ:
        replica(int(os.environ["REPLICA"]))
        return
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=2000)
    running = [start(number, lighthouse.address()) for number in range(REPLICAS)]
    if options.kill:
        time.sleep(15)
        print("replica 2 is killed", flush=True)
        running[2].kill()
        running[2].wait()
        running[2] = start(2, lighthouse.address())
    codes = [process.wait() for process in running]
    lighthouse.shutdown()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
