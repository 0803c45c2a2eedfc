"""The codec gives back what it was given, in the bits that it promises."""

import math

import pytest
import torch
import wire_twin
from codec_cases import FORMS, KINDS, support, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from rtopk import Codec, Layout, PayloadError, RTopK, SparseVector, Sparsifier
from rtopk.seed import generator
from rtopk.studies.tasks.models import ResNet
from rtopk.wire.golomb import PARAMETERS

# The largest error of nearest rounding, relative to the largest magnitude of a block (fp16, bf16: to the value).
STEP = {"fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5 / 127, "fp32": 0.0}


def bound(d, k):
    return (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2) / k


def same(a, b):
    """Bit for bit: -0.0 is not 0.0."""
    bits = a.values.view(torch.int32), b.values.view(torch.int32)
    return a.size == b.size and torch.equal(a.indices, b.indices) and torch.equal(*bits)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30)
@given(vector=vectors(), rounding=st.sampled_from(["nearest", "stochastic"]), fixed=st.booleans())
def test_receivers_decode_what_the_sender_subtracts(form, vector, rounding, fixed):
    codec = Codec(form, rounding, fingerprint=9, fixed=fixed)
    before = vector.indices.clone(), vector.values.clone()
    payload, sent = codec.encode_with_decoded(vector, generator(1))
    received = Codec(fingerprint=9).decode(payload, size=vector.size, entries=len(vector))
    assert same(sent, received)
    assert torch.equal(vector.indices, before[0])
    assert torch.equal(vector.values, before[1])
    assert bool(received.values.isfinite().all())
    if fixed:
        assert payload.numel() == codec.capacity(vector.size, len(vector))
    if not codec.overflows:
        assert torch.equal(received.indices, vector.indices)
    if form == "fp32" and not codec.overflows:
        assert same(received, vector)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15)
@given(vector=vectors(most=400), fixed=st.booleans())
def test_twin_reads_the_same(form, vector, fixed):
    payload, sent = Codec(form, fixed=fixed).encode_with_decoded(vector)
    d, positions, values = wire_twin.decode(payload.numpy().tobytes())
    assert same(SparseVector(torch.tensor(positions, dtype=torch.int64), torch.tensor(values), d), sent)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("d", "k"), [(200_000, 40_000), (2**22, 70_000), (100_000, 60_000)])
def test_four_streams(kind, d, k):
    indices = support(kind, d, k, generator(kind))
    vector = SparseVector(indices, torch.randn(len(indices), generator=generator(2)), d)
    payload = Codec().encode(vector)
    assert same(Codec().decode(payload), vector)
    if kind == "uniform" and d > 100_000:
        assert payload[40 + 4 * k] >> 4 == 1


def test_four_streams_of_codes_that_barely_fit_a_word():
    """Gaps of 1,700: four codes take 46 bits on average, and one time in fifty more than the word surely has."""
    d, k = 2**26, 40_000
    vector = SparseVector(support("uniform", d, k, generator(6)), torch.zeros(k), d)
    assert same(Codec().decode(Codec().encode(vector)), vector)


def test_gaps_beside_multiples_of_the_parameter():
    """The writer divides by a product in float32: exact, also at whole numbers and for the largest gaps."""
    once, twice = (
        torch.ones(9, dtype=torch.int64),
        torch.full((7,), 2),
    )  # on average 1.44, so the parameter fits
    for m in PARAMETERS[:168].tolist():  # below 2**23: beyond what is divided that way
        gaps = m * torch.cat([once, twice]).repeat(16) + torch.tensor([-1, 0, 1, 0]).repeat(64)
        indices = (gaps + 1).cumsum(0) - 1
        vector = SparseVector(indices, torch.zeros(len(indices)), int(indices[-1]) + 2)
        assert torch.equal(Codec().decode(Codec().encode(vector)).indices, indices)


def test_two_threads_write_and_read_the_same():
    vector = SparseVector(
        support("uniform", 4_000_000, 300_000, generator(5)), torch.zeros(300_000), 4_000_000
    )
    alone = Codec("2bit").encode(vector)
    torch.set_num_threads(2)
    try:
        assert torch.equal(Codec("2bit").encode(vector), alone)
        assert same(Codec().decode(alone), vector)
    finally:
        torch.set_num_threads(1)


def test_twin_reads_four_streams():
    vector = SparseVector(support("uniform", 150_000, 33_000, generator(5)), torch.zeros(33_000), 150_000)
    d, positions, _ = wire_twin.decode(Codec("2bit").encode(vector).numpy().tobytes())
    assert (d, positions) == (150_000, vector.indices.tolist())


