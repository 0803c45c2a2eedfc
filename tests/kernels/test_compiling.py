"""When loops are compiled: not at import, at the first call, and then it is said."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_it_is_said_once_and_only_if_something_is_compiled(tmp_path):
    program = """
import torch
from rtopk.kernels import rank, reaches
for limit in (1.0, 2.0):
    reaches(torch.zeros(1000), limit)
rank.tally(torch.zeros(1000).numpy(), 3)
"""
    said, compiled = run(program, tmp_path)
    assert said.count("rtopk compiles its loops") == 1
    assert sorted(path.name.split("-")[0].split(".")[1] for path in compiled) == ["reaches", "tally"]
    assert run(program, tmp_path)[0] == ""


@pytest.mark.slow
def test_one_process_compiles_while_the_others_wait(tmp_path):
    program = """
import sys, numba.core.event as event
from rtopk.kernels import jit
import numpy as np
with event.install_recorder("numba:compile") as seen:
    from rtopk.kernels.draws import ones_before
    ones_before(np.zeros(4, np.uint64), 100)
print(sum(e.is_start for _, e in seen.buffer))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(3)
    ]
    assert sorted(process.communicate()[0] for process in processes) == ["0\n", "0\n", "1\n"]


def test_python_calls_only_loops_that_it_can_call():
    """A call of an inner loop from Python would crash, so the source is read instead."""
    source = Path(rtopk.__file__).parent.parent
    trees = {
        ".".join(path.relative_to(source).with_suffix("").parts): ast.parse(path.read_text())
        for path in source.rglob("rtopk/**/*.py")
    }

    def decorators(node):
        return {d.id for d in getattr(node, "decorator_list", ()) if isinstance(d, ast.Name)}

    inner = {
        name: {node.name for node in tree.body if decorators(node) & {"loop", "fused"}}
        for name, tree in trees.items()
    }
    assert {"pack", "_append"} <= inner["rtopk.wire.golomb"]
    for name, tree in trees.items():
        imported = {
            alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name in inner.get(node.module, ())
        }
        for node in tree.body:
            if not decorators(node) & {"loop", "fused", "entry", "inlined"}:
                called = {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
                assert not called & (imported | inner[name]), name


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
