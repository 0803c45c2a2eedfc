"""Two ranks train on a device, and the gradients they get are those of two ranks on the CPU, to the bit.

The model is one product: the gradient of sum(w * x) is x, exactly, on every device. So whatever differs is ours.
"""

import tempfile
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rtopk import ddp, kernels
from rtopk.seed import generator

STEPS, SHAPES, DENSITY = 5, ((700, 30), (57,), (300, 40)), 0.01


class Products(nn.Module):
    """Parameters whose gradients are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Return the sum of the products."""
        return torch.stack([(w * x).sum() for w, x in zip(self.weights, inputs, strict=True)]).sum()


def two_ranks(device: torch.device, ranks: int = 2) -> str:
    """Train on the device and on the CPU; raise AssertionError unless all gradients are the same."""
    with tempfile.TemporaryDirectory() as folder:
        reference = _train(torch.device("cpu"), "gloo", ranks, Path(folder) / "cpu", "cpu")
        enough = device.type == "cuda" and torch.cuda.device_count() >= ranks
        backend = "nccl" if enough else "gloo"
        found = _train(device, backend, ranks, Path(folder) / "device")
    for rank, (expected, got) in enumerate(zip(reference, found, strict=True)):
        for step, (one, other) in enumerate(zip(expected, got, strict=True)):
            if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
                raise AssertionError(f"rank {rank}, step {step}: gradients differ from those on the CPU")
            if not all(torch.equal(a, b) for a, b in zip(found[0][step], other, strict=True)):
                raise AssertionError(f"rank {rank}, step {step}: gradients differ from those of rank 0")
    where = "one card each" if enough else "one device"
    return f"{STEPS} steps of {ranks} ranks on {backend}, {where}: gradients have the CPU's bits"


def _train(
    device: torch.device, backend: str, ranks: int, folder: Path, kind: str = ""
) -> list[list[list[Tensor]]]:
    folder.mkdir()
    mp.spawn(_rank, (device, backend, ranks, str(folder), kind), ranks)  # type: ignore[attr-defined, no-untyped-call]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def _rank(rank: int, device: torch.device, backend: str, ranks: int, folder: str, kind: str) -> None:
    """Train as one rank, with one kind of kernels if it is named; write the gradients of every step."""
    if backend == "nccl":
        device = torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place, patience = f"file://{folder}/store", timedelta(minutes=2)  # a collective that hangs ends the check
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=ranks, timeout=patience)
    ids: Any = [device] if device.type == "cuda" else None
    model = DistributedDataParallel(Products().to(device), device_ids=ids, bucket_cap_mb=0.05)
    ddp.register(model, density=DENSITY, seed=3)
    made = []
    with kernels.preferring(kind) if kind else nullcontext():
        for step in range(STEPS):
            rng = generator("two ranks", rank, step)
            inputs = [(torch.randn(shape, generator=rng) ** 3).to(device) for shape in SHAPES]
            model.zero_grad(set_to_none=True)
            model(inputs).backward()
            made.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    torch.save(made, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
