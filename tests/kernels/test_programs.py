"""Triton's programs compile for cards that are not here, fit into them, and move what one pass moves.

What they compute is in test_device.py; that they are fast on a card is not shown by anything here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CARDS = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED = 48 << 10  # bytes of a program: so much is there on every card without asking
REGISTERS = 128  # of a thread: two programs of 256 threads fit into the 65,536 of a multiprocessor
ENTRIES = 4096 // 256  # of the block that a thread of an NVIDIA card has


def compiled(tmp_path_factory, *options):
    script = Path(__file__).parent / "compile_programs.py"
    done = subprocess.run(
        [sys.executable, str(script), *options],
        env=os.environ
        | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["usual", pytest.param("all", marks=pytest.mark.slow)])
def needs(request, tmp_path_factory):
    """What each program needs on each card; all variants take a minute."""
    return compiled(tmp_path_factory, *["--all"] * (request.param == "all"))


def test_every_program_fits_every_card(needs):
    names = {name.partition(" on ")[0].partition(",")[0] for name in needs}
    assert names == {"sweep", "gather", "tally", "narrow", "count", "rank", "subtract"}
    assert {name.partition(" on ")[2] for name in needs} == set(CARDS)
    for name, need in needs.items():
        assert need["shared"] <= SHARED, (name, need)
        assert 0 < need["registers"] <= REGISTERS, (name, need)
        assert need["spilled"] == 0, (name, need)


def test_no_operation_is_fused_or_flushes_subnormals(needs):
    """The CPU rounds every operation and keeps subnormals; so must the card."""
    for name, need in needs.items():
        assert need["fused"] == 0, (name, need)
        assert need["flushed"] == 0, (name, need)


def test_indices_from_outside_are_refused_on_the_card(needs):
    """By an assertion in the machine code; the interpreter has none, and there the host checks them."""
    assert {name.partition(" on ")[0] for name, need in needs.items() if need["asserts"]} == {"subtract"}
    assert sum(need["asserts"] for need in needs.values()) == len(CARDS)


BYTES = {  # of an entry: loaded, stored
    "sweep": (8, 4),
    "sweep, part anywhere": (8, 4),
    "sweep, bf16": (6, 4),
    "sweep, fp16": (6, 4),
    "sweep, momentum": (12, 8),
    "sweep, decay": (8, 4),
    "sweep, no search": (8, 4),
    "sweep, no gradient": (4, 0),
}


def test_accumulation_is_one_pass_over_memory(needs):
    """Residual and gradient are loaded once, the residual stored once; bits and counts are behind a predicate."""
    looked_at = 0
    for case, (loaded, stored) in BYTES.items():
        for card in CARDS[:3]:
            need = needs.get(f"{case} on {card}")
            if need is not None:
                assert (need["loaded"], need["stored"]) == (loaded * ENTRIES, stored * ENTRIES), (case, card)
                looked_at += 1
    assert looked_at >= 6
