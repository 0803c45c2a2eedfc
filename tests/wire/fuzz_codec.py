"""Fuzz the decoder: `python tests/wire/fuzz_codec.py -max_total_time=600` (options of libFuzzer).

The first byte of an input says what the rest is: the bytes of a payload, or edits of a valid payload (which one,
then where and what, then how much is cut off). The checksum is written anew, so that both reach the sections
behind it. Whatever comes out must be a valid vector of the expected size, or PayloadError. The compiled loops are
not instrumented: coverage guides through the Python around them, edits of valid payloads through the loops.
"""

import atexit
import sys
import tempfile
from pathlib import Path

import atheris
import torch

sys.path.insert(0, str(Path(__file__).parent))
from codec_cases import FORMS, KINDS, must_be_valid_or_refused, reseal, support

from rtopk import Codec, SparseVector
from rtopk.seed import generator
from rtopk.wire import gaps, positions, values

# Not whole modules: numba could not compile loops that are instrumented.
Codec.decode = atheris.instrument_func(Codec.decode)
positions.read = atheris.instrument_func(positions.read)
for form in values.FORMS:
    type(form).read = atheris.instrument_func(type(form).read)

SIZE, ENTRIES = 3000, 400
CODEC = Codec()


def corpus():
    """Yield valid payloads of every form."""
    for form in FORMS:
        for kind in KINDS:
            for k in (0, 3, 60, 300):
                for fixed in (False, True):
                    indices = support(kind, SIZE, k, generator(k))
                    vector = SparseVector(indices, torch.randn(len(indices), generator=generator(kind)), SIZE)
                    yield Codec(form, fixed=fixed).encode(vector, generator(0)).numpy().tobytes()
                    gaps.FOUR_STREAMS_FROM, gaps.SHIFTS = 96, (3, 3)  # four streams of few entries
                    yield Codec(form).encode(vector).numpy().tobytes()
                    gaps.FOUR_STREAMS_FROM, gaps.SHIFTS = 1 << 15, (5, 7)


VALID = list(corpus())


def one(data):
    """Check one input."""
    payload = bytearray(data[1:])
    if data and data[0] & 1:
        payload, at = bytearray(VALID[int.from_bytes(data[1:3]) % len(VALID)]), 3
        start = 40 if data[0] & 2 else 0
        for at in range(3, min(len(data) - 4, 3 + 3 * (data[0] >> 2 & 7)), 3):
            room = max(1, len(payload) - start)
            payload[min(len(payload) - 1, start + int.from_bytes(data[at : at + 2]) % room)] = data[at + 2]
        if data[0] & 128:
            del payload[len(payload) - data[-1] % len(payload) :]
    if not payload:
        return
    payload = torch.frombuffer(payload, dtype=torch.uint8)
    if len(payload) >= 40:
        payload = reseal(payload)
    valid = must_be_valid_or_refused(CODEC, payload, SIZE, ENTRIES)
    COUNTS["valid" if valid is not None else "refused"] += 1


COUNTS = {"valid": 0, "refused": 0}
atexit.register(lambda: print(COUNTS, file=sys.stderr))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for i, payload in enumerate(VALID):
            Path(folder, f"bytes-{i}").write_bytes(b"\0" + payload)
            Path(folder, f"edits-{i}").write_bytes(
                bytes([1 + 4 * (i % 8)]) + i.to_bytes(2) + bytes(range(24))
            )
        atheris.Setup([sys.argv[0], f"-artifact_prefix={tempfile.gettempdir()}/", *sys.argv[1:], folder], one)
        atheris.Fuzz()
