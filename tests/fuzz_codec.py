"""Fuzz the decoder: `python tests/fuzz_codec.py -max_total_time=600` (options of libFuzzer).

Every input is one byte of choice and the bytes of a payload; the checksum is written anew, so that mutations
reach the sections behind it. Whatever comes out must be a valid vector of the expected size, or PayloadError. The
corpus starts from valid payloads of every form. The compiled loops are not instrumented: coverage guides the
Python around them, the mutations of a valid corpus do the rest.
"""

import sys
import tempfile
from pathlib import Path

import atheris
import torch

sys.path.insert(0, str(Path(__file__).parent))
with atheris.instrument_imports(include=["rtopk.codec", "rtopk.wire.positions", "rtopk.wire.values"]):
    from codec_cases import FORMS, KINDS, must_be_valid_or_refused, reseal, support
    from rtopk import Codec, SparseVector
    from rtopk.seed import generator

SIZE, ENTRIES = 3000, 400
CODEC = Codec()


def one(data):
    """Check one input."""
    payload = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )
    if len(payload) >= 40:
        payload = reseal(payload)
    if must_be_valid_or_refused(CODEC, payload, SIZE, ENTRIES) is not None:
        one.valid += 1


one.valid = 0


def corpus(folder):
    """Write valid payloads."""
    for form in FORMS:
        for kind in KINDS:
            for k in (0, 3, 60, 300):
                for fixed in (False, True):
                    indices = support(kind, SIZE, k, generator(k))
                    values = torch.randn(len(indices), generator=generator(kind))
                    payload = Codec(form, fixed=fixed).encode(
                        SparseVector(indices, values, SIZE), generator(0)
                    )
                    Path(folder, f"{form}-{kind}-{k}-{fixed}").write_bytes(payload.numpy().tobytes())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        corpus(folder)
        atheris.Setup([sys.argv[0], *sys.argv[1:], folder], one)
        atheris.Fuzz()
