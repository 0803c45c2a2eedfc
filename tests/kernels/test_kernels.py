"""The fused pass: exact for every vector, the same as its twin, and harmless in threads and forks."""

import multiprocessing
import threading
import time
import tracemalloc
import warnings
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtopk import ErrorFeedback, Layout, MomentumCorrection, NoMemory, RTopK, Sparsifier, TopK, kernels
from rtopk.kernels import draws, jit, threads
from rtopk.kernels.search import CHECKS, LARGE, Search
from rtopk.kernels.simd import deposit
from rtopk.seed import generator
from rtopk.select import draw
from rtopk.sparse import SparseVector
from rtopk.studies.bench import Gradients, synthetic
from rtopk.studies.bench.compress import Fused

JUDGE = threads._Trial.judge


@pytest.fixture
def two_threads(monkeypatch):
    """Both are used, also where a busy machine makes that slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "_trials", {})
    monkeypatch.setattr(threads._Trial, "judge", lambda self, elapsed, alone: None)
    yield
    torch.set_num_threads(before)


def test_work_that_threads_slow_down_stays_in_one_for_a_while(two_threads, monkeypatch):
    monkeypatch.setattr(threads._Trial, "judge", JUDGE)
    seen = []

    def work(seconds):
        seen.append(threading.get_ident())
        time.sleep(seconds)

    def run(seconds):
        seen.clear()
        threads.together([partial(work, seconds)] * 2)
        return set(seen)

    trial = None
    for pause in (8, 32):  # a sleep takes no processor time: one thread would have been faster
        run(0.02)
        trial = threads._trials[work, None]
        assert trial.left == trial.pause == pause
        for left in reversed(range(pause)):
            assert run(0.0) == {threading.get_ident()}
            assert trial.left == left
    trial.judge(elapsed=1.0, alone=1.9)
    assert (trial.left, trial.pause) == (0, 8)


def test_the_same_pass_with_another_loop_is_judged_by_itself(two_threads):
    def run(loop, begin):
        return loop(begin)

    for loop in (abs, float):
        assert threads.together([partial(run, partial(loop), begin) for begin in (1, 2)]) == [1, 2]
    assert set(threads._trials) == {(run, abs), (run, float)}


def slow_largest(vector, r):
    """The definition: sort by magnitude, then by index."""
    magnitude = vector.abs().tolist()
    return sorted(sorted(range(len(magnitude)), key=lambda i: (-magnitude[i], i))[:r])


def without_loops(monkeypatch):
    monkeypatch.setattr(kernels, "_order", [kernels.BACKENDS["torch"]])


def heavy(d, seed, step=0):
    rng = generator(seed, step)
    return torch.randn(d, generator=rng).mul_(torch.randn(d, generator=rng).exp_())


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(floats | st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45]), min_size=1, max_size=300), st.data())
def test_the_r_largest_are_those_of_the_definition(entries, data):
    vector = torch.tensor(entries)
    r = data.draw(st.integers(1, len(entries)))
    expected = slow_largest(vector, r)
    assert kernels.largest(vector, r).tolist() == expected
    assert kernels.largest(vector.double(), r).tolist() == expected  # the twin


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.floats(0.0, 3.0), st.integers(0, 5), st.data())
def test_candidates_are_all_entries_at_or_above_the_floor(d, floor, seed, data):
    gradient, size = heavy(d, seed), data.draw(st.integers(0, d))
    memory = ErrorFeedback()
    memory.add(heavy(d, seed + 100))
    search = Search(floor, size=size)
    vector, candidates = memory.add(gradient, search), search.found
    assert torch.equal(vector, heavy(d, seed + 100) + gradient)
    expected = (vector[:size].abs() >= torch.tensor(floor)).nonzero()[:, 0]
    assert torch.equal(candidates.positions, expected)


D, R = 20_000, 100
HOSTILE = {
    "all equal": torch.full((D,), -3.0),
    "all zero": torch.zeros(D),
    "one huge": torch.zeros(D).index_fill(0, torch.tensor([777]), 1e30),
    "denormals": torch.randn(D, generator=generator(1)) * 1e-41,
    "massive ties": torch.randn(D, generator=generator(2)).bfloat16().float().mul(4).round(),
    "ascending": torch.arange(D, dtype=torch.float32),
    "descending": torch.arange(D, 0, -1, dtype=torch.float32),
    "clustered": torch.cat([torch.randn(D // 10, generator=generator(3)) * 1e6, torch.randn(D - D // 10)]),
    "largest floats": torch.full((D,), 3.4e38),
}


DTYPES = (torch.float32, torch.bfloat16, torch.float64)
ROUNDED_TO_INF = ("largest floats", torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "dtype"), [case for case in product(HOSTILE, DTYPES) if case != ROUNDED_TO_INF]
)
def test_hostile_vectors_are_exact(name, dtype):
    vector = HOSTILE[name].to(dtype)
    expected = slow_largest(vector, R)
    assert kernels.largest(vector, R).tolist() == expected
    # A useless floor makes the pass raise its bound again and again, and finds the same.
    found = kernels.scan(vector, Search(0.0, R))
    picked = kernels.pick(found, R, draws.every_bit(R), R)
    assert picked.positions.tolist() == expected
    assert torch.equal(picked.values, vector[picked.positions])
    assert picked.magnitude == float(vector[expected].abs().min())


def test_a_useless_floor_holds_little_more_than_r():
    found = kernels.scan(torch.arange(2**18 - 1, dtype=torch.float32), Search(0.0, 1000))
    assert 1000 <= len(found) <= 1334 + 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_risen_bound_lets_the_next_float_pass(dtype):
    vector = torch.ones(3_000_000 if dtype == torch.float64 else 20_000, dtype=dtype)
    vector[-5] = torch.nextafter(vector[0], 2 * vector[0])
    picked = kernels.pick(kernels.scan(vector, Search(0.0, 1)), 1, draws.every_bit(1), 1)
    assert picked.positions.tolist() == [vector.numel() - 5]


def test_many_equal_candidates_are_cut_exactly():
    """So many ties at the r-th magnitude that the window overflows and the histogram decides."""
    values = torch.randint(1, 4, (50_000,), generator=generator(4)).float()
    for r in (1, 10_000, 33_333, 49_999):
        assert kernels.largest(values, r).tolist() == slow_largest(values, r)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_bits_are_deposited_with_and_without_the_instruction(bits, mask):
    places = [i for i in range(64) if mask >> i & 1]
    expected = sum((bits >> n & 1) << place for n, place in enumerate(places))
    lowest = np.uint64(bits & ((1 << len(places)) - 1))  # by steps, bits beyond the mask are not dropped
    assert int(deposited(lowest, np.uint64(mask))) == expected
    with np.errstate(over="ignore"):
        assert int(deposit(lowest, np.uint64(mask))) == expected


@jit.entry
def deposited(bits, mask):
    return deposit(bits, mask)


MEMORIES = {
    "error feedback": ErrorFeedback,
    "momentum": MomentumCorrection,
    "clipped momentum": lambda: MomentumCorrection(momentum=0.7, clip_norm=2.0, masking=False),
    "none": NoMemory,
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("selector", [TopK(), RTopK(r_over_k=5), RTopK(r_over_k=30)], ids=repr)
def test_fused_equals_twin_to_the_bit(memory, selector, monkeypatch):
    """Over steps in which the scale jumps by 1e6 and the density changes, with a dense tail."""
    d = 5_003
    layout = Layout(("weight", "bias"), ((d - 37,), (37,)), dense_size=37)
    density = lambda step: 0.02 if step < 6 else 0.005 * (step % 3 + 1)  # noqa: E731
    fused = Sparsifier(selector, density, MEMORIES[memory](), layout=layout)
    twin = Sparsifier(selector, density, MEMORIES[memory](), layout=layout)
    for step in range(16):
        gradient = heavy(d, 5, step) * (1e6 if step in (4, 9) else 1.0)
        gradient[-5:] *= 1e3  # the tail is large, and does not compete
        payload = fused.compress(gradient, step)
        with monkeypatch.context() as patch:
            without_loops(patch)
            assert torch.equal(twin.compress(gradient, step), payload)
        for name, tensor in twin.memory.state_dict().items():
            assert torch.equal(fused.memory.state_dict()[name], tensor), (step, name)
    assert 0 < fused.search.second_scans < fused.search.steps == 16


LARGE_D, LARGE_R = 1_000_000, 2 * LARGE


def nth_magnitude(vector, r):
    return float(np.partition(vector.abs().numpy(), -r)[-r])


@pytest.mark.parametrize("guess", [0.0, 0.5, 1.2, 1e6])
def test_a_sample_corrects_a_bad_guess(guess):
    """The sample has 269 of the r on average: it misses r, or brings half more, with probability below 0.002."""
    vector = heavy(LARGE_D, 20)
    true = nth_magnitude(vector, LARGE_R)
    found = kernels.scan(vector, Search(guess * true, LARGE_R))
    assert LARGE_R <= len(found) <= 1.5 * LARGE_R
    assert LARGE_R <= int((vector.abs() >= found.floor).sum()) <= 1.5 * LARGE_R  # not by raising the bound


def test_a_good_guess_is_kept_and_soon_not_looked_at():
    vector = heavy(LARGE_D, 21)
    good = 0.98 * nth_magnitude(vector, LARGE_R)
    search = Search(good, LARGE_R)
    for left in (*range(CHECKS - 1, -1, -1), 0, 0):
        assert kernels.scan(vector, search).floor == good
        assert search.checks == left
    search.floor = 1.5 * good
    assert len(kernels.scan(vector, search)) < LARGE_R  # believed once, and then checked
    assert len(kernels.scan(vector, search)) >= LARGE_R
    search.checks, search.floor = 0, 0.0
    kernels.scan(vector, search)
    assert search.checks == CHECKS


def test_the_sample_is_of_the_sums_that_the_pass_writes():
    """Residual, velocity and gradient each far from the sum of the three."""
    memory = MomentumCorrection(momentum=0.5, clip_norm=1e4)
    memory.add(heavy(LARGE_D, 22) * 10.0)
    search = Search(1e30, LARGE_R)
    vector = memory.add(heavy(LARGE_D, 23) * 100.0, search)
    assert LARGE_R <= int((vector.abs() >= search.found.floor).sum()) <= 1.5 * LARGE_R


@pytest.mark.slow
def test_a_jump_of_scale_needs_no_second_scan_where_r_is_large():
    node = Sparsifier(TopK(), LARGE_R / LARGE_D, NoMemory())
    for step in range(8):
        gradient = heavy(LARGE_D, 24, step) * (1e6 if step in (3, 4) else 1.0)
        sent = node.codec.decode(node.compress(gradient, step))
        assert float(sent.values.abs().min()) == nth_magnitude(gradient, LARGE_R)
    assert node.search.second_scans == 1  # the first


def test_corrected_guesses_select_what_the_twin_selects(monkeypatch):
    d = 400_003
    fused, twin = (Sparsifier(RTopK(r_over_k=5), 0.03, ErrorFeedback()) for _ in range(2))
    assert round(0.03 * d) * 5 >= LARGE
    for step in range(5):
        gradient = heavy(d, 25, step) * (1e6 if step == 2 else 1.0)
        payload = fused.compress(gradient, step)
        with monkeypatch.context() as patch:
            without_loops(patch)
            assert torch.equal(twin.compress(gradient, step), payload)
        assert torch.equal(fused.memory.residual, twin.memory.residual)


def test_one_and_two_threads_give_the_same(two_threads):
    d = 600_001
    gradients = [heavy(d, 6, step) for step in range(4)]
    gradients[2][: d // 3] *= 1e6  # nearly all candidates in the range of one thread
    results = []
    for number in (2, 1):
        torch.set_num_threads(number)
        node = Sparsifier(RTopK(r_over_k=5), 0.01, MomentumCorrection())
        payloads = [node.compress(gradient, step) for step, gradient in enumerate(gradients)]
        results.append((payloads, node.memory.state_dict()))
    for one, two in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(one, two)
    for name in ("residual", "velocity"):
        assert torch.equal(results[0][1][name], results[1][1][name])


@pytest.mark.parametrize("memory", ["error feedback", "momentum", "clipped momentum"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 4_000, 5_002])
def test_a_refused_gradient_changes_nothing(memory, bad, where):
    kept = MEMORIES[memory]()
    kept.add(heavy(5_003, 7))
    before = kept.state_dict()
    gradient = heavy(5_003, 8)
    gradient[where] = bad
    with pytest.raises(ValueError, match=f"got {bad} at index {where} of 5003"):
        kept.add(gradient, Search(1.0, 50))
    for name, tensor in kept.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("memory", ["error feedback", "momentum"])
def test_a_sum_that_would_overflow_is_refused(memory):
    kept = MEMORIES[memory]()
    huge = torch.tensor([1.0, 3e38, 2.0])
    kept.add(huge, Search(0.5))
    before = kept.state_dict()
    with pytest.raises(ValueError, match="at index 1 of 3"):
        kept.add(huge, Search(0.5))
    for name, tensor in kept.state_dict().items():
        assert torch.equal(tensor, before[name])
    kept.add(torch.tensor([1.0, -3e38, 2.0]), Search(0.5))  # this sum is finite


def test_a_residual_changed_from_outside_is_looked_at_again():
    memory = ErrorFeedback()
    memory.add(torch.ones(100), Search(0.5))
    memory.residual.mul_(3e38)
    before = memory.residual.clone()
    with pytest.raises(ValueError, match="residual"):
        memory.add(torch.full((100,), 1e38), Search(0.5))
    assert torch.equal(memory.residual, before)


def test_subtract_refuses_what_does_not_fit():
    memory = ErrorFeedback()
    memory.add(torch.ones(10))
    for indices, values, error in (([3, 10], [1.0, 1.0], IndexError), ([3], [float("inf")], ValueError)):
        with pytest.raises(error):
            memory.subtract(SparseVector(torch.tensor(indices), torch.tensor(values), 10))
        assert torch.equal(memory.residual, torch.ones(10))


def test_the_guess_adapts_and_misses_rarely():
    node = Sparsifier(RTopK(r_over_k=5), 0.001)
    for step in range(60):
        node.compress(heavy(50_000, 9, step), step)
    assert node.search.steps == 60
    assert node.search.second_scans <= 2  # the first step, and one miss


def test_selectors_stay_equal_and_share_nothing():
    selector = RTopK(r_over_k=5)
    nodes = [Sparsifier(selector, 0.01, node=node) for node in range(3)]
    for step in range(3):
        for node in nodes:
            node.compress(heavy(5_000, node.node, step) * 10.0**node.node, step)
    assert selector == RTopK(r_over_k=5)
    assert repr(selector) == "RTopK(r_over_k=5, nodes=None)"
    assert all(node.search.second_scans == 1 for node in nodes)
    assert set(nodes[0].state_dict()) == {"seed", "node", "memory"}


def compress_some(seed, out):
    node = Sparsifier(RTopK(r_over_k=5), 0.01)
    out[seed] = [node.compress(heavy(300_000, seed, step), step) for step in range(3)]


def test_several_callers_at_once(two_threads):
    alone, together = {}, {}
    for seed in range(4):
        compress_some(seed, alone)
    callers = [threading.Thread(target=compress_some, args=(seed, together)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for seed in range(4):
        assert all(torch.equal(a, b) for a, b in zip(alone[seed], together[seed], strict=True))


def residual_after(gradients):
    method = Fused(gradients[0].numel(), gradients[0].numel() // 100, gradients[0].numel() // 20)
    for step, gradient in enumerate(gradients):
        method.step(gradient, step)
    return method.memory.residual.numpy()


def in_child(gradients, pipe):
    pipe.send(residual_after(gradients))
    pipe.close()


def test_works_in_a_forked_child(two_threads):
    """With torch's threads and our pool in use in the parent: torch's own threads would hang in the child."""
    gradients = [heavy(600_000, 10, step) for step in range(3)]
    expected = residual_after(gradients)
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=in_child, args=(gradients, sender))
    with warnings.catch_warnings():  # from Python 3.12 on: a fork in a process with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    try:
        assert receiver.poll(60)
        assert np.array_equal(receiver.recv(), expected)
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()


@pytest.mark.parametrize("uneven", [False, True])
def test_a_step_takes_little_extra_memory(uneven, two_threads):
    """At density 0.1 %, at most 2 % of the vector, with the arrays that are kept for the next step.

    Also where nearly all that is large lies in the range of one thread.
    """
    d = 4_000_000
    gradients = synthetic(d, 1)
    if uneven:
        gradients.long[: d // 2] *= 0.1
        gradients = Gradients("uneven", [gradients.long[:d]])
    methods = (
        Fused(d, d // 1000, d // 200),
        Fused(d, d // 1000, d // 200),
    )  # one before, for what is loaded on the way
    for step in range(20):
        methods[0].step(gradients.at(step), step)
    tracemalloc.start()
    for step in range(20):
        if step == 12:  # at first, while the residual grows fast, it may be twice as much
            tracemalloc.reset_peak()
        methods[1].step(gradients.at(step), step)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - 4 * d <= 0.02 * 4 * d  # the residual is no extra


def test_a_draw_allocates_for_k_not_for_d():
    draw(100, 3, generator(12))
    draw(10**6, 3, generator(12))
    tracemalloc.start()
    drawn = draw(10**12, 1000, generator(12))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
    assert drawn.numel() == 1000
    assert bool((drawn[1:] > drawn[:-1]).all())
    assert 0 <= int(drawn[0]) <= int(drawn[-1]) < 10**12


def test_few_and_words_draw_the_same():
    for r, k in ((10, 1), (1000, 7), (70_000, 900)):
        assert torch.equal(draws.draw_few(r, k, 13), draws.set_bits(draws.draw_words(r, k, 13), k))


def test_every_subset_is_equally_likely():
    """Chi-square over the 20 subsets of 3 of 6: false alarm 1e-6; 4000 draws see a bias of 20 % of one subset."""
    counts = {}
    for seed in range(4000):
        subset = tuple(draw(6, 3, generator(14, seed)).tolist())
        counts[subset] = counts.get(subset, 0) + 1
    assert len(counts) == 20
    statistic = sum((count - 200.0) ** 2 / 200.0 for count in counts.values())
    assert statistic < 66.3  # the 1 - 1e-6 quantile of chi-square with 19 degrees of freedom
