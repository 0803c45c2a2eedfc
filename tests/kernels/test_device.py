"""Triton's programs under its interpreter: the same bits as the compiled loops, for every vector.

The interpreter runs one program after the other, so it shows no races: the docstrings of `programs` argue those.
Blocks are made small here, so that short vectors cross their borders.
"""

import numpy as np
import pytest
import structured
import torch
from chosen import prefer
from hypothesis import given, settings
from hypothesis import strategies as st

from rtopk import (
    DecayedErrorFeedback,
    ErrorFeedback,
    Layout,
    MomentumCorrection,
    NoMemory,
    RTopK,
    Sparsifier,
    TopK,
    kernels,
)
from rtopk.kernels import cpu, device, draws, plain
from rtopk.kernels.search import Search
from rtopk.seed import generator

triton = pytest.importorskip("triton")
programs, tl = device._programs(), triton.language

BLOCK = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    with pytest.MonkeyPatch.context() as monkeypatch:
        prefer(monkeypatch, "triton")
        monkeypatch.setattr(device, "BLOCK", BLOCK)
        yield


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def check_pick(name, values, r, floors, words=None, k=None):
    """Hold what is picked, with good and bad guesses, to the definition."""
    vector, expected = torch.from_numpy(values), structured.exact(values, r)
    words, k = (draws.every_bit(r), r) if words is None else (words, k)
    drawn = expected[draws.set_bits(words, k).numpy()]
    rth = np.abs(values[expected]).min()
    for floor in floors:
        found = (
            device.search_largest(vector, r)
            if floor is None
            else device.scan(vector, Search(float(floor), r))
        )
        picked = device.pick(found, r, words, k)
        assert np.array_equal(picked.positions.numpy(), drawn), (name, r, floor)
        assert np.array_equal(picked.values.numpy().view(np.int32), values[drawn].view(np.int32)), (name, r)
        assert picked.magnitude == rth, (name, r, floor)
        if floor is not None:
            assert len(found) == (np.abs(values.astype(np.float64)) >= floor).sum()


@pytest.mark.parametrize("d", [1, 31, BLOCK, BLOCK + 1, 3 * BLOCK - 1])
def test_selection_is_exact(d):
    """Guesses that are right, a little low, useless, too high, and none at all."""
    rng = np.random.default_rng(d)
    name, values = structured.vector(rng, d)
    r = structured.ranks(rng, d)
    rth = float(np.abs(values[structured.exact(values, r)]).min())
    check_pick(name, values, r, (rth, np.float32(rth * 0.9), 0.0, rth * 1.5, None))


@pytest.mark.parametrize("family", structured.FAMILIES, ids=lambda f: f.__name__)
def test_every_family_is_exact(family):
    rng = np.random.default_rng(3)
    name, values = structured.vector(rng, 300, family)
    r, k = 150, 60
    rth = float(np.abs(values[structured.exact(values, r)]).min())
    check_pick(name, values, r, (rth, None), draws.draw_words(r, k, 5), k)


