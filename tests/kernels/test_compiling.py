"""When loops are compiled: not at import, at the first call, and then it is said."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import rtopk


def run(program, folder):
    """Run a program in a process that finds no compiled loops on disk."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr, [path for path in folder.rglob("*.nbi") if path.is_file()]


def test_nothing_is_compiled_at_import(tmp_path):
    said, compiled = run(
        "import rtopk, rtopk.wire.positions; from rtopk.kernels import draws, loops, rank", tmp_path
    )
    assert said == ""
    assert compiled == []


def test_the_first_call_says_that_it_compiles_and_keeps_the_result(tmp_path):
    """Once, though two loops are compiled; with so little patience that no machine is too fast."""
    program = """
import torch
from rtopk.kernels import jit, rank, reaches
jit.PATIENCE = 0.001
for limit in (1.0, 2.0):
    reaches(torch.zeros(1000), limit)
rank.tally(torch.zeros(1000).numpy(), 3)
"""
    said, compiled = run(program, tmp_path)
    assert said.count("rtopk compiles its loops") == 1
    assert sorted(path.name.split("-")[0].split(".")[1] for path in compiled) == ["reaches", "tally"]


def test_a_read_only_install_without_a_cache_works(tmp_path):
    """Files stand where folders for the loops would be made: root, who runs our tests, can write anywhere else."""
    home = Path(rtopk.__file__).parent
    package = tmp_path / "install" / "rtopk"
    shutil.copytree(home, package, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    for folder in (package, *(path for path in package.rglob("*") if path.is_dir())):
        (folder / "__pycache__").touch()
    (tmp_path / "home").touch()
    environment = {name: text for name, text in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= dict.fromkeys(("HOME", "XDG_CACHE_HOME"), str(tmp_path / "home"))
    environment |= {"PYTHONPATH": str(package.parent), "OMP_NUM_THREADS": "1"}
    program = """
import rtopk, torch
assert "install" in rtopk.__file__
print(rtopk.top_k(torch.tensor([1.0, 3.0, 2.0]), 1).item())
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert done.stderr.count("set NUMBA_CACHE_DIR to a writable folder") == 1
