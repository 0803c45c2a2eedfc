"""One place chooses a backend; all of them give the same bits."""

import os
import subprocess
import sys

import numpy as np
import pytest
import structured
import torch
from chosen import prefer

from rtopk import RTopK, Sparsifier, kernels
from rtopk.kernels import cpu, draws, plain
from rtopk.kernels.search import Search
from rtopk.seed import generator


def test_the_choice_follows_the_tensor():
    vector = torch.zeros(10)
    assert kernels.backend(vector) is cpu
    for other in (
        vector.double(),
        vector.half(),
        vector[::2],
        torch.zeros(2, 5),
        torch.zeros(10, device="meta"),
    ):
        assert kernels.backend(other) is plain
        assert kernels.backend(vector, other) is plain


@pytest.mark.parametrize(("name", "expected"), [("torch", "plain"), ("triton", "device"), ("", "cpu")])
def test_the_environment_forces_one(name, expected):
    if name == "triton":
        pytest.importorskip("triton")
    program = "import torch; from rtopk import kernels; print(kernels.backend(torch.zeros(3)).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RTOPK_BACKEND": name},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == f"rtopk.kernels.{expected}", done.stderr


def test_an_unknown_backend_is_refused():
    program = "from rtopk import kernels"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "RTOPK_BACKEND": "gpu"},
        capture_output=True,
        text=True,
    )
    assert "RTOPK_BACKEND must be one of cpu, triton, torch, got 'gpu'" in done.stderr


def test_every_backend_gives_the_same_payloads(monkeypatch):
    """Over steps whose scale jumps; momentum and plain error feedback are in test_kernels.py."""
    pytest.importorskip("triton")
    payloads = {}
    for name, found in kernels.BACKENDS.items():
        prefer(monkeypatch, name)
        assert kernels.backend(torch.zeros(3)) is found
        node = Sparsifier(RTopK(r_over_k=3), 0.02)
        payloads[name] = [
            node.compress(torch.randn(3000, generator=generator(step)) ** 3 * 10.0 ** (step % 4), step)
            for step in range(8)
        ]
    first = payloads.pop("cpu")
    for name, others in payloads.items():
        assert all(torch.equal(a, b) for a, b in zip(first, others, strict=True)), name


def scan_and_pick(vector, search):
    """Look at a vector that is not finite: the scan finds out, or on a device what waits for it."""
    kernels.scan_finite(vector, search, "vector")
    kernels.pick(search.found, 1, draws.every_bit(1), 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1500, 2999])
@pytest.mark.parametrize("name", kernels.BACKENDS)
def test_a_scan_finds_what_is_not_finite(name, place, bad, monkeypatch):
    """However many candidates there are: NaN and Inf are the largest of all."""
    prefer(monkeypatch, name)
    vector = torch.arange(3000.0)
    vector[place] = bad
    for wanted in (1, 5, 2000):
        search = kernels.Search(0.0, wanted, 2500)
        with pytest.raises(kernels.NotFiniteError, match=f"at index {place} of 3000") as caught:
            scan_and_pick(vector, search)
        assert caught.value.index == place


@pytest.mark.parametrize("family", structured.FAMILIES, ids=lambda f: f.__name__)
def test_plain_torch_on_a_card_is_exact_whatever_the_guess(family, monkeypatch):
    """Room for as many as it takes instead of a wait, and a look at all blocks if the guess was bad."""
    monkeypatch.setattr(plain, "late", lambda vector: True)
    monkeypatch.setattr(plain, "BLOCK", 300)
    rng = np.random.default_rng(5)
    for d in (1, 300, 2000):
        _, values = structured.vector(rng, d, family)
        vector = torch.from_numpy(values)
        for r in {1, max(1, d // 20), d}:
            expected = structured.exact(values, r)
            rth = float(np.abs(values[expected]).min())
            for floor in (rth, rth * 1.5 + 1.0, 0.0):
                picked = plain.pick(plain.scan(vector, Search(floor, r)), r, draws.every_bit(r), r)
                assert np.array_equal(picked.positions.numpy(), expected)
                assert np.array_equal(picked.here[1].numpy().view(np.int32), values[expected].view(np.int32))
                assert picked.magnitude == rth
            values[-1] = np.nan
            for floor in (1e30, 0.0):
                found = plain.scan(vector, Search(floor, r))
                found.refuse = lambda: pytest.fail("refused", pytrace=False)
                with pytest.raises(pytest.fail.Exception, match="refused"):
                    plain.pick(found, r, draws.every_bit(r), r)
            values[-1] = 0.0
