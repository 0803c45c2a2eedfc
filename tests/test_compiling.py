"""When loops are compiled: not at import, at the first call, and then it is said."""

import os
import subprocess
import sys


def run(program, folder):
    """Run a program in a process that finds no compiled loops on disk."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr, [path for path in folder.rglob("*.nbi") if path.is_file()]


def test_nothing_is_compiled_at_import(tmp_path):
    said, compiled = run(
        "import rtopk, rtopk.simd, rtopk.loops, rtopk.cut, rtopk.draws, rtopk.wire.positions", tmp_path
    )
    assert said == ""
    assert compiled == []


def test_the_first_call_says_that_it_compiles_and_keeps_the_result(tmp_path):
    """Once, though two loops are compiled; with so little patience that no machine is too fast."""
    program = """
import torch
from rtopk import cut, simd, threads
simd.PATIENCE = 0.001
from rtopk.kernels import reaches
for limit in (1.0, 2.0):
    reaches(torch.zeros(1000), limit)
cut.tally(torch.zeros(1000).numpy(), 3)
"""
    said, compiled = run(program, tmp_path)
    assert said.count("rtopk compiles its loops") == 1
    assert sorted(path.name.split("-")[0].split(".")[1] for path in compiled) == ["reaches", "tally"]
