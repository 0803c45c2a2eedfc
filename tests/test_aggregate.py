"""The two means: by definition, in node order, dense and sparse alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rtopk import SparseVector, average, average_sparse
from rtopk.kernels import union
from rtopk.kernels.plain import union as by_sorting
from rtopk.seed import generator


def vectors(nodes, size, seed):
    result = []
    for node in range(nodes):
        rng = generator(seed, node)
        k = int(torch.randint(1, size + 1, (), generator=rng))
        indices = torch.randperm(size, generator=rng)[:k].sort().values
        result.append(SparseVector(indices, torch.randn(k, generator=rng), size))
    return result


@given(nodes=st.integers(1, 6), size=st.integers(1, 40), seed=st.integers(0, 500), weighted=st.booleans())
def test_both_means_are_their_definition(nodes, size, seed, weighted):
    sent = vectors(nodes, size, seed)
    weights = [float(i + 1) for i in range(nodes)] if weighted else None
    shares = weights or [1.0] * nodes
    total, present = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for vector, share in zip(sent, shares, strict=True):
        total += share * vector.to_dense().double()
        present[vector.indices] += share
    by_nodes = total / sum(shares)
    by_received = torch.where(present > 0, total / present, 0.0)
    assert torch.allclose(average(sent, "nodes", weights).double(), by_nodes, atol=1e-6)
    assert torch.allclose(average(sent, "received", weights).double(), by_received, atol=1e-6)


@given(nodes=st.integers(1, 6), size=st.integers(1, 40), seed=st.integers(0, 500), weighted=st.booleans())
def test_sparse_is_dense_to_the_bit(nodes, size, seed, weighted):
    sent = vectors(nodes, size, seed)
    weights = [float(i + 1) for i in range(nodes)] if weighted else None
    for mean in ("nodes", "received"):
        sparse = average_sparse(sent, mean, weights).check()
        assert torch.equal(sparse.to_dense(), average(sent, mean, weights))


def test_means_differ_by_n_where_one_node_sent():
    sent = [SparseVector(torch.tensor([i]), torch.tensor([10.0]), 4) for i in range(4)]
    assert average(sent, "nodes").tolist() == [2.5] * 4
    assert average(sent, "received").tolist() == [10.0] * 4


def test_adding_is_in_node_order():
    """1e8 + 1 - 1e8 depends on the order; the order is that of the nodes."""

    def one(x):
        return SparseVector(torch.tensor([0]), torch.tensor([x]), 1)

    assert float(average([one(1e8), one(1.0), one(-1e8)]) * 3) == 0.0
    assert float(average([one(1e8), one(-1e8), one(1.0)]) * 3) == 1.0


def test_a_node_of_weight_zero_does_not_count():
    a = SparseVector(torch.tensor([0]), torch.tensor([4.0]), 2)
    b = SparseVector(torch.tensor([0, 1]), torch.tensor([100.0, 100.0]), 2)
    assert average([a, b], "received", [1.0, 0.0]).tolist() == [4.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": "median"}, "mean must be one of"),
        ({"weights": [1.0]}, "2 vectors need as many weights, got 1"),
        ({"weights": [1.0, -1.0]}, "not negative"),
        ({"weights": [0.0, 0.0]}, "not all zero"),
        ({"weights": [1.0, float("nan")]}, "finite"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        average(vectors(2, 5, 0), **options)


def test_refuses_nothing_and_different_sizes():
    with pytest.raises(ValueError, match="at least one"):
        average([])
    with pytest.raises(ValueError, match=r"one size, got \[3, 4\]"):
        average([*vectors(1, 3, 0), *vectors(1, 4, 0)])


@given(nodes=st.integers(1, 5), size=st.integers(1, 300), seed=st.integers(0, 500))
def test_union_is_what_sorting_gives(nodes, size, seed):
    lists = [vector.indices for vector in vectors(nodes, size, seed)]
    joint, places = union(lists, size)
    expected, where = by_sorting(lists, size)
    assert torch.equal(joint, expected)
    assert all(torch.equal(a, b) for a, b in zip(places, where, strict=True))


def test_union_of_few_positions_in_a_long_vector():
    """Below the limit it sorts; both ways stand on either side of it."""
    for size in (100, 10_000_000):
        lists = [torch.tensor([0, 63, 64, 99]), torch.tensor([63, 65]), torch.empty(0, dtype=torch.int64)]
        joint, places = union(lists, size)
        assert joint.tolist() == [0, 63, 64, 65, 99]
        assert [p.tolist() for p in places] == [[0, 1, 2, 4], [1, 3], []]


@pytest.mark.parametrize("wrong", [-1, 100, 1 << 40])
def test_union_refuses_positions_outside(wrong):
    with pytest.raises(ValueError, match=r"positions must lie in \[0, 100\)"):
        union([torch.tensor(sorted([5, wrong]))], 100)
