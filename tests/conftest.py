"""Settings of every test: one thread of torch per worker, and no deadlines on a noisy machine."""

import os
import subprocess
import sys

import pytest
import torch
from chosen import prefer
from hypothesis import settings

from rtopk import kernels
from rtopk.kernels import jit

# Loops are compiled where they are first called, so that tests repeat; kernels/test_compiling.py tests the rest.
jit.compile_at_once()

# Triton's programs run on the CPU, where a test asks for that backend; it must be said before triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Workers that share two cores and start two threads each spend their time waiting for one another.
torch.set_num_threads(1)

settings.register_profile("rtopk", deadline=None, derandomize=True)
settings.load_profile("rtopk")


@pytest.fixture
def rtopk(capsys, monkeypatch):
    """Run `rtopk ...` as the program does, in this process: importing torch again takes seconds."""

    def run(*arguments):
        from rtopk.tools.cli import main

        monkeypatch.setattr(sys, "argv", ["rtopk", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        before = dict(os.environ)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            os.environ.clear()
            os.environ.update(before)  # a command sets what its process needs
        return subprocess.CompletedProcess(arguments, ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.slow] * (n == "triton")) for n in kernels.BACKENDS],
)
def every_backend(request):
    """Run a module on each backend in turn; the interpreter of triton is slow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        prefer(monkeypatch, request.param)
        yield request.param