def test_checksum_is_xxh64():
    # From the specification of xxHash and its reference implementation.
    known = [(b"", 0, 0xEF46DB3751D8E999), (b"abc", 0, 0x44BC2CF5AD770999), (b"a" * 64, 0, None)]
    known.append((b"Nobody inspects the spammish repetition", 0, 0xFBCEA83C8A378BF1))
    import numpy as np

    from rtopk.wire.bits import xxh64

    for text, seed, expected in known:
        assert expected is None or wire_twin.xxh64(text, seed) == expected
        assert int(xxh64(np.frombuffer(text, np.uint8), 0, len(text), seed)) == wire_twin.xxh64(text, seed)


@pytest.mark.parametrize(("density", "factor"), [(0.01, 1.01), (0.001, 1.01), (0.0001, 1.01), (0.0031, 1.01)])
def test_positions_at_the_entropy_bound(density, factor):
    k = 10_000
    d = round(k / density)
    for seed in range(5):
        indices = torch.unique(torch.randint(d, (k + k // 20,), generator=generator(seed, d)))[:k]
        indices = indices[torch.randperm(len(indices), generator=generator(seed))][:k].sort().values
        vector = SparseVector(indices, torch.zeros(k), d)
        bits = 8 * Codec("2bit").encode(vector).numel() / k - 2 - 32 / 512
        assert bits <= factor * bound(d, k)


@pytest.mark.parametrize(("form", "most"), [("fp32", 43.6), ("fp16", 27.6), ("4bit", 15.8), ("2bit", 13.8)])
def test_total_bits(form, most):
    vector = SparseVector(support("uniform", 10**7, 10**4, generator(3)), torch.randn(10**4), 10**7)
    assert 8 * Codec(form).encode(vector).numel() / 10**4 <= most


def test_positions_of_the_tail_cost_nothing():
    head = support("uniform", 10**6, 1000, generator(0))
    alone = Codec().encode(SparseVector(head, torch.ones(1000), 10**6)).numel()
    indices = torch.cat([head, torch.arange(10**6, 10**6 + 5000)])
    both = Codec().encode(SparseVector(indices, torch.ones(6000), 10**6 + 5000)).numel()
    assert both == alone + 4 * 5000


def test_tail_has_its_own_scales():
    head, tail = support("uniform", 10**5, 100, generator(0)), torch.arange(10**5, 10**5 + 100)
    values = torch.cat([torch.full((100,), 1000.0), torch.full((100,), 1e-3)])
    for form in FORMS[3:]:
        vector = SparseVector(torch.cat([head, tail]), values, 10**5 + 100)
        decoded = Codec(form).encode_with_decoded(vector)[1]
        assert torch.allclose(decoded.values, values, rtol=0.01)


@pytest.mark.parametrize("form", FORMS)
def test_density_1_needs_no_positions(form):
    d = 10_000
    vector = SparseVector(torch.arange(d), torch.randn(d, generator=generator(0)), d)
    payload = Codec(form).encode(vector)
    assert payload.numel() == Codec(form, fixed=True).capacity(d, d)
    if form == "fp32":
        assert payload.numel() == 40 + 4 * d


@pytest.mark.parametrize("form", list(STEP))
@given(vector=vectors(most=500))
@settings(max_examples=30)
def test_nearest_rounding_is_within_half_a_step(form, vector):
    decoded = Codec(form).encode_with_decoded(vector)[1].values.double()
    values = vector.values.double()
    largest = values.abs().max() if len(vector) else torch.tensor(0.0)
    if form in (
        "fp16",
        "bf16",
    ):  # floating: relative, down to the smallest step of the scaled fp16 or of bf16
        limit = STEP[form] * values.abs() + float(largest) * 2.0**-39 + 2.0**-133
    else:
        limit = STEP[form] * largest * (1 + 1e-6) + 2.0**-149
    saturated = values.abs() > 3.3895e38
    assert bool((((decoded - values).abs() <= limit) | saturated).all())


@pytest.mark.parametrize(("form", "most"), [("4bit", 0.012), ("2bit", 0.13)])
def test_levels_fit_the_tail_of_a_distribution(form, most):
    """What rounding leaves of the squared norm of normal values above a threshold, as rTop-k sends them."""
    values = torch.randn(10**5, generator=generator(0))
    values = values[values.abs() > 1.6]
    vector = SparseVector(torch.arange(len(values)) * 9, values, 9 * len(values))
    error = (Codec(form).encode_with_decoded(vector)[1].values - values).norm() ** 2 / values.norm() ** 2
    assert float(error) < most


@pytest.mark.parametrize("form", [f for f in FORMS if f != "fp32"])
def test_stochastic_rounding_keeps_the_mean(form):
    """The mean of n draws is within 6 standard errors of each of 40 values: false alarms below 1e-6.

    Finds a bias above 6 / sqrt(n) = 0.13 of a step.
    """
    values = torch.cat(
        [torch.randn(20, generator=generator(0)), torch.randn(20, generator=generator(1)) * 1e-3]
    )
    vector = SparseVector(torch.arange(40) * 3, values, 200)
    codec, n = Codec(form, "stochastic"), 2000
    draws = torch.stack(
        [codec.encode_with_decoded(vector, generator(i))[1].values for i in range(n)]
    ).double()
    deviation = draws.std(0).clamp_min(float(values.abs().max()) * 1e-9)
    # A value next to a level may never be drawn away from it (chance p in n draws: (1 - p)**n): 0.02 of a step.
    off = (draws.mean(0) - values.double()).abs()
    assert bool((off <= 6 * deviation / n**0.5 + 0.02 * draws.std(0).max()).all())
    if form != "fp16":
        assert float(draws.std(0).max()) > 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes_saturate_and_stay_finite(form, dtype):
    values = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max, 0.0, 1.0], dtype=dtype)
    vector = SparseVector(torch.tensor([1, 5, 7, 9]), values, 20)
    payload, sent = Codec(form).encode_with_decoded(vector)
    assert bool(sent.values.isfinite().all())
    assert sent.values[0] > 1e4
    assert sent.values[1] < -1e4
    assert same(sent, Codec().decode(payload))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_are_not_finite_are_refused(bad, dtype):
    with pytest.raises(ValueError, match="finite"):
        Codec().encode(SparseVector(torch.tensor([0, 3]), torch.tensor([1.0, bad], dtype=dtype), 5))


@pytest.mark.parametrize(
    "indices", [[3, 1], [1, 1], [-1, 2], [2, 5], [0, 4, 3], [4, 3, 2, 1, 0], [3, 3], [0, 2, 2, 4], [4, 4]]
)
def test_wrong_indices_are_refused(indices):
    vector = SparseVector(torch.tensor(indices), torch.ones(len(indices)), 5)
    with pytest.raises(ValueError, match=r"ascending|lie in"):
        Codec().encode(vector)


@pytest.mark.parametrize("k", [300, 40_000])
@pytest.mark.parametrize("swap", [0.1, 0.5, 0.999])
def test_wrong_indices_deep_inside_are_refused(k, swap):
    """The room of the writer is planned from the ends of blocks: a jump inside one must not pass it."""
    indices = torch.arange(k) * 3
    i = int(swap * (k - 1))
    for jump in (indices[i] + 2, torch.tensor(3 * k - 5), torch.tensor(0)):
        wrong = indices.clone()
        wrong[i - 1] = jump
        with pytest.raises(ValueError, match="ascending"):
            Codec().encode(SparseVector(wrong, torch.ones(k), 3 * k))
    far = indices * 2**20
    far[i - 1] = 2**39
    with pytest.raises(ValueError, match="ascending"):
        Codec().encode(SparseVector(far, torch.ones(k), 2**40))


@pytest.mark.parametrize(
    "options",
    [{"values": "fp8"}, {"rounding": "up"}, {"fingerprint": -1}, {"fingerprint": 2**64}, {"dense_size": -1}],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match=r"must be"):
        Codec(**options)


def test_stochastic_rounding_needs_a_generator():
    vector = SparseVector(torch.tensor([1]), torch.ones(1), 3)
    with pytest.raises(ValueError, match="generator"):
        Codec("4bit", "stochastic").encode(vector)
    assert same(Codec().decode(Codec("fp32", "stochastic").encode(vector)), vector)  # nothing to round


def test_a_model_in_one_payload():
    """Every tensor of a model, by name, through one payload."""
    model = ResNet(width=4)
    rng = generator("model")
    named = {n: torch.randn(p.shape, generator=rng) ** 3 for n, p in model.named_parameters()}
    layout = Layout.of(model)
    node = Sparsifier(
        RTopK(r_over_k=5), density=0.02, layout=layout, codec=Codec("fp32", fingerprint=layout.fingerprint)
    )
    payload = node.compress(layout.flatten(named), step=0)
    vector = Codec(fingerprint=layout.fingerprint).decode(payload, size=layout.size)
    received = layout.unflatten(vector.to_dense())
    assert list(received) == list(layout.names)
    for name, tensor in named.items():
        assert received[name].shape == tensor.shape
        if tensor.dim() == 1:
            assert torch.equal(received[name], tensor)
        sent = received[name] != 0
        assert torch.equal(received[name][sent], tensor[sent])
    other = Layout.of(ResNet(width=5)).fingerprint
    with pytest.raises(PayloadError, match="model"):
        Codec(fingerprint=other).decode(payload)


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_001])
def test_where_all_is_sent_every_position_is_there(size):
    """Positions of a dense payload are made in runs of 65,536."""
    codec, values = Codec(), torch.arange(1.0, size + 1)
    decoded = codec.decode(codec.encode(SparseVector(torch.arange(size), values, size)))
    assert torch.equal(decoded.indices, torch.arange(size))
    assert torch.equal(decoded.values, values)
