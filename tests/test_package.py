"""What is shipped: wheel and sdist with all they need, extras that pull only what they name, and that it runs."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHIPPED = (
    "rtopk/py.typed",
    "rtopk/__main__.py",
    "rtopk/tools/report/assets/page.html",
    "rtopk/tools/report/assets/page.css",
    "rtopk/tools/report/assets/page.js",
    "rtopk/tools/report/assets/plotly-basic.min.js",
    "rtopk/tools/report/assets/plotly-LICENSE.txt",
)


def run(*command, **options):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def test_every_extra_names_only_what_it_is_for():
    extras = PROJECT["optional-dependencies"]
    names = {extra: {re.split(r"[><=\[ ]", need)[0] for need in needs} for extra, needs in extras.items()}
    assert names["cli"] == {"typer", "rich"}
    assert names["report"] == {"rtopk", "matplotlib", "scipy"}
    assert names["tensorboard"] == {"tensorboard"}
    core = {re.split(r"[><=]", need)[0] for need in PROJECT["dependencies"]}
    assert core == {"torch", "numpy", "numba"}
    for extra, found in names.items():
        if extra not in ("dev", "docs"):
            assert not found & {"pytest", "ruff", "mypy", "selenium", "mkdocs-material"}, extra


def test_sources_hold_what_the_wheel_must():
    for name in SHIPPED:
        assert (ROOT / "src" / name).is_file(), name
    assert "MIT" in (ROOT / "src" / "rtopk/tools/report/assets/plotly-LICENSE.txt").read_text()


def test_the_other_rtopk_is_named_if_it_is_installed(tmp_path):
    """EleutherAI/rtopk installs `rtopk/__init__.py` and `rtopk/ops.py`; either may come first."""
    ours = tmp_path / "rtopk"
    shutil.copytree(ROOT / "src" / "rtopk", ours, ignore=shutil.ignore_patterns("__pycache__", "assets"))
    (ours / "ops.py").write_text("")

    def told(code):
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)},
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 1
        return done.stderr.splitlines()[-1]

    assert "two projects named rtopk are installed" in told("import rtopk")
    (ours / "__init__.py").write_text("")
    assert "is of another project named rtopk" in told("import rtopk.ddp")


@pytest.mark.slow
def test_wheel_and_sdist_in_an_empty_environment(tmp_path):
    """Build both; the wheel made from the sdist installs alone, then with [cli], and runs; about five minutes."""
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT)
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        assert set(SHIPPED) <= set(archive.namelist())
        assert not [name for name in archive.namelist() if name.startswith("tests")]
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
        assert {f"src/{name}" for name in SHIPPED} | {"README.md", "LICENSE", "tests/laws.py"} <= inside

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"

    def install(what):
        run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", what)
        listed = run(python, "-m", "pip", "list", "--format", "freeze").splitlines()
        return {line.partition("==")[0].lower() for line in listed}

    core = install(str(wheel))
    assert {"rtopk", "torch", "numpy", "numba"} <= core
    assert not core & {"typer", "rich", "matplotlib", "scikit-learn", "scipy", "flwr", "tensorboard"}
    run(python, "-c", "import torch, rtopk; rtopk.Sparsifier(rtopk.TopK(), 0.1).compress(torch.ones(100), 0)")
    told = subprocess.run([python, "-m", "rtopk"], capture_output=True, text=True, check=False)
    assert told.returncode != 0
    assert "pip install 'rtopk[cli]'" in told.stderr

    with_cli = install(f"{wheel}[cli]")
    assert {"typer", "rich"} <= with_cli
    assert not with_cli & {"matplotlib", "scikit-learn", "scipy", "flwr", "tensorboard"}
    assert "Usage: " in run(python, "-m", "rtopk", "--help", cwd=tmp_path)
    assert run(tmp_path / "venv" / "bin" / "rtopk", "--version", cwd=tmp_path).startswith("rtopk ")

    with_report = install(f"{wheel}[report]")
    assert "matplotlib" in with_report
    assert not with_report & {"scikit-learn", "flwr", "tensorboard", "selenium"}
    (tmp_path / "bench.json").write_text('{"rows": [{"method": "rtopk", "d": 10, "ms": 1.5}]}')
    run(python, "-m", "rtopk", "report", "bench.json", "-o", "out.html", cwd=tmp_path)
    assert "plotly.js (basic" in (tmp_path / "out.html").read_text()
