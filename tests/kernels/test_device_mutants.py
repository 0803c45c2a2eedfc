"""Mistakes in the Triton programs that test_device.py must see: each is made on purpose in a copy of the file."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import test_device
import torch

from rtopk import kernels
from rtopk.kernels import device, draws
from rtopk.kernels.search import Search

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

R = 40
# A cluster with ties on both sides of a border between blocks, and of both signs.
VECTOR = np.tile(np.array([1, -2, 2, -0.0, 3, 0.5, -2, 2], np.float32), 50)


def selection():
    """Guesses: right, useless, too high, none."""
    test_device.check_pick("cluster", VECTOR, R, (3.0, 2.0, 0.0, 9.0, None))
    near = (0x3F000000 + np.random.default_rng(0).permutation(400) // 2).astype(np.int32).view(np.float32)
    test_device.check_pick("units of the last place", near, R, (None,))


def sums():
    for numbers in ((0.9, 0.3, 1.0), (0.0, 1.0, 0.95)):
        moved = torch.ones(300) if numbers[0] else None
        residual, gradient = torch.full((300,), 0.7), torch.full((300,), 1.1)
        device.accumulate_(residual, gradient, None, moved, *numbers)
        total = torch.full((300,), 0.7) * torch.tensor(numbers[2])
        if moved is not None:
            gradient = torch.ones(300) * torch.tensor(numbers[0]) + gradient * torch.tensor(numbers[1])
        assert torch.equal(residual, total + gradient)


def in_parts():
    """Parts end within a block, and within a word of bits."""
    residual, gradient = torch.full((300,), 0.5), torch.arange(300.0)
    search, total = Search(40.0, 5, 290), torch.empty(300)
    notes = device.noting(residual, search)
    for begin, end in ((150, 300), (0, 35), (35, 150)):
        notes.sweep(total, residual, torch.cat([gradient[begin:end], torch.full((300,), -1.0)]), begin, end)
    assert torch.equal(total, residual + gradient)
    picked = device.pick(notes.found(total, search), 250, draws.every_bit(250), 250)
    assert picked.positions.tolist() == list(range(40, 290))


def subtraction():
    vector = torch.ones(300)
    device.subtract_(vector, torch.tensor([7, 299]), torch.tensor([0.5, 3.0]), 1.0)
    assert (vector[7], vector[299], vector.sum()) == (0.5, -2.0, 296.5)


def refusal():
    vector = torch.ones(300)
    vector[299] = float("nan")
    search = Search(0.5, 5, 200)
    with pytest.raises(kernels.NotFiniteError):
        scan_and_pick(vector, search)


def scan_and_pick(vector, search):
    kernels.scan_finite(vector, search, "vector")
    kernels.pick(search.found, 5, draws.every_bit(5), 5)


MUTANTS = {  # what is replaced, by what, and who must see it
    "the bound is exclusive": ("(keys >= bound)", "(keys > bound)", selection),
    "one tie too few": ("tl.cumsum(equal, 0) <= left", "tl.cumsum(equal, 0) < left", selection),
    "ties of earlier blocks are not counted": ("_within(ties, tied, BLOCK)", "_within(ties, 0, BLOCK)", selection),
    "the bin after the right one": ("(left <= above + counted)", "(left < above + counted)", selection),
    "too many candidates go unnoticed": (" & (number <= room)", "", selection),
    "too few candidates go unnoticed": ("(number >= r) & ", "", selection),
    "magnitudes keep their sign": ("bitcast=True) & SIGNLESS", "bitcast=True)", selection),
    "positions within the block": ("start + lanes, mask=kept)", "lanes, mask=kept)", selection),
    "earlier blocks are forgotten": ("positions + before + at", "positions + at", selection),
    "the scale is forgotten": ("speed * keep + fresh * scale", "speed * keep + fresh", sums),
    "the decay is forgotten": ("total = total * keep", "total = total", sums),
    "the sum is not stored": ("tl.store(sums + start + lanes, total, mask=inside)", "pass", sums),
    "a part begins with its block": ("(lanes >= _within(begin, start, BLOCK)) & ", "", in_parts),
    "another part's gradient": ("gradient + (start - begin) + lanes", "gradient + start + lanes", in_parts),
    "a part forgets the last": ('tl.atomic_or(there, words, sem="relaxed")', "tl.store(there, words)", in_parts),
    "what was sent is added": ("held - taken", "held + taken", subtraction),
    "the last entry of the list": ("lanes < number", "lanes < number - 1", subtraction),
    "the largest key is not kept": ("tl.max(keys, 0).to(tl.int64)", "tl.min(keys, 0).to(tl.int64)", refusal),
}  # fmt: skip


def check(name, folder):
    """Make a mistake in a copy of the programs, or none, and run the check that must see it."""
    device._interpreted, device.BLOCK = lambda: True, test_device.BLOCK
    right, wrong, seen_by = MUTANTS.get(name, ("", "", None))
    text = Path(device._programs().__file__).read_text()
    assert not right or text.count(right) == 1
    copy = Path(folder) / "mutant.py"
    copy.write_text(text.replace(right, wrong) if right else text)
    spec = importlib.util.spec_from_file_location("mutant", copy)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    device._programs = lambda: mutant
    with kernels.preferring("triton"):
        for each in [seen_by] if seen_by else [selection, sums, in_parts, subtraction, refusal]:
            each()


@pytest.mark.parametrize("name", ["no mistake", *MUTANTS])
def test_a_mistake_is_seen(name, tmp_path):
    """In a process of its own: a program that writes where it must not may end it."""
    done = subprocess.run(
        [sys.executable, __file__, name, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == (name in MUTANTS), done.stderr
    assert "text.count(right)" not in done.stderr, "the text that is replaced is no longer there"


if __name__ == "__main__":
    check(*sys.argv[1:])
