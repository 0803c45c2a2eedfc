"""Plain PyTorch: two processes learn a small network and exchange 1 % of each gradient.

    torchrun --nproc-per-node 2 examples/plain.py --folder runs/plain

Kill it and start it again with the same folder: it goes on from the last complete checkpoint and ends with
the same weights, to the bit.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rtopk


def main() -> None:
    """Train, with checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    state = rtopk.ddp.register(model, density=0.01, optimizer=optimizer, verify_every=50)  # the one line

    step = resume(arguments.folder, network, optimizer, state)
    while step < arguments.steps:
        inputs, labels = batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        step += 1
        if step % arguments.save_every == 0:
            save(arguments.folder / f"step-{step:06d}", step, network, optimizer, state)

    if rank == 0:
        weights = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
        result = {
            "loss": loss.item(),
            "bytes_sent_per_step": state.stats.bytes_sent,
            "bytes_of_a_gradient": 4 * weights.numel(),
            "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16],
        }
        print(json.dumps(result))
    dist.destroy_process_group()


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the batch of a rank: which quarter of the inputs is largest."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(64, 32, generator=rng)
    return inputs, inputs.view(64, 4, 8).sum(2).argmax(1)


def save(folder: Path, step: int, network: nn.Module, optimizer: torch.optim.Optimizer, state) -> None:
    """Write a checkpoint; model.pt comes last, so where it is, the checkpoint is complete."""
    state.save(folder)  # every rank its own residuals
    dist.barrier()
    if dist.get_rank() == 0:
        partial = folder / "model.partial"
        torch.save(
            {"step": step, "model": network.state_dict(), "optimizer": optimizer.state_dict()}, partial
        )
        partial.rename(folder / "model.pt")
    dist.barrier()


def resume(folder: Path, network: nn.Module, optimizer: torch.optim.Optimizer, state) -> int:
    """Load the newest complete checkpoint, if there is one, and return its step."""
    complete = sorted(folder.glob("step-*/model.pt"))
    if not complete:
        return 0
    saved = torch.load(complete[-1], weights_only=True)
    network.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.load(complete[-1].parent)
    return saved["step"]


if __name__ == "__main__":
    main()