def test_blocks_of_the_size_that_ships(monkeypatch):
    monkeypatch.setattr(device, "BLOCK", 4096)
    rng = np.random.default_rng(1)
    for d in (4096, 9000):
        name, values = structured.vector(rng, d)
        rth = float(np.abs(values[structured.exact(values, d // 50)]).min())
        check_pick(name, values, d // 50, (rth, 0.0, rth * 1.5))


@pytest.mark.slow
def test_many_vectors():
    """Up to 100,000 entries, those in blocks of the size that ships; minutes."""
    rng = np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for number in range(150):
            large = number % 10 == 0
            monkeypatch.setattr(device, "BLOCK", 4096 if large else (BLOCK, 1024)[number % 2])
            d = int(rng.choice([20_000, 70_000, 100_000] if large else [5, 700, 2000]))
            name, values = structured.vector(rng, d)
            r = structured.ranks(rng, d)
            rth = float(np.abs(values[structured.exact(values, r)]).min())
            check_pick(name, values, r, (rth, np.float32(rth * 0.97), rth * 1.5, 0.0, None))


def test_ties_go_to_the_lower_index_across_blocks():
    vector = torch.full((5 * BLOCK,), -2.0)
    vector[3 * BLOCK] = 3.0
    picked = device.pick(device.search_largest(vector, 200), 200, draws.every_bit(200), 200)
    assert picked.positions.tolist() == [*range(199), 3 * BLOCK]


ways = st.sampled_from(["plain", "momentum", "scaled momentum", "decay"])
entries = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -3e-42, 2e-39, 0.1, 65504.0, 2.5e-7]) | st.floats(
    width=16, allow_nan=False, allow_infinity=False
)


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 400), ways, st.sampled_from(DTYPES), st.lists(entries, min_size=1, max_size=40), st.data()
)
def test_sums_and_candidates_have_the_bits_of_the_loops(d, way, dtype, some, data):
    """All three dtypes of gradients; zeros of both signs and subnormals among them."""
    check_sums(d, way, dtype, some, data)


@pytest.mark.slow
def test_sums_and_candidates_of_up_to_100_000_entries():
    """In blocks of the size that ships; every third vector is also refused for NaN or Inf, with nothing changed."""
    shapes = st.one_of(st.integers(1, 100_000), st.sampled_from([4095, 4096, 4097, 65_536, 99_999, 100_000]))

    @settings(max_examples=150, deadline=None)
    @given(shapes, ways, st.sampled_from(DTYPES), st.lists(entries, min_size=1, max_size=40), st.data())
    def check(d, way, dtype, some, data):
        check_sums(d, way, dtype, some, data)
        if d % 3 == 0:
            check_refusal(d, dtype, data)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(device, "BLOCK", 4096)
        check()


def check_refusal(d, dtype, data):
    memory = data.draw(st.sampled_from([ErrorFeedback, MomentumCorrection]))()
    node = Sparsifier(TopK(), 0.01, memory)
    node.compress(torch.from_numpy(structured.vector(np.random.default_rng(d), d)[1].clip(-1e4, 1e4)), 0)
    before = node.state_dict()["memory"]
    gradient = torch.zeros(d, dtype=dtype)
    gradient[data.draw(st.integers(0, d - 1))] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    with pytest.raises(ValueError, match="must be finite, got"):
        node.compress(gradient, 1)
    after = node.state_dict()["memory"]
    assert all(same(before[name], after[name]) for name in before)


def check_sums(d, way, dtype, some, data):
    rng = np.random.default_rng(d)
    gradient = torch.tensor(rng.choice(some, d), dtype=torch.float32).to(dtype)
    residual, velocity = (torch.from_numpy(structured.vector(rng, d)[1].clip(-1e30, 1e30)) for _ in range(2))
    size = data.draw(st.integers(1, d))
    r = data.draw(st.integers(1, size))
    given_velocity = velocity if "momentum" in way else None
    numbers = {
        "plain": (0.0, 1.0, 1.0),
        "momentum": (0.9, 1.0, 1.0),
        "scaled momentum": (0.7, 1 / 3, 1.0),
        "decay": (0.0, 1.0, 0.95),
    }[way]
    outcomes = []
    for backend in (cpu if dtype == torch.float32 else plain, device):
        search = Search(float(residual[:size].abs().median()), r, size)
        kept = residual.clone(), None if given_velocity is None else given_velocity.clone()
        found = backend.accumulate_(kept[0], gradient, search, kept[1], *numbers)
        picked = backend.pick(found, r, draws.every_bit(r), r) if found.hold(r) else None
        outcomes.append((*kept, picked))
    (sums, speeds, expected), (device_sums, device_speeds, picked) = outcomes
    assert same(sums, device_sums)
    assert speeds is None or same(speeds, device_speeds)
    exact = structured.exact(sums[:size].numpy(), r)
    assert np.array_equal(picked.positions.numpy(), exact)
    assert expected is None or (
        same(expected.positions, picked.positions) and same(expected.values, picked.values)
    )


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_every_number_of_half_precision_is_widened_exactly(dtype):
    """All 65,536, subnormals of both signs among them; Triton's interpreter widens those of bfloat16 wrongly."""
    gradient = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    gradient = gradient[gradient.isfinite()]
    residual = torch.full((gradient.numel(),), -0.0)
    device.accumulate_(residual, gradient, None, None, 0.0, 1.0, 1.0)
    assert same(residual, gradient.float())


parts = st.lists(st.integers(0, 3 * BLOCK), min_size=1, max_size=6)


@settings(max_examples=12, deadline=None)
@given(parts, st.sampled_from(DTYPES), st.randoms(use_true_random=False), st.data())
def test_parts_in_any_order_are_added_and_searched_in_one_pass(sizes, dtype, random, data):
    """As the hook puts them: ends anywhere in a block, gradients in the memory order of their parameters."""
    d = sum(sizes) or sizes.append(5) or 5
    rng = np.random.default_rng(d)
    residual, gradient = (torch.from_numpy(structured.vector(rng, d)[1].clip(-1e4, 1e4)) for _ in range(2))
    gradient = gradient.to(dtype)
    size = data.draw(st.integers(1, d))
    r = data.draw(st.integers(1, size))
    search = Search(float(residual[:size].abs().median()), r, size)
    whole = device.noting(residual, search)
    expected = residual + gradient
    whole.sweep(expected, expected)
    memory = ErrorFeedback()
    memory.load_state_dict({"residual": residual})
    memory.snapshot()
    memory.expect(search)
    notes, ends = memory._notes, np.cumsum(sizes)
    for size, end in random.sample(list(zip(sizes, ends, strict=True)), len(sizes)):
        part = gradient[end - size : end]
        memory.put(int(end - size), part.view(2, -1).T.clone().T if size and size % 2 == 0 else part)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(device, "_launch", lambda *_: pytest.fail("another pass"))
        found = memory.add(None, search), search.found
    assert same(found[0], expected)
    assert all(same(a, b) for a, b in zip(notes.words, whole.words, strict=True))  # bits, counts, largest key
    if r <= search.found.count():
        picked = device.pick(search.found, r, draws.every_bit(r), r)
        assert np.array_equal(picked.positions.numpy(), structured.exact(expected[: search.size].numpy(), r))


@pytest.mark.parametrize("way", ["another floor", "another size", "a part is missing"])
def test_notes_that_do_not_fit_are_not_used(way):
    """A schedule may have changed its mind, or a memory have written parts by itself."""
    memory, gradient = ErrorFeedback(), torch.arange(300.0)
    memory.add(torch.zeros(300))
    memory.snapshot()
    memory.expect(Search(7.0, 5, 200))
    memory.put(0, gradient[:150])
    if way == "a part is missing":
        memory._next["residual"][150:] = gradient[150:]
    else:
        memory.put(150, gradient[150:])
    search = Search(9.0 if way == "another floor" else 7.0, 5, 250 if way == "another size" else 200)
    memory.add(None, search)
    assert len(search.found) == search.size - search.floor


@triton.jit
def within(out, limit, start):
    tl.store(out, programs._within(limit, start, 4096))


def test_blocks_far_beyond_a_limit():
    """Differences of positions need 64 bits: a vector may have more than 2**31 entries."""
    out = torch.full((1,), -1, dtype=torch.int32)
    for limit, start, expected in [(0, 3 * 2**30, 0), (2**40, 5, 4096), (4100, 4096, 4), (5, 5, 0)]:
        within[(1,)](out, limit, start)
        assert out.item() == expected


def test_each_operation_is_rounded():
    """With one rounding for velocity * momentum + gradient, 6,000 of 10,000 sums of this kind differ."""
    rng = generator("rounding")
    velocity, gradient = torch.randn(2, 1000, generator=rng)
    moved, residual = velocity.clone(), torch.zeros(1000)
    device.accumulate_(residual, gradient, None, moved, 0.9, 0.3, 1.0)
    by_hand = velocity * torch.tensor(0.9) + gradient * torch.tensor(0.3)
    fused = (velocity.double() * torch.tensor(0.9).double() + (gradient * torch.tensor(0.3)).double()).float()
    assert same(moved, by_hand)
    assert not same(moved, fused)


@pytest.mark.parametrize("memory", [NoMemory, ErrorFeedback, MomentumCorrection, DecayedErrorFeedback])
def test_a_node_sends_the_same_bytes_step_after_step(memory, monkeypatch):
    """Whole steps, with a dense tail, while the scale jumps: guesses are right, too high and too low."""
    layout = Layout(("w", "b"), ((300,), (37,)), 37)
    made = {}
    for backend in (cpu, device):
        monkeypatch.setattr(kernels, "_order", [backend, plain])
        node = Sparsifier(RTopK(r_over_k=3.0), 0.02, memory(), layout=layout)
        made[backend] = [
            (
                node.compress(torch.randn(337, generator=generator(step)) ** 3 * 10.0 ** (step % 4), step),
                *(tensor for _, tensor in sorted(node.memory.state_dict().items())),
            )
            for step in range(5)
        ]
    for expected, got in zip(*made.values(), strict=True):
        assert all(same(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize(
    ("memory", "bad"),
    [
        (NoMemory, "nan"),
        (NoMemory, "-inf"),
        (ErrorFeedback, "nan"),
        (ErrorFeedback, "inf"),
        (MomentumCorrection, "-inf"),
        (DecayedErrorFeedback, "inf"),
    ],
)
def test_what_is_not_finite_changes_nothing(memory, bad):
    node = Sparsifier(TopK(), 0.02, memory())
    for step in range(2):
        node.compress(torch.randn(300, generator=generator(step)), step)
    before = node.state_dict()["memory"]
    gradient = torch.randn(300)
    gradient[217] = float(bad)
    with pytest.raises(kernels.NotFiniteError, match="at index 217 of 300"):
        node.compress(gradient, 2)
    after = node.state_dict()["memory"]
    assert before.keys() == after.keys()
    assert all(same(before[name], after[name]) for name in before)


def test_values_are_subtracted_to_the_bit():
    rng = np.random.default_rng(2)
    vector = torch.from_numpy(structured.vector(rng, 1000)[1].clip(-1e30, 1e30))
    indices = torch.from_numpy(np.sort(rng.choice(1000, 300, replace=False)))
    values = torch.from_numpy(structured.vector(rng, 300)[1].clip(-1e30, 1e30))
    for factor in (1.0, -1.0, 0.3):
        ours, theirs = vector.clone(), vector.clone()
        device.subtract_(ours, indices, values, factor)
        cpu.subtract_(theirs, indices, values, factor)
        assert same(ours, theirs)
    with pytest.raises(IndexError, match=r"must lie in \[0, 1000\), got 3 to 1000"):
        device.subtract_(vector, torch.tensor([3, 1000]), torch.ones(2), 1.0)


def test_it_serves_what_its_programs_take():
    vector = torch.zeros(10)
    assert device.serves(vector, vector.half(), vector)
    assert not device.serves(vector.half())
    assert not device.serves(vector.double())
    assert not device.serves(vector[::2])
    assert not device.serves(vector, torch.zeros(10, device="meta"))
    assert not device.serves()
