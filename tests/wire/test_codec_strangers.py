"""Bytes from strangers: a valid vector of the expected size, or PayloadError; in bounded memory and time.

The long run of the same check is tests/wire/fuzz_codec.py (atheris), which the slow test at the end starts.
"""

import contextlib
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
import wire_twin
from codec_cases import FORMS, must_be_valid_or_refused, reseal, support, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from rtopk import Codec, PayloadError, SparseVector
from rtopk.seed import generator
from rtopk.wire import gaps

SIZE, ENTRIES = 3700, 3700


def payload_of(kind="uniform", d=2000, k=60, form="fp32", **options):
    values = torch.randn(k, generator=generator(1))
    return Codec(form, **options).encode(SparseVector(support(kind, d, k, generator(0)), values, d))


@settings(max_examples=80)
@given(
    vector=vectors(),
    form=st.sampled_from(FORMS),
    fixed=st.booleans(),
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    cut=st.one_of(st.just(1.0), st.floats(0, 1)),
    extra=st.binary(max_size=9),
    sealed=st.booleans(),
    start=st.sampled_from([0, 8, 16, 20, 40]),
    four=st.booleans(),
)
def test_mutated_payloads(vector, form, fixed, edits, cut, extra, sealed, start, four):
    codec = Codec(form, fixed=fixed)
    with pytest.MonkeyPatch.context() as patch:
        if four:  # four streams at small sizes
            patch.setattr(gaps, "FOUR_STREAMS_FROM", 96)
            patch.setattr(gaps, "SHIFTS", (3, 3))
        payload, sent = codec.encode_with_decoded(vector, generator(0))
    assert torch.equal(codec.decode(payload).indices, sent.indices)
    data = bytearray(payload.numpy().tobytes())
    for where, byte in edits:
        data[min(len(data) - 1, start + int(where * (len(data) - start)))] = byte
    data = data[: int(cut * len(data))] + extra
    changed = torch.frombuffer(data, dtype=torch.uint8).clone() if data else torch.empty(0, dtype=torch.uint8)
    differs = not torch.equal(changed, payload)
    if sealed and len(changed) >= 40:
        changed = reseal(changed)
    decoded = must_be_valid_or_refused(codec, changed, vector.size, len(vector))
    if differs and not sealed:
        assert decoded is None  # the checksum finds what is not sealed anew


@given(data=st.binary(max_size=300), sealed=st.booleans())
def test_any_bytes(data, sealed):
    header = struct.pack("<4sBBBBQIIQQ", b"rTpk", 1, 0, 1, 5, 1000, 12, 3, 0, 0)
    for prefix in (b"", header):
        payload = torch.tensor(list(prefix + data), dtype=torch.uint8)
        if sealed and len(payload) >= 40:
            payload = reseal(payload)
        must_be_valid_or_refused(Codec(), payload, 1000, 20)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["uniform", "runs"])
def test_every_single_bit_matters(form, kind):
    """Without a new seal every flipped bit is found; with one, it is valid or refused."""
    codec = Codec(form)
    payload = payload_of(kind, form=form)
    for bit in range(8 * len(payload)):
        for sealed in (False, True):
            changed = payload.clone()
            changed[bit >> 3] ^= 1 << (bit & 7)
            decoded = must_be_valid_or_refused(codec, reseal(changed) if sealed else changed, 2000, 60)
            assert sealed or decoded is None


def test_every_cut_is_refused():
    for form in FORMS:
        payload = payload_of(form=form)
        for n in range(len(payload)):
            cut = payload[:n].clone()
            with pytest.raises(PayloadError):
                Codec().decode(reseal(cut) if n >= 40 else cut)


