"""The three operators: what they return, what they refuse, and the law of the draw."""

import math
from collections import Counter
from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rtopk import (
    Chunked,
    ErrorFeedback,
    NoMemory,
    RandomK,
    RTopK,
    Sparsifier,
    TopK,
    defaults,
    random_k,
    rtop_k,
    top_k,
)  # fmt: skip
from rtopk.local import LocalSGD
from rtopk.seed import generator
from rtopk.select import draw, draw_largest

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def by_definition(vector, r):
    """The r largest magnitudes, lower index first on ties."""
    values = vector.to(torch.float64).tolist()
    return sorted(sorted(range(len(values)), key=lambda j: (-abs(values[j]), j))[:r])


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_top_k_is_the_definition_with_ties(dtype, data):
    # Few distinct values, so that most cuts fall between equal magnitudes of both signs.
    values = data.draw(
        st.lists(st.sampled_from([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=60)
    )
    k = data.draw(st.integers(1, len(values)))
    vector = torch.tensor(values, dtype=dtype)
    assert top_k(vector, k).tolist() == by_definition(vector, k)


@pytest.mark.parametrize("dtype", DTYPES)
@given(size=st.integers(1, 300), seed=st.integers(0, 1000), data=st.data())
def test_rtop_k_draws_from_the_r_largest(dtype, size, seed, data):
    r = data.draw(st.integers(1, size))
    k = data.draw(st.integers(1, r))
    vector = torch.randn(size, generator=generator(seed)).to(dtype)
    before = vector.clone()
    indices = rtop_k(vector, k, r, generator(seed, "draw"))
    assert indices.dtype == torch.int64
    assert indices.tolist() == sorted(set(indices.tolist()))
    assert len(indices) == k
    assert set(indices.tolist()) <= set(by_definition(vector, r))
    assert torch.equal(vector, before)


def test_family_ends():
    vector = torch.randn(500, generator=generator(1))
    assert torch.equal(rtop_k(vector, 20, 20, generator(2)), top_k(vector, 20))
    assert torch.equal(rtop_k(vector, 20, 500, generator(2)), random_k(vector, 20, generator(2)))


def test_vector_that_is_not_contiguous():
    matrix = torch.randn(50, 7, generator=generator(3))
    column = matrix[:, 3]
    assert not column.is_contiguous()
    assert torch.equal(top_k(column, 9), top_k(column.contiguous(), 9))
    assert torch.equal(rtop_k(column, 5, 9, generator(4)), rtop_k(column.contiguous(), 5, 9, generator(4)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_refused_by_name(bad):
    vector = torch.ones(10)
    vector[7] = bad
    for select in (
        lambda: top_k(vector, 2),
        lambda: rtop_k(vector, 2, 5, generator(0)),
        lambda: random_k(vector, 2, generator(0)),
    ):
        with pytest.raises(ValueError, match=r"vector must be finite, got -?(nan|inf) at index 7 of 10"):
            select()


@pytest.mark.parametrize(("k", "r"), [(0, 3), (4, 3), (3, 11), (-1, 5)])
def test_limits_are_checked(k, r):
    with pytest.raises(ValueError, match=rf"need 1 <= k <= r <= d, got k={k}, r={r}, d=10"):
        rtop_k(torch.ones(10), k, r, generator(0))


@pytest.mark.parametrize("vector", [torch.ones(3, 3), torch.ones(5, dtype=torch.int64), torch.ones(())])
def test_only_float_vectors(vector):
    with pytest.raises(ValueError, match="1-D floating-point"):
        top_k(vector, 1)


def test_no_global_generator_is_read_or_seeded():
    before = torch.get_rng_state()
    rtop_k(torch.randn(100, generator=generator(0)), 5, 20, generator(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_usual_rule_takes_the_largest_and_without_a_memory_draws_from_twice_k():
    for memory, considered in ((ErrorFeedback(), [10, 10, 10]), (NoMemory(), [10, 20, 20])):
        rules = [defaults.selector(nodes, memory) for nodes in (1, 2, 64)]
        assert [rule.considered(k=10, d=1000) for rule in rules] == considered


def test_a_rule_is_given_by_name_or_as_an_object_and_nothing_else():
    assert defaults.selector(4, ErrorFeedback(), "rtop-k") == RTopK(nodes=4)
    assert defaults.selector(4, ErrorFeedback(), "top-k") == TopK()
    model = torch.nn.Linear(4, 4)
    makers = (
        lambda wrong: defaults.selector(4, ErrorFeedback(), wrong),
        lambda wrong: Sparsifier(wrong, 0.1),
        lambda wrong: LocalSGD(model, 1, selector=wrong),
    )
    for make, wrong in product(makers, ("topk", TopK, 3)):
        with pytest.raises(ValueError, match=r"^selector must .* such as rtopk.TopK\(\)"):
            make(wrong)
    LocalSGD(model, 1, selector="top-k")


def test_rtop_k_selector_caps_r_and_takes_it_either_way():
    assert RTopK(nodes=5).considered(k=10, d=1000) == 50
    assert RTopK(r_over_k=2.5).considered(k=10, d=1000) == 25
    assert RTopK(nodes=5).considered(k=300, d=1000) == 1000
    vector = torch.randn(1000, generator=generator(5))
    assert torch.equal(
        RTopK(nodes=5).select(vector, 300, generator(6)), RandomK().select(vector, 300, generator(6))
    )
    assert torch.equal(
        RTopK(r_over_k=1).select(vector, 30, generator(6)), TopK().select(vector, 30, generator(6))
    )


class FirstK(TopK):
    """A rule of the user's own, on top of one of ours."""

    def select(self, vector, k, rng):
        return torch.arange(k)


class TwiceK(TopK):
    """Another r, the same way to select."""

    def considered(self, k, d):
        return 2 * k


def test_a_selector_of_the_users_own_is_asked():
    """In every step: from the second on there is a guess, and the pass looks for the largest."""
    first, twice = Sparsifier(FirstK(), 0.01), TwiceK()
    for step in range(3):
        payload = first.compress(torch.arange(1000.0), step)
        assert first.codec.decode(payload).indices.tolist() == list(range(10))
        drawn = draw_largest(torch.arange(1000.0), 10, twice.considered(10, 1000), generator(step)).indices
        assert torch.equal(drawn, rtop_k(torch.arange(1000.0), 10, 20, generator(step)))


@pytest.mark.parametrize("options", [{}, {"r_over_k": 2, "nodes": 2}, {"r_over_k": 0.5}, {"nodes": 0}])
def test_rtop_k_selector_refuses(options):
    with pytest.raises(ValueError, match=r"r_over_k|r / k"):
        RTopK(**options)


def check_uniform(sample, subsets, draws):
    """Chi-square over all subsets, at most 21 of them, 1,000 draws for each.

    False alarm 1e-6; one subset whose probability is off by 30 % is found.
    """
    counts = Counter(sample(i) for i in range(draws))
    assert set(counts) <= set(subsets)
    expected = draws / len(subsets)
    statistic = sum((counts[s] - expected) ** 2 / expected for s in subsets)
    free = len(subsets) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile at 1 - 1e-6 (z = 4.753).
    limit = free * (1 - 2 / (9 * free) + 4.753 * math.sqrt(2 / (9 * free))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f} over {limit:.1f}"


@pytest.mark.parametrize(("r", "k"), [(6, 2), (6, 3), (7, 5), (12, 1)])
def test_every_subset_is_equally_likely(r, k):
    subsets = list(combinations(range(r), k))
    check_uniform(
        lambda i: tuple(draw(r, k, generator(r, k, i)).tolist()), subsets, draws=1000 * len(subsets)
    )


def test_every_pair_of_many_is_equally_likely():
    """With r = 40, k = 20 there are too many subsets to count; the 780 pairs must be alike.

    Each pair is in a draw with probability (20 x 19) / (40 x 39). Over 4,000 draws the largest deviation of 780
    counts exceeds 6.1 standard deviations with probability below 1e-6; a pair off by 25 % is found.
    """
    pairs = torch.zeros(40, 40)
    for i in range(4000):
        chosen = torch.zeros(40)
        chosen[draw(40, 20, generator("pairs", i))] = 1
        pairs += torch.outer(chosen, chosen)
    p = (20 * 19) / (40 * 39)
    upper = pairs[torch.triu_indices(40, 40, offset=1).unbind()]
    deviation = (upper - 4000 * p).abs().max() / math.sqrt(4000 * p * (1 - p))
    assert deviation < 6.1


def test_proposition_1_and_its_middle_line():
    """E||w - rtop_k(w)||^2 = (1 - k/r) sum of the r largest squares + the rest <= (1 - k/d) ||w||^2.

    10,000 draws; the mean must lie within 5 standard errors of the exact middle line (false alarm 6e-7); a bias
    of 5 standard errors, here under 1 % of the value, is found.
    """
    vector = torch.randn(50, generator=generator(8), dtype=torch.float64)
    k, r = 5, 15
    squares = (vector**2).sort(descending=True).values
    exact = float((1 - k / r) * squares[:r].sum() + squares[r:].sum())
    assert exact <= float((1 - k / 50) * squares.sum())
    errors = torch.empty(10_000, dtype=torch.float64)
    for i in range(len(errors)):
        kept = rtop_k(vector, k, r, generator("proposition", i))
        errors[i] = squares.sum() - (vector[kept] ** 2).sum()
    standard_error = float(errors.std()) / math.sqrt(len(errors))
    assert standard_error < 0.01 * exact / 5
    assert abs(float(errors.mean()) - exact) < 5 * standard_error


@given(size=st.integers(1, 90), chunk=st.integers(1, 40), seed=st.integers(0, 99), data=st.data())
def test_chunks_send_their_largest_with_ties_to_the_left(size, chunk, seed, data):
    k, among = data.draw(st.integers(1, size)), data.draw(st.sampled_from([1.0, 1.5, 3.0]))
    vector = torch.randint(-3, 4, (size,), generator=generator(seed)).float()  # many ties
    positions = Chunked(chunk, among).select(vector, k, generator("chunks", seed)).tolist()
    assert positions == sorted(set(positions))
    assert len(positions) == k
    for begin in range(0, size, chunk):
        part = vector[begin : begin + chunk].abs().tolist()
        share = min(size, begin + chunk) * k // size - begin * k // size
        ranked = sorted(range(len(part)), key=lambda i: (-part[i], i))[: math.ceil(share * among)]
        chosen = {p - begin for p in positions if begin <= p < begin + chunk}
        assert len(chosen) == share
        assert chosen <= set(ranked)


@given(size=st.integers(1, 200), seed=st.integers(0, 10_000), data=st.data())
def test_proposition_1_holds_for_the_exact_expectation(size, seed, data):
    r = data.draw(st.integers(1, size))
    k = data.draw(st.integers(1, r))
    squares = (
        (torch.randn(size, generator=generator(seed), dtype=torch.float64) ** 2).sort(descending=True).values
    )
    middle = (1 - k / r) * squares[:r].sum() + squares[r:].sum()
    assert middle <= (1 - k / size) * squares.sum() + 1e-9
