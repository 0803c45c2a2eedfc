"""A gradient that comes in parts: sums, velocities and selection of a whole one, to the bit, on every backend."""

from itertools import pairwise

import numpy as np
import pytest
import structured
import torch
from chosen import prefer
from hypothesis import given, settings
from hypothesis import strategies as st

from rtopk import kernels
from rtopk.kernels import collect, cpu, draws, loops, threads
from rtopk.kernels.search import LARGE, Search, stride
from rtopk.memory import ErrorFeedback, MomentumCorrection

MEMORIES = {
    "error feedback": ErrorFeedback,
    "momentum": lambda: MomentumCorrection(0.9),
    "nesterov": lambda: MomentumCorrection(0.9, nesterov=True),
}
DTYPES = torch.float32, torch.float16, torch.bfloat16


def by_hand(state, gradient, kind):
    """Return the next state, every operation rounded by itself."""
    gradient = gradient.to(torch.float32)
    if kind == "error feedback":
        return {"residual": state["residual"] + gradient}
    factor = torch.tensor(0.9)
    velocity = state["velocity"] * factor + gradient
    ahead = velocity * factor + gradient if kind == "nesterov" else velocity
    return {"residual": state["residual"] + ahead, "velocity": velocity}


def same(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def shaped(part, random):
    """Return a part in the memory order of some parameter."""
    if part.numel() and part.numel() % 2 == 0 and random.random() < 0.5:
        return part.view(2, -1).T.contiguous().T  # channels-last, so to speak
    return part


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize(
    ("backend", "most", "examples"), [("cpu", 30_000, 40), ("torch", 30_000, 15), ("triton", 6_000, 5)]
)
def test_parts_are_as_a_whole(backend, most, examples, kind):
    """Parts in any order, below and above what is searched by itself; one left out, one with NaN taken back."""
    if backend == "triton":
        pytest.importorskip("triton")

    @settings(max_examples=examples, deadline=None)
    @given(
        st.lists(st.integers(0, most), min_size=1, max_size=6),
        st.sampled_from(DTYPES),
        st.randoms(use_true_random=False),
        st.data(),
    )
    def check(sizes, dtype, random, data):
        d = sum(sizes) or sizes.append(7) or 7
        rng = np.random.default_rng(random.randrange(2**32))
        memory = MEMORIES[kind]()
        names = memory._names
        vectors = [
            torch.from_numpy(structured.vector(rng, d)[1].clip(-1e4, 1e4)) for _ in (*names, "gradient")
        ]
        state, gradient = dict(zip(names, vectors, strict=False)), vectors[-1].to(dtype)
        memory.load_state_dict(state)
        size = data.draw(st.integers(1, d))
        r = data.draw(st.integers(1, size))
        ends = [int(end) for end in np.cumsum(sizes)]
        spans = list(zip([0, *ends], ends, strict=False))
        out = random.choice([None, *spans])
        expected = by_hand(state, gradient, kind)
        if out is not None:
            for vector in expected.values():
                vector[slice(*out)] = 0.0
        ranked = np.sort(expected["residual"][:size].abs().numpy())
        floor = float(ranked[max(0, size - r - random.randrange(1 + r // 4))])
        search = Search(floor, random.choice([None, r]), size)
        for attempt in ("taken back", "kept"):
            held = [getattr(memory, name) for name in names]
            snapshot = memory.snapshot()
            memory.expect(search)
            for begin, end in random.sample(spans, len(spans)):
                part = shaped(gradient[begin:end], random)
                if (begin, end) == out:
                    memory.leave_out(begin, end)
                else:
                    memory.put(begin, part)
            found = memory.add(None, search)
            assert found is memory.residual
            for name in names:
                assert same(getattr(memory, name), expected[name]), (attempt, name)
            if search.found.hold(r):
                picked = kernels.pick(search.found, r, draws.every_bit(r), r)
                exact = structured.exact(expected["residual"][:size].numpy(), r)
                assert np.array_equal(picked.positions.numpy(), exact)
            if out is not None:
                memory.bring_back(*out)
                for name in names:
                    assert torch.equal(getattr(memory, name)[slice(*out)], state[name][slice(*out)])
            if attempt == "taken back":
                memory.restore(snapshot)
                for name, tensor in zip(names, held, strict=True):
                    assert getattr(memory, name) is tensor
                    assert same(tensor, state[name])

    with pytest.MonkeyPatch.context() as monkeypatch:
        prefer(monkeypatch, backend)
        monkeypatch.setattr(kernels, "_stand_in", False)
        check()


def test_candidates_of_parts_are_noted_not_searched_again(monkeypatch):
    """Two large parts and a hundred small ones, added in two turns: each entry is looked at once."""
    prefer(monkeypatch, "cpu")
    monkeypatch.setattr(cpu, "batch", 22_000)
    monkeypatch.setattr(kernels, "_stand_in", False)
    sizes = [20_000, *[50] * 100, 8192]
    d, memory = sum(sizes), ErrorFeedback()
    gradient = torch.arange(float(d)).flip(0)
    memory.add(torch.zeros(d))
    memory.snapshot()
    search = Search(float(d - 300), 200, d - 10)
    memory.expect(search)
    looked = []
    kept = collect._piece

    def noted(loop, begin, end, *rest):
        looked.append((begin, end))
        return kept(loop, begin, end, *rest)

    monkeypatch.setattr(collect, "_piece", noted)
    for part, end in zip(gradient.split(sizes), np.cumsum(sizes), strict=True):
        memory.put(int(end) - part.numel(), part)
    memory.add(None, search)
    assert looked == [(0, 22_000), (22_000, d - 10)]
    assert len(search.found) == 300


def test_a_part_outside_of_the_vector_is_refused():
    memory = ErrorFeedback()
    with pytest.raises(ValueError, match="put needs a residual"):
        memory.put(0, torch.ones(3))
    memory.add(torch.ones(10))
    memory.snapshot()
    for begin, size in ((8, 3), (-1, 3), (11, 0)):
        with pytest.raises(ValueError, match=rf"a part must lie in \[0, 10\), got {begin} to {begin + size}"):
            memory.put(begin, torch.ones(size))
    assert torch.equal(memory.residual, torch.ones(10))


def test_several_threads_share_stretches_to_the_bit(monkeypatch):
    """Three stretches in two turns, cut for four threads, parts ending anywhere: as in one thread."""
    prefer(monkeypatch, "cpu")
    monkeypatch.setattr(kernels, "_stand_in", False)
    monkeypatch.setattr(threads, "PIECE", 1000)
    monkeypatch.setattr(threads, "INLINE", 5000)
    rng = np.random.default_rng(5)
    d = 90_001
    residual, gradient = (torch.from_numpy(structured.vector(rng, d)[1].clip(-1e4, 1e4)) for _ in range(2))
    ends = sorted({0, 30_011, 60_007, d, *rng.integers(0, d, 40).tolist()})
    spans = list(pairwise(ends))
    late = [span for span in spans if 30_011 <= span[0] < 60_007]
    found = []
    for number in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        memory, search = ErrorFeedback(), Search(1.0, None, d - 5)
        memory.load_state_dict({"residual": residual})
        memory.snapshot()
        memory.expect(search)
        for begin, end in [span for span in spans if span not in late]:
            memory.put(begin, gradient[begin:end])
        memory._put_waiting()
        for begin, end in late:
            memory.put(begin, gradient[begin:end])
        assert same(memory.add(None, search), residual + gradient)
        found.append(search.found.positions)
    assert len(found[0])
    assert torch.equal(*found)


def test_a_sample_of_the_parts_corrects_a_bad_guess(monkeypatch):
    """As it does for a whole vector: the sample is of the very sums, wherever the parts lie."""
    prefer(monkeypatch, "cpu")
    monkeypatch.setattr(kernels, "_stand_in", False)
    kept, samples = collect.quantiles, []
    monkeypatch.setattr(collect, "quantiles", lambda sample, *of: samples.append(sample) or kept(sample, *of))
    d, r = 300_001, LARGE
    rng = np.random.default_rng(3)
    state = {
        name: torch.from_numpy(rng.standard_normal(d).astype(np.float32)) for name in ("residual", "velocity")
    }
    gradient = torch.from_numpy(rng.standard_normal(d).astype(np.float32))
    spans = list(pairwise([0, 7, 4096, 100_003, 100_003, 250_000, d]))
    for make in (ErrorFeedback, MEMORIES["momentum"]):
        expected = by_hand(state, gradient, "error feedback" if make is ErrorFeedback else "momentum")[
            "residual"
        ]
        for guess in (0.0, 1e9):
            memory, search = make(), Search(guess, r, d - 11)
            memory.load_state_dict({name: state[name] for name in memory._names})
            memory.snapshot()
            memory.expect(search)
            for begin, end in reversed(spans):
                memory.put(begin, gradient[begin:end])
            assert same(memory.add(None, search), expected)
            assert same(torch.from_numpy(samples.pop()), expected[: d - 11 : stride(d - 11)])
            assert not samples
            assert r <= len(search.found) < 1.5 * r


def test_a_guess_far_too_low_costs_no_second_look_with_several_threads(monkeypatch):
    """Each of four pieces then holds a third more than what is wanted of all."""
    prefer(monkeypatch, "cpu")
    monkeypatch.setattr(kernels, "_stand_in", False)
    monkeypatch.setattr(threads, "INLINE", 5000)
    monkeypatch.setattr(threads, "ranges", lambda size, multiple: threads._cuts(size, multiple, 4))
    monkeypatch.setattr(collect, "ranges", threads.ranges)
    monkeypatch.setattr(loops, "scan", None)
    d, memory, search = 80_000, ErrorFeedback(), Search(0.0, 100)
    gradient = torch.randn(d, generator=torch.Generator().manual_seed(1))
    memory.add(torch.zeros(d))
    memory.snapshot()
    memory.expect(search)
    memory.put(0, gradient[:30_000])
    memory.put(30_000, gradient[30_000:])
    memory.add(None, search)
    assert len(search.found) > 2 * 100
    picked = kernels.pick(search.found, 100, draws.every_bit(100), 100)
    assert np.array_equal(picked.positions.numpy(), structured.exact(gradient.numpy(), 100))
