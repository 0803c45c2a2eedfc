"""Selection is exact on vectors with structure, in every way that it is reached, and leaves nothing unfilled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import structured
import torch

from rtopk import (
    Codec,
    ErrorFeedback,
    MomentumCorrection,
    NoMemory,
    RTopK,
    SparseVector,
    Sparsifier,
    TopK,
    average_sparse,
    kernels,
    rtop_k,
    top_k,
)
from rtopk.kernels import draws
from rtopk.kernels.search import Search
from rtopk.seed import generator
from rtopk.select import draw

SIZES = (1, 2, 63, 64, 65, 1000, 4097, 70_000, 300_000)  # the last is shared between threads


@pytest.fixture(params=[1, 2], ids="{} threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def check(rng, d, search):
    """Hold every way to the largest entries of one vector to the definition."""
    name, values = structured.vector(rng, d)
    vector, r = torch.from_numpy(values), structured.ranks(rng, d)
    k = int(rng.integers(1, r + 1))
    expected = structured.exact(values, r)
    assert np.array_equal(top_k(vector, r).numpy(), expected), (name, r)
    drawn = expected[draw(r, k, generator("structured", d)).numpy()]
    if r < d:  # r = d draws without a look at the vector
        assert np.array_equal(rtop_k(vector, k, r, generator("structured", d)).numpy(), drawn), (name, r, k)
    # The pass with a guess: right, a little too low, useless, of another step, too high.
    rth = float(np.abs(values[expected]).min())
    for floor in (rth, rth * 0.99, 0.0, rth * 0.5, rth * 1.01):
        search.floor, search.wanted = floor, r
        found = kernels.scan(vector, search)
        if len(found) < r:
            assert floor > rth
            continue
        picked = kernels.pick(found, r, draws.every_bit(r), r)
        assert np.array_equal(picked.positions.numpy(), expected), (name, r, floor)
        assert np.array_equal(picked.values.numpy().view(np.int32), values[expected].view(np.int32)), name
        assert picked.magnitude == rth


@pytest.mark.parametrize("d", SIZES)
def test_selection_is_exact(d, threads):
    rng, search = np.random.default_rng(d), Search()
    for _ in range(60 if d < 10_000 else 10):
        check(rng, d, search)


@pytest.mark.slow
def test_many_vectors(threads):
    """30,000 vectors a thread count, five floors each; minutes."""
    rng, search = np.random.default_rng(threads), Search()
    for number in range(30_000):
        check(rng, int(SIZES[number % 7] if number % 30 else rng.choice(SIZES[7:])), search)


@pytest.mark.parametrize("family", structured.FAMILIES, ids=lambda f: f.__name__)
def test_a_million_entries(family, threads):
    """Where the histogram narrows twice: more than 65,536 keys within 512 units of the last place."""
    rng = np.random.default_rng(7)
    name, values = structured.vector(rng, 1_000_000, family)
    for r in (10_000, 300_000, 700_000):
        assert np.array_equal(top_k(torch.from_numpy(values), r).numpy(), structured.exact(values, r)), (
            name,
            r,
        )


@pytest.mark.parametrize("spread", [1, 511, 512, 513, 1500, 2048, 4096, 1 << 20])
@pytest.mark.parametrize("r", [1000, 300_000, 600_000])
def test_nearly_equal_magnitudes(spread, r):
    """600,000 entries at 0.5 and some units of the last place more: once 83,776 of 300,000 were wrong."""
    rng = np.random.default_rng(spread)
    keys = np.zeros(1_000_000, np.int32)
    keys[:600_000] = structured.HALF + rng.integers(0, spread, 600_000)
    values = rng.permutation(keys).view(np.float32)
    assert np.array_equal(top_k(torch.from_numpy(values), r).numpy(), structured.exact(values, r))


def test_a_node_with_nearly_equal_gradients_sends_the_largest(threads):
    """As constant weights give them: its first step once died."""
    rng = np.random.default_rng(1)
    keys = np.zeros(1_000_000, np.int32)
    keys[::2] = structured.HALF + rng.integers(0, 1500, 500_000)
    gradient = keys.view(np.float32)
    node = Sparsifier(TopK(), 0.5)
    for step in range(3):
        sent = node.codec.decode(node.compress(torch.from_numpy(gradient), step))
        assert np.array_equal(sent.indices.numpy(), structured.exact(gradient, 500_000))
        assert np.array_equal(sent.values.numpy(), gradient[::2])


@pytest.mark.parametrize("memory", [NoMemory, ErrorFeedback, MomentumCorrection])
def test_a_node_sends_what_the_definition_says_step_after_step(memory, threads):
    """The guess at the next magnitude is wrong all the time where families take turns."""
    rng = np.random.default_rng(3)
    for d in (500, 300_000):
        node = Sparsifier(RTopK(r_over_k=3.0), 0.02, memory())
        twin = memory()
        for step in range(25 if d == 500 else 10):
            values = np.clip(structured.vector(rng, d)[1], -1e20, 1e20)
            gradient = torch.from_numpy(values)
            total = twin.add(gradient)
            k = max(1, round(0.02 * d))
            largest = structured.exact(total.numpy(), 3 * k)
            sent = node.codec.decode(node.compress(gradient, step))
            drawn = draw(3 * k, k, generator(0, 0, step)).numpy()
            assert np.array_equal(sent.indices.numpy(), largest[drawn])
            twin.subtract(sent)
            if memory is not NoMemory:
                assert torch.equal(node.memory.residual, twin.residual)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_twin_is_exact(dtype):
    rng = np.random.default_rng(5)
    for d in (65, 1000, 70_000):
        for _ in range(10):
            values = torch.from_numpy(np.clip(structured.vector(rng, d)[1], -60_000, 60_000)).to(dtype)
            r = structured.ranks(rng, d)
            expected = structured.exact(values.float().numpy(), r)
            assert np.array_equal(top_k(values, r).numpy(), expected)


def results(seed):
    """Return the bits of some selections and payloads: all that memory left unfilled would change."""
    rng, found = np.random.default_rng(seed), []
    for d in (70, 5000, 300_000):
        for values in ("fp32", "fp16", "int8", "4bit", "2bit"):
            _, entries = structured.vector(rng, d)
            vector = torch.from_numpy(np.clip(entries, -1e4, 1e4))
            node = Sparsifier(RTopK(r_over_k=2.0), 0.1, codec=Codec(values))
            for step in range(2):
                payload = node.compress(vector, step)
                decoded = node.codec.decode(payload)
                found += [payload.clone(), decoded.indices.clone(), decoded.values.clone()]
            found.append(node.memory.residual.clone())
            found.append(top_k(vector, structured.ranks(rng, d)))
            joint = average_sparse([decoded, SparseVector.gather(vector, torch.arange(0, d, 3))])
            found += [joint.indices, joint.values]
    return found


def test_what_is_allocated_is_filled(monkeypatch, threads):
    """Fresh memory is filled with one pattern, then with another: nothing of it may reach a result."""
    as_it_comes = results(11)  # compiles every loop before numpy is replaced
    empty, torch_empty = np.empty, torch.empty

    for pattern in (0x00, 0xA5, 0xFF):

        def filled(*args, pattern=pattern, **kwargs):
            array = empty(*args, **kwargs)
            array.reshape(-1).view(np.uint8)[:] = pattern
            return array

        def torch_filled(*args, pattern=pattern, **kwargs):
            tensor = torch_empty(*args, **kwargs)
            if tensor.device.type == "cpu" and tensor.numel():
                tensor.view(torch.uint8).fill_(pattern)
            return tensor

        monkeypatch.setattr(np, "empty", filled)
        monkeypatch.setattr(np, "empty_like", lambda like: filled(like.shape, like.dtype))
        monkeypatch.setattr(torch, "empty", torch_filled)
        again = results(11)
        monkeypatch.undo()
        for one, two in zip(as_it_comes, again, strict=True):
            assert torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.slow
def test_every_branch_of_selection_is_reached():
    """A random vector takes the common ones; an error in the others was not seen for that reason."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "branches.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"rank.rth", "rank.rth_bin", "search.quantiles", "loops.keep", "loops.pick"} <= set(report)
    assert sum(function["branches"] for function in report.values()) >= 72
    missed = {name: found for name, found in report.items() if found["never taken"] or found["never run"]}
    assert not missed


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("values", ["fp32", "fp16", "bf16", "int8", "4bit", "2bit"])
def test_a_reader_gets_what_the_writer_says(values, rounding):
    """Whatever the values: 300 of 300 payloads of "90 % constant, 10 % near 1e-10" were once refused."""
    rng, codec = np.random.default_rng(0), Codec(values, rounding)
    near_zero = np.where(rng.random(3000) < 0.9, 0.5, 1e-10 * rng.random(3000)).astype(np.float32)
    cases = [near_zero, near_zero[:511], -near_zero[-513:]]
    cases += [structured.vector(rng, int(d))[1] for d in rng.choice([1, 2, 5, 511, 512, 513, 2000], 150)]
    for number, entries in enumerate(cases):
        given = torch.from_numpy(entries)
        vector = SparseVector(torch.arange(given.numel()) * 3, given, given.numel() * 3)
        payload, decoded = codec.encode_with_decoded(vector, generator("rounding", number))
        read = codec.decode(payload)
        assert torch.equal(read.indices, vector.indices)
        assert torch.equal(read.values.view(torch.int32), decoded.values.view(torch.int32))
        assert bool(read.values.isfinite().all())
