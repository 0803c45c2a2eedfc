"""When loops are compiled: not at import, and not before a first step is done; then it is said."""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_cases import FORMS, KINDS, support

import rtopk
from rtopk import Codec, SparseVector
from rtopk.seed import generator


def run(program, folder):
    """Run a program in a process that finds no compiled loops on disk."""
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(folder),
        "OMP_NUM_THREADS": "1",
        "RTOPK_BACKEND": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr, [path for path in folder.rglob("*.nbi") if path.is_file()]


def test_nothing_is_compiled_at_import(tmp_path):
    said, compiled = run(
        "import sys, rtopk, rtopk.wire.positions; from rtopk.kernels import draws, loops, rank; "
        "assert 'numba' not in sys.modules",
        tmp_path,
    )
    assert said == ""
    assert compiled == []


@pytest.mark.slow
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
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "RTOPK_BACKEND": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(3)
    ]
    assert sorted(process.communicate()[0] for process in processes) == ["0\n", "0\n", "1\n"]


def plain_python(monkeypatch):
    """Let the loops of draws and codec run as the Python that they are."""
    for module in [
        sys.modules[name]
        for name in sys.modules
        if name.startswith(("rtopk.wire.", "rtopk.codec", "rtopk.kernels.draws"))
    ]:
        for name, found in list(vars(module).items()):
            if hasattr(found, "__wrapped__") and found.__module__.startswith("rtopk."):
                monkeypatch.setattr(module, name, found.__wrapped__)


@pytest.mark.parametrize("values", FORMS)
def test_interpreted_loops_give_the_bits_of_compiled_ones(values, monkeypatch):
    def payloads():
        for rounding, kind in itertools.product(("nearest", "stochastic"), KINDS):
            for d, k in ((900, 40), (900, 600), (300_000, 700)):
                indices = support(kind, d, k, generator(3))
                vector = SparseVector(indices, torch.randn(len(indices), generator=generator(4)) ** 5, d)
                codec = Codec(values=values, rounding=rounding)
                payload, decoded = codec.encode_with_decoded(vector, generator(5))
                read = codec.decode(payload)
                assert torch.equal(read.indices, vector.indices)
                assert torch.equal(read.values, decoded.values)
                yield payload

    compiled = list(payloads())
    plain_python(monkeypatch)
    with np.errstate(over="ignore"):
        assert all(map(torch.equal, compiled, payloads()))


STEPS = """
import threading, torch
from rtopk import Codec, RTopK, Sparsifier
from rtopk.kernels import cpu
node = Sparsifier(RTopK(nodes=5), 0.01, codec=Codec(values="4bit"))
def go(steps):
    for step in steps:
        payload = node.compress(torch.randn(20_000, generator=torch.Generator().manual_seed(step)), step)
        node.codec.decode(payload)
        print(hash(payload.numpy().tobytes()), flush=True)
"""


@pytest.mark.slow
def test_steps_before_and_after_compilation_give_the_same_bits(tmp_path):
    program = f"""{STEPS}
go(range(3))
assert not cpu.ready()
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
assert cpu.ready() and threading.active_count() == 1
go(range(3, 6))
"""
    said, told = [], []
    for forced in ("", "cpu"):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / forced), "PYTHONHASHSEED": "1"}
        steps = f"{STEPS}\ngo(range(6))" if forced else program
        done = subprocess.run(
            [sys.executable, "-c", steps],
            env=environment | {"RTOPK_BACKEND": forced},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
        said.append(done.stderr)
    assert told[0] == told[1]
    assert all(text.count("rtopk compiles its loops") == 1 for text in said)


@pytest.mark.slow
def test_a_child_that_is_forked_while_loops_are_compiled(tmp_path):
    """It compiles for itself. The parent goes on, and neither hangs, also at the end."""
    program = f"""{STEPS}
import os
go([0])
child = os.fork()
go([1])
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.split()
    assert len(rest) == 2
    assert rest[0] == rest[1] != first


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
