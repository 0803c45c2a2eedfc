"""`rtopk lab`: tables or one JSON object, and pictures."""

import json

import pytest
from typer.testing import CliRunner

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