@pytest.mark.parametrize("kind", ["uniform", "runs", "even"])
@pytest.mark.parametrize("shift", range(6))
def test_four_streams_are_refused_where_the_twin_refuses(shift, kind, monkeypatch):
    """The fast reader takes four codes from a word and four streams at once; the twin takes single bits."""
    monkeypatch.setattr(gaps, "FOUR_STREAMS_FROM", 96)
    monkeypatch.setattr(gaps, "SHIFTS", (shift, shift))
    d, k, outcomes = 20_000, 500, set()
    valid = payload_of(kind, d, k)
    index, rng = 40 + 4 * k, generator("twin", shift)
    for turn in range(60):
        payload = valid.clone()
        if turn:
            for _ in range(1 + turn % 3):
                byte = torch.randint(index if turn % 4 else index + 50, len(payload), (), generator=rng)
                payload[byte] ^= 1 << int(torch.randint(8, (), generator=rng))
            payload = reseal(payload)
        decoded = must_be_valid_or_refused(Codec(), payload, d, k)
        try:
            expected = wire_twin.decode(payload.numpy().tobytes())[1]
            assert expected[-1] < d
        except (AssertionError, IndexError):
            expected = None
        assert (None if decoded is None else decoded.indices.tolist()) == expected
        outcomes.add(expected is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize("noise", range(20))
def test_four_streams_of_noise(noise):
    d, k = 150_000, 33_000
    payload = payload_of(d=d, k=k, form="2bit")
    rng = generator("noise", noise)
    index = 40 + Codec("2bit")._form.size(k)
    where = torch.randint(index, index + 60 if noise % 2 else len(payload), (1 + noise % 5,), generator=rng)
    payload[where] = torch.randint(256, where.shape, generator=rng).to(torch.uint8)
    must_be_valid_or_refused(Codec(), reseal(payload), d, k)


@pytest.mark.parametrize(
    ("offset", "code", "value", "message"),
    [
        (0, "<4s", b"rTpX", "version"),
        (4, "<B", 2, "version"),
        (5, "<B", 2, "flags"),
        (6, "<B", 0, "index form"),
        (6, "<B", 3, "index form"),
        (6, "<B", 9, "index form"),
        (7, "<B", 6, "value form"),
        (8, "<Q", 2001, "size"),
        (8, "<Q", 59, "size"),
        (16, "<I", 61, "entries"),
        (16, "<I", 59, "index section"),
        (24, "<Q", 1, "model"),
        (32, "<Q", 0, "checksum"),
        (40, "<f", float("nan"), "finite"),
        (40, "<f", float("inf"), "finite"),
    ],
)
def test_what_is_wrong_is_said(offset, code, value, message):
    data = bytearray(payload_of().numpy().tobytes())
    struct.pack_into(code, data, offset, value)
    payload = torch.frombuffer(data, dtype=torch.uint8)
    if offset != 32:
        payload = reseal(payload)
    with pytest.raises(PayloadError, match=message):
        Codec().decode(payload, size=2000, entries=60)


@pytest.mark.parametrize("pattern", range(0x7C00, 0x8000, 37))
@pytest.mark.parametrize("exponent", [0, 5])
def test_no_float16_that_is_not_finite_passes_or_warns(pattern, exponent):
    """Signalling NaN among them, which make numpy warn when they are multiplied."""
    data = bytearray(payload_of(form="fp16").numpy().tobytes())
    struct.pack_into("<hH", data, 40, exponent, pattern)
    with pytest.raises(PayloadError, match="finite"):
        Codec().decode(reseal(torch.frombuffer(data, dtype=torch.uint8)), size=2000, entries=60)


@pytest.mark.parametrize("payload", [torch.zeros(50), torch.zeros(5, 10, dtype=torch.uint8), b"rTpk", None])
def test_what_is_not_a_payload_at_all(payload):
    with pytest.raises(PayloadError, match="1-D uint8"):
        Codec().decode(payload)


def test_padding_must_be_zero_and_announced():
    payload = payload_of(form="4bit", fixed=True)
    Codec().decode(payload)
    changed = payload.clone()
    changed[-1] = 1
    with pytest.raises(PayloadError, match="zero"):
        Codec().decode(reseal(changed))
    changed = payload.clone()
    changed[5] = 0
    with pytest.raises(PayloadError, match="must end"):
        Codec().decode(reseal(changed))


@pytest.mark.parametrize("form", range(6))
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(
    "claim", [(2**40, 2**32 - 1, 0), (2**40, 0, 2**32 - 1), (2**31, 2**30, 2**30), (10**4, 5000, 4)]
)
def test_claims_take_no_memory(form, index, claim):
    header = struct.pack("<4sBBBBQIIQQ", b"rTpk", 1, 1, index, form, *claim, 0, 0)
    payload = reseal(torch.tensor(list(header + bytes(600)), dtype=torch.uint8))
    peak = peak_of(payload)
    assert peak < 80 * len(payload) + 65536


@pytest.mark.parametrize(
    ("d", "k", "form", "factor"),
    [
        (10**7, 10**5, "fp32", 5),
        (10**7, 10**5, "4bit", 40),
        (10**6, 4 * 10**5, "2bit", 80),
        (10**6, 10**6, "fp32", 5),
        (10**5, 99_000, "2bit", 80),
    ],
)
def test_memory_of_valid_payloads(d, k, form, factor):
    payload = payload_of(d=d, k=k, form=form)
    assert peak_of(payload) < factor * len(payload) + 65536


def peak_of(payload):
    """The most memory that decoding takes; numpy reports its arrays to tracemalloc."""
    codec = Codec()
    for _ in range(2):  # the first run loads the compiled loops
        tracemalloc.start()
        with contextlib.suppress(PayloadError):
            codec.decode(payload)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.slow
def test_fuzz_for_long():
    """5 million executions of mutated payloads (atheris, guided by coverage), or ten minutes."""
    pytest.importorskip("atheris")
    script = Path(__file__).parent / "fuzz_codec.py"
    arguments = ["-runs=5000000", "-max_total_time=600", "-max_len=700", "-rss_limit_mb=2048", "-timeout=10"]
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
