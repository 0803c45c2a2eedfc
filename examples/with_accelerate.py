"""Hugging Face Accelerate: one line after `prepare`.

torchrun --nproc-per-node 2 examples/with_accelerate.py --folder runs/accelerate
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rtopk.adapters.accelerate import register


def main() -> None:
    """Train, save, and go on from what was saved."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.view(-1, 4, 8).sum(2).argmax(1))
    network = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(data, batch_size=32))
    state = register(accelerator, model, density=0.01, optimizer=optimizer)  # the one line

    def epoch() -> str:
        for features, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(features), labels))
            optimizer.step()
        vector = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:16]

    for _ in range(arguments.epochs):
        epoch()
    accelerator.save_state(str(arguments.folder / "checkpoint"))
    once = epoch()
    accelerator.load_state(str(arguments.folder / "checkpoint"))
    again = epoch()
    if accelerator.is_main_process:
        print(json.dumps({"sent": state.stats.bytes_sent, "weights": once, "resumed": again}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
