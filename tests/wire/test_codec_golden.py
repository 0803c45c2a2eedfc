"""Golden payloads pin format version 1: bytes once written stay readable, to the last bit.

tests/wire/make_golden.py made them. If one of these tests fails, the format has changed: that needs a new version.
"""

import json
from pathlib import Path

import make_golden
import pytest
import torch
import wire_twin

from rtopk import Codec, SparseVector
from rtopk.seed import generator

CASES = {name: (vector, options) for name, vector, options in make_golden.vectors()}
# The magnitudes of 4bit and 2bit are the writer's choice: their bytes may change, what they decode to may not.
PINNED = [name for name, (_, options) in CASES.items() if options.get("values") not in ("4bit", "2bit")]


def read(name):
    return (make_golden.GOLDEN / f"{name}.bin").read_bytes()


def test_every_case_has_a_file():
    assert {path.stem for path in Path(make_golden.GOLDEN).glob("*.bin")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_golden_payload_is_read(name):
    payload = torch.frombuffer(bytearray(read(name)), dtype=torch.uint8)
    decoded = Codec(fingerprint=CASES[name][1].get("fingerprint", 0)).decode(payload)
    assert make_golden.expectation(decoded) == json.loads((make_golden.GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_golden_payload_is_read_by_the_twin(name):
    d, positions, values = wire_twin.decode(read(name))
    decoded = SparseVector(torch.tensor(positions, dtype=torch.int64), torch.tensor(values), d)
    assert make_golden.expectation(decoded) == json.loads((make_golden.GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("name", PINNED)
def test_writer_still_writes_it(name):
    vector, options = CASES[name]
    assert Codec(**options).encode(vector, generator(0)).numpy().tobytes() == read(name)
