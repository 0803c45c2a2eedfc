"""`rtopk lab`: tables or one JSON object, and pictures."""

import json

import pytest
import torch
from typer.testing import CliRunner

from rtopk.replicas.recording import Recorder, Recording
from rtopk.seed import generator
from rtopk.state_file import StateError
from rtopk.studies.lab.arrival import overlap
from rtopk.tools.cli import app
from rtopk.tools.report.inputs import read
from rtopk.tools.report.measurements import show

COMMANDS = {
    "risk": ["--d", "512", "--s", "16", "--n", "200", "--k", "60", "--repeats", "2"],
    "bounds": ["--repeats", "2"],
    "convergence": ["--d", "20", "--nodes", "2", "--horizon", "100", "--horizon", "120", "--horizon", "140"],
    "inspect": ["--at", "0", "--at", "3", "--choose", "0.1", "--nodes", "3"],
}
PICTURES = {
    "risk": ["lab-risk", "lab-amplitudes", "lab-bits"],
    "bounds": ["lab-bounds"],
    "convergence": ["lab-convergence"],
    "inspect": ["lab-gradients"],
}


def call(name, folder, *more):
    result = CliRunner().invoke(app, ["lab", name, *COMMANDS[name], "--out", str(folder), *more])
    assert result.exit_code == 0, result.output
    for picture in PICTURES[name]:
        for kind in ("png", "svg"):
            assert (folder / f"{picture}.{kind}").stat().st_size > 5000
    return result.stdout


@pytest.mark.parametrize(
    "name", ["bounds", "inspect", *(pytest.param(n, marks=pytest.mark.slow) for n in ("risk", "convergence"))]
)
def test_json_is_one_object(name, tmp_path):
    report = json.loads(call(name, tmp_path, "--json"))
    assert len(report["pictures"]) == 2 * len(PICTURES[name])
    if name == "bounds":
        assert report["inside"]
        assert len(report["rows"]) >= 100
    if name == "convergence":
        assert report["never_crossed"]
    if name == "inspect":
        assert report["verdict"]["premise"] in ("holds", "holds in part", "does not hold")
        assert [look["round"] for look in report["looks"]] == [0, 3]
    (tmp_path / "report.json").write_text(json.dumps(report))
    (study,) = read([tmp_path / "report.json"]).studies
    html, charts = show(study)
    assert study.kind == f"lab {name}"
    assert "<table>" in html
    assert charts, "the report draws what the lab measured"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("convergence", "never crossed", marks=pytest.mark.slow),
        ("inspect", "Recommended: k = "),
    ],
)
def test_tables(name, words, tmp_path):
    printed = call(name, tmp_path)
    assert words in printed
    assert "Pictures:" in printed


def test_wrong_settings_name_the_limit(tmp_path):
    result = CliRunner().invoke(app, ["lab", "risk", "--k", "5", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "Theorem 1 needs 2 log d <= k" in str(result.exception)


def recorded(folder, steps=5, nodes=3, size=2000, entries=10**6):
    """What rtopk.ddp.record writes, of gradients with a heavy tail."""
    for rank in range(nodes):
        recorder = Recorder(folder, rank, nodes, size, steps, entries)
        for step in range(steps):
            common = torch.randn(size, generator=generator("common", step)) ** 3
            recorder.write(common + torch.randn(size, generator=generator(rank, step)))
    return folder


def test_inspect_tries_the_schemes_on_recorded_gradients(tmp_path):
    arguments = ["lab", "inspect", "--gradients", str(recorded(tmp_path / "own")), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "5 steps of 3 ranks, 2,000 entries" in " ".join(result.stdout.split())
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [look["round"] for look in report["looks"]] == [0, 2, 4]
    for look in report["looks"]:
        assert 0.2 < look["overlap"] < 1.0
        assert [row["scheme"] for row in look["schemes"]] == ["top-k", *["rtop-k"] * 3, "random-k"]
    assert report["recommendation"]["rounds"] == 5
    result = CliRunner().invoke(app, [*arguments, "--nodes", "3"])
    assert result.exit_code == 2
    assert "leave it out" in result.output


def test_a_sample_is_the_same_on_all_ranks_and_says_the_same(tmp_path):
    recording = Recording.read(recorded(tmp_path, size=200_000, entries=20_000, steps=2))
    assert (recording.size, recording.entries) == (200_000, 20_000)
    common = torch.randn(200_000, generator=generator("common", 0)) ** 3
    whole = [common + torch.randn(200_000, generator=generator(rank, 0)) for rank in range(3)]
    shares = [overlap(gradients, len(gradients[0]) // 100) for gradients in (next(iter(recording)), whole)]
    assert shares[0] == pytest.approx(shares[1], abs=0.1)  # 200 entries: a standard error of 0.03


def test_a_recording_is_read_whole_or_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold step-00000-rank-0.gradients, which rtopk.ddp.record"):
        Recording.read(tmp_path)
    recorded(tmp_path)
    with pytest.raises(ValueError, match="holds gradients of rank 1 already"):
        Recorder(tmp_path, 1, 3, 2000, 5, 10)
    bad = Recorder(tmp_path / "bad", 0, 1, 4, 3, 4)
    for step in (torch.ones(4), torch.tensor([1.0, float("nan"), 0, 0]), torch.zeros(4)):
        bad.write(step)
    assert [len(step) for step in Recording.read(tmp_path / "bad")] == [
        1,
        1,
    ]  # as a job leaves out such a step
    last = tmp_path / "step-00004-rank-2.gradients"
    whole = last.read_bytes()
    last.write_bytes(whole[:-7])
    with pytest.raises(StateError, match="truncated or damaged"):
        list(Recording.read(tmp_path))
    last.write_bytes((tmp_path / "step-00004-rank-1.gradients").read_bytes())
    with pytest.raises(ValueError, match="is of rank 1, not 2"):
        list(Recording.read(tmp_path))
    last.unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of 15 files, step-00004-rank-2.gradients first"):
        Recording.read(tmp_path)


def test_a_step_without_a_gradient_cannot_be_looked_at(tmp_path):
    recorder = Recorder(tmp_path / "own", 0, 1, 500, 3, 500)
    for step in range(3):
        recorder.write(torch.randn(500, generator=generator(step)) if step else torch.zeros(500))
    arguments = ["lab", "inspect", "--gradients", str(tmp_path / "own"), "--out", str(tmp_path)]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 2
    assert "the gradient of round 0 is zero everywhere" in " ".join(told.output.split())
    assert CliRunner().invoke(app, [*arguments, "--at", "2"]).exit_code == 0
