"""What the README and the docs show works as shown."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path, language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def test_python_of_the_readme_runs():
    code = blocks(ROOT / "README.md", "python")
    assert code
    for block in code:
        result = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_ci_runs_the_readmes_test_command():
    assert "make test" in blocks(ROOT / "README.md", "")[0]
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def commands():
    for page in PAGES:
        for block in blocks(page, "") + blocks(page, "sh"):
            for line in block.splitlines():
                if line.startswith("rtopk "):
                    yield pytest.param(line, id=line.split("#")[0].strip())


@pytest.mark.parametrize("line", list(commands()))
def test_commands_of_the_docs_exist_with_their_options(line):
    """Every `rtopk` command shown is parsed by the real command line: its help knows each option it uses."""
    words = shlex.split(line, comments=True)[1:]
    path = list(_names(words))
    result = subprocess.run(
        [sys.executable, "-m", "rtopk", *path, "--help"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0] in result.stdout, f"{word} is not an option of rtopk {' '.join(path)}"


def _names(words):
    for word in words:
        if word.startswith("-"):
            return
        yield word
