"""The self-test finds what is wrong on a device, reports it, and still runs the rest; the predictions add up."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rtopk import kernels
from rtopk.studies.bench import selftest, traffic
from rtopk.studies.bench.selftest_ranks import two_ranks
from rtopk.tools.cli import app

CHECKS = ["selection", "accumulation", "payloads and memories", "refusals", "waits for the device", "2 ranks"]


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(selftest, "two_ranks", lambda device, ranks: "left out")


def test_a_report(alone, tmp_path):
    done = CliRunner().invoke(
        app, ["selftest", "--small", "--device", "cpu", "--json", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "selftest.json").read_text())
    assert report["passed"]
    assert [check["name"] for check in report["checks"]] == CHECKS
    assert report["machine"]["backend"] == "cpu"
    assert {row["method"] for row in report["times"]} == {"floor", "hook", "momentum", "rtopk", "topk", "dgc"}
    page = (tmp_path / "selftest.md").read_text()
    assert page.startswith("# rtopk selftest: passed")
    assert page.count("| passed |") == len(CHECKS)


def one_off(vector, r):
    return kernels.pick(kernels.search_largest(vector, r), r, selftest.draws.every_bit(r), r).positions + 1


BREAKS = {"selection": ("largest", one_off), "refusals": ("reaches", lambda vector, limit: False)}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_wrong_is_reported(alone, monkeypatch, name):
    monkeypatch.setattr(kernels, *BREAKS[name])
    report = selftest.run(torch.device("cpu"), selftest.SMALL)
    assert not report.passed
    assert [check.name for check in report.checks] == CHECKS
    assert not next(check for check in report.checks if check.name == name).passed
    assert "FAILED" in selftest.markdown(report)


def test_sums_that_differ_on_the_device_are_seen(monkeypatch):
    """Every second call is the device's: the reference is computed first."""
    calls = itertools.cycle([kernels.accumulate_, lambda *tensors, **numbers: None])
    monkeypatch.setattr(kernels, "accumulate_", lambda *tensors, **numbers: next(calls)(*tensors, **numbers))
    with pytest.raises(AssertionError, match=r"torch.float32, \{\}: entry 100 is"):
        selftest.accumulate_alike(torch.device("cpu"))


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "meta", "gpu"])
def test_a_card_that_is_not_there(name):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = CliRunner().invoke(app, ["selftest", "--device", name])
    assert f"--device {name}: torch {torch.__version__} sees no card here; use cpu" in str(done.exception)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(selftest, "run", None)
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["selftest", "--device", "cpu", "--out", str(tmp_path / "file")])
    assert isinstance(done.exception, FileExistsError)


def test_what_goes_wrong_in_a_measurement_is_one_row(alone, monkeypatch):
    def broken(device, d, repetitions):
        raise RuntimeError("no\n| room |")

    monkeypatch.setattr(selftest, "measure", broken)
    report = selftest.run(torch.device("cpu"), selftest.SMALL)
    assert report.times == [{"entries": 2000, "method": "RuntimeError: no\n| room |"}]
    assert "| 2,000 | RuntimeError: no / room / |  |  |" in selftest.markdown(report)


@pytest.mark.slow
@pytest.mark.parametrize("backend", kernels.BACKENDS)
def test_two_ranks(backend, monkeypatch):
    """Ranks that DDP trains on each backend, triton's under its interpreter, get the gradients of the loops."""
    if backend == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("RTOPK_BACKEND", backend)  # for the ranks: this process has chosen already
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "gradients have the CPU's bits" in two_ranks(torch.device("cpu"))


def test_predictions_add_up():
    rows = {(row.step, row.d): row for row in traffic.predict()}
    floor = rows["residual.add_(gradient)", 66_000_000]
    assert floor.bytes_per_entry == 12
    assert floor.ms[2.0] == pytest.approx(1e3 * (12 * 66e6 / 2e12 + traffic.LAUNCH))
    ours = rows["compress, fp32 gradient", 1_000_000_000]
    assert 16 < ours.bytes_per_entry < 17  # the check, the pass, and less than a byte for the selection
    assert ours.ms[3.3] < ours.ms[2.0] < ours.ms[1.5]
    for k in (10_000, 1_000_000):
        found = traffic.packing(k)
        assert found["host"] < found["device"]


def test_the_tables_of_the_docs_are_those_that_the_command_prints():
    printed = CliRunner().invoke(app, ["bench", "traffic", "--markdown"])
    page = (Path(__file__).parents[3] / "docs" / "gpu.md").read_text()
    for line in printed.output.splitlines():
        assert line in page
