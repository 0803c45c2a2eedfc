"""What is shown is shown alike: one colour for a method in every picture, and the half imports in one direction."""

import ast
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import rtopk
from rtopk.studies.bench.link_report import COLOURS
from rtopk.studies.config import methods
from rtopk.studies.lab.pictures import STYLE
from rtopk.tools.show import palette, terminal
from rtopk.tools.show.terminal import markdown

SOURCE = Path(rtopk.__file__).parent
ORDER = ("tools.show", "studies", "tools.advise", "tools.report", "tools.cli")


def test_every_method_has_a_colour_of_its_own():
    assert set(methods()) == set(palette.METHODS)
    for column in zip(*map(palette.style, methods()), strict=True):
        assert len(set(column)) == len(methods())


def test_a_method_has_one_colour_everywhere():
    for scheme, method in (
        ("paper", "rtop-k"),
        ("top", "top-k"),
        ("random", "random-k"),
        ("central", "dense"),
    ):
        assert STYLE[scheme][0] == palette.style(method)
    assert STYLE["random-k"][0] == palette.style("random-k")
    assert COLOURS["rtopk 0.1 % 4bit"] == palette.style("rtop-k")[0]
    assert COLOURS["dense"] == palette.style("dense")[0]
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_text_is_read_on_every_colour():
    assert palette.is_dark("#1a1a1a")
    assert not palette.is_dark("#f2b48a")


@pytest.mark.parametrize(("right", "rule"), [(True, "| --- | ---: |"), (False, "| --- | --- |")])
def test_tables_in_markdown(right, rule):
    assert markdown(["a", "b"], [["1", ""], ["2", None]], right) == ["| a | b |", rule, "| 1 |  |", "| 2 | |"]


def test_imports_go_down():
    """`tools.show` is at the bottom of this half: the studies may import it, and it imports none of them."""
    seen = 0
    for number, package in enumerate(ORDER):
        for path in (SOURCE / package.replace(".", "/")).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in names:
                    above = [
                        other for other in ORDER[number + 1 :] if f"{name}.".startswith(f"rtopk.{other}.")
                    ]
                    assert not above, f"{path} imports {name}"
                    seen += name.startswith("rtopk.")
    assert seen > 100


def test_a_log_gets_lines_before_the_first_round_is_done(monkeypatch):
    """Also while nobody reports anything: workers that start up say nothing for a while."""
    told = []
    monkeypatch.setattr(terminal, "EVERY", 0.01)
    monkeypatch.setattr(
        terminal, "errors", SimpleNamespace(is_terminal=False, print=lambda text, **_: told.append(text))
    )
    with terminal.runs_progress([("a", "one", 100), ("b", "two", 100)]) as advance:
        _until(lambda: told)
        assert told[0].startswith("0 of 2 runs, 0 % of the rounds")
        assert told[0].endswith("starting")
        advance("a", 50)
        _until(lambda: "25 % of the rounds" in told[-1])
        assert told[-1].endswith(" s left")


def _until(happened):
    while not happened():  # the suite's own limit ends it
        time.sleep(0.01)
