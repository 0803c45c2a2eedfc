"""The k-bit encoder: every message read back, never a bit too many, the draw uniform."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rtopk import rtop_k
from rtopk.seed import generator
from rtopk.studies.lab.encoder import Encoder, Message, capacity, codebook_size, rank, unrank


def least(d, signed=False):
    return d.bit_length() + (d * (2 if signed else 1)).bit_length()


@pytest.mark.parametrize("d", range(1, 8))
def test_every_support_of_small_d(d):
    for k in range(least(d), d + d.bit_length() + 2):
        encoder = Encoder(d, k)
        for m in range(d + 1):
            for support in itertools.combinations(range(d), m):
                message = encoder.encode(np.array(support, dtype=np.int64), generator(k, m))
                received = encoder.decode(message)
                assert message.length <= k
                assert message.number() < 2**message.length
                assert received.count == m
                if m <= encoder.kept:
                    assert tuple(received.support) == support
                else:
                    assert len(received.support) == encoder.kept
                    assert set(received.support.tolist()) <= set(support)


@pytest.mark.parametrize("d", range(1, 6))
def test_every_signed_vector_of_small_d(d):
    for k in range(least(d, signed=True), 2 * d + d.bit_length() + 2):
        encoder = Encoder(d, k, signed=True)
        for vector in itertools.product((-1, 0, 1), repeat=d):
            support = np.flatnonzero(vector)
            signs = np.array(vector)[support]
            message = encoder.encode(support, generator(k), signs)
            received = encoder.decode(message)
            assert message.length <= k
            assert received.count == len(support)
            assert [vector[j] for j in received.support] == received.signs.tolist()
            if len(support) <= encoder.kept:
                assert received.support.tolist() == support.tolist()


@pytest.mark.parametrize("marks", [1, 2])
def test_numbers_are_a_bijection(marks):
    for d, ones in ((5, 3), (6, 6), (4, 2)):
        size = codebook_size(d, ones, marks)
        seen = [unrank(number, d, marks) for number in range(size)]
        assert [rank(support, d, marks, marking) for support, marking in seen] == list(range(size))
        assert max(len(support) for support, _ in seen) == ones
        assert len({(tuple(support), marking) for support, marking in seen}) == size


def test_capacity_is_the_largest_that_fits():
    for d, bits, marks in itertools.product(range(1, 13), range(22), (1, 2)):
        best = max(j for j in range(d + 1) if codebook_size(d, j, marks) <= 2**bits)
        assert capacity(d, bits, marks) == best, (d, bits, marks)


@given(st.integers(13, 3000), st.integers(0, 4000), st.sampled_from([1, 2]))
def test_capacity_is_the_largest_that_fits_for_larger_d(d, bits, marks):
    kept = capacity(d, bits, marks)
    assert codebook_size(d, kept, marks) <= 2**bits
    assert kept == d or codebook_size(d, kept + 1, marks) > 2**bits


def test_capacity_where_only_exact_numbers_decide():
    """2^m - 1 entries: one more than they are is exactly 2^m; half of an odd d: exactly 2^(d - 1)."""
    assert capacity(2**20 - 1, 20) == 1
    assert capacity(2**20, 20) == 0
    assert capacity(2001, 2000) == 1000
    assert capacity(2001, 2001) == 2001


@given(st.data())
def test_larger_d(data):
    d = data.draw(st.integers(8, 3000))
    signed = data.draw(st.booleans())
    k = data.draw(st.integers(least(d, signed), 2000))
    support = np.array(sorted(data.draw(st.sets(st.integers(0, d - 1), max_size=60))), dtype=np.int64)
    signs = None
    if signed:
        signs = np.array([data.draw(st.sampled_from([-1, 1])) for _ in support], dtype=np.int64)
    encoder = Encoder(d, k, signed)
    message = encoder.encode(support, generator(d, k), signs)
    received = encoder.decode(message)
    assert message.length <= k
    assert len(message.data) == -(-message.length // 8)
    assert received.count == len(support)
    chosen = np.searchsorted(support, received.support)
    assert support[chosen].tolist() == received.support.tolist()
    assert len(chosen) == min(len(support), encoder.kept)
    if signs is not None:
        assert signs[chosen].tolist() == received.signs.tolist()


def test_thousands_of_entries():
    rng = np.random.default_rng(0)
    encoder = Encoder(5000, 3000)
    support = np.sort(rng.choice(5000, encoder.kept, replace=False))
    message = encoder.encode(support, generator(0))
    assert message.length <= 3000
    assert encoder.decode(message).support.tolist() == support.tolist()


def test_the_draw_is_rtop_k():
    """Of a 0/1 vector the ones are its r largest entries, so the encoder's draw is the library's."""
    x = torch.zeros(200)
    support = torch.arange(0, 200, 3)
    x[support] = 1.0
    encoder = Encoder(200, 60)
    received = encoder.decode(encoder.encode(support.numpy(), generator(5)))
    assert received.support.tolist() == rtop_k(x, encoder.kept, len(support), generator(5)).tolist()


def test_the_draw_is_uniform():
    """False alarm 1e-6; finds a subset whose probability is off by 30 % of 1/10 (noncentrality 52, power > 0.9)."""
    encoder = Encoder(6, 3 + 5)
    assert encoder.kept == 2
    rng = generator(1)
    times = dict.fromkeys(itertools.combinations(range(1, 6), 2), 0)
    for _ in range(6000):
        received = encoder.decode(encoder.encode(np.arange(1, 6), rng))
        times[tuple(received.support.tolist())] += 1
    assert stats.chisquare(list(times.values())).pvalue > 1e-6


def test_refusals():
    with pytest.raises(ValueError, match="k must be at least 14"):
        Encoder(100, 13)
    encoder = Encoder(10, 12)
    with pytest.raises(ValueError, match="ascending"):
        encoder.encode(np.array([3, 1]), generator(0))
    with pytest.raises(ValueError, match="in \\[0, 10\\)"):
        encoder.encode(np.array([3, 10]), generator(0))
    with pytest.raises(ValueError, match="signs"):
        encoder.encode(np.array([3]), generator(0), np.array([1]))
    with pytest.raises(ValueError, match="12 bits, got 5"):
        encoder.decode(Message.of(0, 5))
    with pytest.raises(ValueError, match="does not fit"):
        Message.of(8, 3)
    with pytest.raises(ValueError, match="beyond the codebook"):
        encoder.decode(Message.of(255, 12))
    with pytest.raises(ValueError, match="claims 2 ones and names 1"):
        encoder.decode(Message.of(2 << 8 | 1, 12))
