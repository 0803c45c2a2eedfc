"""Payloads of a size that every rank knows beforehand."""

import pytest
import torch
from codec_cases import FORMS, support
from scipy.stats import chisquare

from rtopk import Codec, ErrorFeedback, RandomK, SparseVector, Sparsifier
from rtopk.layout import Layout
from rtopk.seed import generator


def uniform(d, k, tail, seed):
    head = support("uniform", d - tail, k - tail, generator("fixed", seed))
    return SparseVector(
        torch.cat([head, torch.arange(d - tail, d)]), torch.randn(k, generator=generator(seed)), d
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("d", "k", "tail"), [(10**6, 10_000, 0), (10**7, 10_000, 0), (2 * 10**6, 40_000, 20_000)]
)
def test_padding_is_at_most_one_percent(form, d, k, tail):
    codec, free = Codec(form, fixed=True, dense_size=tail), Codec(form)
    for seed in range(3):
        vector = uniform(d, k, tail, seed)
        padded, exact = codec.encode(vector, generator(seed)).numel(), free.encode(vector).numel()
        assert exact <= padded <= 1.01 * exact
    assert codec.overflows == 0


@pytest.mark.parametrize(
    ("d", "k"), [(500, 5), (10_000, 100), (10**5, 100), (10**6, 1000), (3000, 1000), (3000, 2900)]
)
def test_uniform_positions_fit(d, k):
    """150 draws, none too long. If one in 50 were, this would be seen with probability 0.95."""
    codec = Codec("2bit", fixed=True)
    for seed in range(150):
        vector = uniform(d, k, 0, seed)
        payload = codec.encode(vector)
        assert payload.numel() == codec.capacity(d, k)
        assert codec.overflows == 0, seed


D, K = 7_390_000, 10_000


def awkward():
    """Runs of 32 with long gaps between: dearer than uniform positions.

    Every block has the mean gap for which M = 512, so that each of the many gaps of 0 costs ten bits.
    """
    gaps = torch.zeros(K, dtype=torch.int64)
    gaps[::32] = 32 * (D // K) - 32
    indices = (gaps + 1).cumsum(0) - 1
    return SparseVector(indices[indices < D], torch.ones(int((indices < D).sum())), D)


def test_what_does_not_fit_is_left_out_at_random():
    """Entries are left out alike wherever they are: tenths of the vector, and places in a run of 32.

    Chi-square at 1e-6 each, so false alarms are below 1e-5. Of 100 draws some 20,000 entries are left out, 2,000 in
    a tenth: one that loses 15 % more or less is found, and truncation in the order of the indices at once.
    """
    vector = awkward()
    k, codec = len(vector), Codec("2bit", fixed=True)
    capacity = codec.capacity(D, k)
    assert Codec("2bit").encode(vector).numel() > capacity
    left_out, draws = torch.zeros(k), 100
    for seed in range(draws):
        payload, sent = codec.encode_with_decoded(vector, generator(seed))
        assert payload.numel() == capacity
        received = codec.decode(payload, size=D, entries=k)
        assert torch.equal(received.indices, sent.indices)
        assert 0 < len(sent) < k
        left_out += ~torch.isin(vector.indices, sent.indices)
    assert codec.overflows == draws
    assert left_out.sum() > 15_000
    for groups in (torch.arange(k) * 10 // k, torch.arange(k) % 32 // 4):
        counts, sizes = torch.bincount(groups, left_out), torch.bincount(groups)
        expected = sizes * left_out.sum() / k
        assert chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-6


def test_overflow_without_a_generator_repeats():
    vector = awkward()
    one, two = (Codec("2bit", fixed=True).encode_with_decoded(vector)[1] for _ in range(2))
    assert torch.equal(one.indices, two.indices)


def test_nothing_is_lost_on_overflow():
    """What was left out is in the residual."""
    codec = Codec("2bit", fixed=True)
    indices = awkward().indices
    gradient = torch.zeros(D)
    gradient[indices] = torch.randint(-9, 9, indices.shape, generator=generator(0)).float()
    memory = ErrorFeedback()
    added = memory.add(gradient)
    payload, sent = codec.encode_with_decoded(SparseVector.gather(added, indices), generator(0))
    memory.subtract(sent)
    assert codec.overflows == 1
    assert torch.allclose(memory.residual + codec.decode(payload).to_dense(), gradient, rtol=0, atol=1e-5)
    left_out = torch.ones(D, dtype=torch.bool)
    left_out[sent.indices] = False
    assert torch.equal(memory.residual[left_out], gradient[left_out])


def test_all_ranks_agree_through_the_sparsifier():
    layout = Layout(("w", "b"), ((100, 50), (70,)), dense_size=70)
    sizes = set()
    for node in range(4):
        codec = Codec("4bit", fingerprint=layout.fingerprint, fixed=True, dense_size=70)
        sparsifier = Sparsifier(RandomK(), 0.05, codec=codec, node=node, layout=layout)
        for step in range(20):
            gradient = torch.randn(layout.size, generator=generator(node, step))
            sizes.add(sparsifier.compress(gradient, step).numel())
    assert sizes == {codec.capacity(layout.size, 250 + 70)}


def test_a_vector_without_its_tail_is_refused():
    codec = Codec(fixed=True, dense_size=3)
    with pytest.raises(ValueError, match="end in positions"):
        codec.encode(SparseVector(torch.tensor([1, 5, 7, 9]), torch.ones(4), 10))
    with pytest.raises(ValueError, match="dense tail"):
        codec.capacity(10, 2)


def test_capacity_is_pinned():
    """Ranks of different versions must agree: these numbers belong to format version 1."""
    cases = [
        ("fp32", 0, 10**6, 1000),
        ("4bit", 0, 10**7, 10**4),
        ("2bit", 9610, 11_173_962, 20_774),
        ("fp16", 0, 99, 60),
    ]
    assert [Codec(f, fixed=True, dense_size=t).capacity(d, k) for f, t, d, k in cases] == [
        5489,
        19718,
        21424,
        175,
    ]
