"""The bench of the codec measures what it says, on sizes that take no time."""

import json
import subprocess
import sys

import pytest

from rtopk.studies.bench.codec import CodecPlan, as_json, bound_bits, measure, show

NAMES = "d k density data values method index_bits bound_bits total_bits encode_ms decode_ms"


def test_rows(capsys):
    measured = measure(
        CodecPlan(sizes=(20_000,), densities=(0.01,), timed=(20_000,), model_size=40_000, runs=1)
    )
    rows = json.loads(json.dumps(as_json(measured)))["rows"]
    assert {row["data"] for row in rows} == {"uniform", "real"}
    assert {"rtopk", "raw64", "raw32", "raw64+zlib", "raw64+zstd", "raw32+zlib", "raw32+zstd"} == {
        row["method"] for row in rows
    }
    for row in rows:
        assert " ".join(row) == NAMES
        assert row["encode_ms"] > 0
    totals = {(row["method"], row["values"]): row["total_bits"] for row in rows if row["data"] == "uniform"}
    assert totals["raw64", "fp32"] == 96
    assert totals["raw32", "fp32"] == 64
    assert totals["rtopk", "fp32"] < 48
    show(measured)
    assert "bound" in capsys.readouterr().out


def test_bound():
    assert bound_bits(10**7, 10**4) == pytest.approx(11.41, abs=0.01)
    assert bound_bits(10**6, 10**4) == pytest.approx(8.08, abs=0.01)


@pytest.mark.slow
def test_the_bars_are_met():
    """`rtopk bench codec --quick --json`: bits at the bars of the project (time is printed, not judged, here)."""
    command = [sys.executable, "-m", "rtopk", "bench", "codec", "--quick", "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["rows"]
    ours = [row for row in rows if row["method"] == "rtopk" and row["k"] >= 10_000]
    assert len(ours) > 10
    for row in ours:
        assert row["index_bits"] <= 1.01 * row["bound_bits"], row
    most = {"fp32": 43.6, "fp16": 27.6, "4bit": 15.8, "2bit": 13.8}
    for row in ours:
        if abs(row["density"] - 0.001) < 1e-6 and row["values"] in most:
            assert row["total_bits"] <= most[row["values"]], row
