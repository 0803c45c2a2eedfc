"""Vectors and broken payloads for the tests of the codec."""

import numpy as np
import torch
from hypothesis import strategies as st

from rtopk import PayloadError, SparseVector
from rtopk.seed import generator
from rtopk.select import draw
from rtopk.wire.bits import payload_checksum

FORMS = ("fp32", "fp16", "bf16", "int8", "4bit", "2bit")


def support(kind, d, k, rng):
    """k of d positions, ascending."""
    if kind == "uniform":
        return draw(d, k, rng)
    if kind == "start":
        return torch.arange(k)
    if kind == "end":
        return torch.arange(d - k, d)
    if kind == "even":
        return torch.arange(k) * (d // max(1, k))
    if kind == "runs":  # runs of 1 to 20 with gaps between
        steps = torch.where(torch.rand(d, generator=rng) < 0.1, 30, 1)
        positions = steps.cumsum(0) - 1
        return positions[positions < d][:k]
    assert kind == "jumps"  # gaps that double: one parameter fits none of them
    positions = torch.unique((2.0 ** torch.arange(0, 40, 0.37)).long())
    return positions[positions < d][:k]


KINDS = ("uniform", "start", "end", "even", "runs", "jumps")


@st.composite
def vectors(choose, most=3000):
    """Sparse vectors of many shapes, with zeros and extreme magnitudes among the values."""
    d = choose(st.integers(1, most))
    k = choose(st.one_of(st.integers(0, d), st.sampled_from([0, 1, d - 1, d])))
    rng = generator("case", choose(st.integers(0, 10**6)))
    indices = support(choose(st.sampled_from(KINDS)), d, k, rng)
    if choose(st.booleans()):  # a dense tail behind it
        tail = choose(st.integers(1, 700))
        indices, d = torch.cat([indices, torch.arange(d, d + tail)]), d + tail
    values = torch.randn(len(indices), generator=rng) ** 3 * 10.0 ** choose(st.integers(-38, 35))
    values[torch.rand(len(values), generator=rng) < choose(st.sampled_from([0.0, 0.1, 1.0]))] = 0.0
    return SparseVector(indices, values, d)


def reseal(payload):
    """Write the checksum that fits, as an adversary would."""
    data = payload.numpy()
    data[32:40] = np.frombuffer(int(payload_checksum(data, 40, len(data))).to_bytes(8, "little"), np.uint8)
    return payload


def must_be_valid_or_refused(codec, payload, size, entries):
    """Decode; whatever comes out is a valid vector of the expected size, or PayloadError. Return it or None."""
    try:
        vector = codec.decode(payload, size=size, entries=entries)
    except PayloadError:
        return None
    assert vector.size == size
    assert len(vector) <= entries
    vector.check()
    assert vector.values.dtype == torch.float32
    assert bool(vector.values.isfinite().all())
    return vector
