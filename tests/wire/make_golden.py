"""Make the golden payloads of tests/wire/golden: `python tests/wire/make_golden.py`. Only for a new format version.

Each is small, named after what it shows, and comes with a JSON file of what it must decode to (values as the
hexadecimal bits of their float32).
"""

import json
import struct
from pathlib import Path

import torch

from rtopk import Codec, SparseVector
from rtopk.seed import generator

GOLDEN = Path(__file__).parent / "golden"


def vectors():
    """Yield a name, a vector and the options of a codec."""
    rng = generator("golden")

    def values(k):
        return torch.randn(k, generator=rng) ** 3

    def draw(d, k):
        return torch.randperm(d, generator=rng)[:k].sort().values

    for form in ("fp32", "fp16", "bf16", "int8", "4bit", "2bit"):
        indices = torch.cat([draw(50_000, 40), torch.arange(50_000, 50_010)])
        yield f"gaps-{form}", SparseVector(indices, values(50), 50_010), {"values": form, "fingerprint": 7}
    yield "blocks-4bit", SparseVector(draw(1 << 20, 700), values(700), 1 << 20), {"values": "4bit"}
    yield "small-fp16", SparseVector(draw(1000, 20), values(20) * 1e-9, 1000), {"values": "fp16"}
    yield "bitmap", SparseVector(draw(200, 90), values(90), 200), {"values": "2bit"}
    yield "absent", SparseVector(draw(300, 280), values(280), 300), {"values": "2bit"}
    yield "dense", SparseVector(torch.arange(30), values(30), 30), {}
    yield "empty", SparseVector(torch.arange(0), values(0), 30), {}
    yield "fixed", SparseVector(draw(9000, 90), values(90), 9000), {"values": "4bit", "fixed": True}
    clusters = torch.cat([draw(1000, 200), 2**39 + draw(10**6, 200), torch.tensor([2**40 - 1])])
    yield "clusters", SparseVector(clusters, values(401), 2**40), {"values": "int8"}
    many = draw(1 << 17, 1 << 15)
    yield "four-streams", SparseVector(many, values(1 << 15), 1 << 17), {"values": "2bit"}


def expectation(vector):
    """Return a vector as JSON can hold it exactly; long ones as a hash of positions and values."""
    raw = vector.indices.numpy().tobytes() + vector.values.numpy().tobytes()
    if len(vector) > 1000:
        import hashlib

        return {"size": vector.size, "k": len(vector), "sha256": hashlib.sha256(raw).hexdigest()}
    bits = [struct.pack(">f", x).hex() for x in vector.values.tolist()]
    return {"size": vector.size, "indices": vector.indices.tolist(), "values": bits}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, vector, options in vectors():
        payload, decoded = Codec(**options).encode_with_decoded(vector, generator(0))
        (GOLDEN / f"{name}.bin").write_bytes(payload.numpy().tobytes())
        (GOLDEN / f"{name}.json").write_text(json.dumps(expectation(decoded)) + "\n")
