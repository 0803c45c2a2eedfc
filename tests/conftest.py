"""Settings of every test: one thread of torch per worker, and no deadlines on a noisy machine."""

import os

import pytest
import torch
from chosen import prefer
from hypothesis import settings

from rtopk import kernels

# Triton's programs run on the CPU, where a test asks for that backend; it must be said before triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Workers that share two cores and start two threads each spend their time waiting for one another.
torch.set_num_threads(1)

settings.register_profile("rtopk", deadline=None, derandomize=True)
settings.load_profile("rtopk")


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.slow] * (n == "triton")) for n in kernels.BACKENDS],
)
def every_backend(request):
    """Run a module on each backend in turn; the interpreter of triton is slow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        prefer(monkeypatch, request.param)
        yield request.param
