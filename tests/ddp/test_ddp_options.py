"""What the hook does where its user says nothing: the defaults that depend on other choices."""

import inspect
import re
from dataclasses import fields

import pytest

import rtopk
from rtopk import ErrorFeedback, NoMemory, RTopK, TopK
from rtopk.replicas.options import Options


@pytest.mark.parametrize(("memory", "mean"), [("error-feedback", "nodes"), ("momentum-correction", "nodes"),
                                              ("none", "received"), (NoMemory, "received"),
                                              (lambda: ErrorFeedback(), "nodes")])  # fmt: skip
def test_the_mean_follows_the_memory(memory, mean):
    assert Options(memory=memory).resolved(4).mean == mean
    assert Options(memory=memory, mean="nodes").resolved(4).mean == "nodes"


def test_the_selector_takes_the_largest_unless_there_is_no_memory_or_one_is_named():
    assert Options().resolved(4).selector == TopK()
    assert Options(memory="none").resolved(4).selector.considered(10, 1000) == 20
    papers = RTopK(nodes=4)
    assert Options(selector=papers).resolved(4).selector is papers


def test_a_selector_may_be_given_by_name_and_anything_else_is_refused_at_once():
    assert Options(selector="top-k").resolved(4).selector == TopK()
    assert Options(selector="rtop-k").resolved(4).selector == RTopK(nodes=4)
    for wrong in ("topk", TopK, 3):
        with pytest.raises(ValueError, match="selector must"):
            Options(selector=wrong).resolved(4)


def test_a_rule_that_needs_more_than_its_name_says_so():
    with pytest.raises(
        ValueError, match=r"'threshold' needs more than its name .* an object of rtopk.Threshold"
    ):
        Options(selector="threshold").resolved(4)


@pytest.mark.parametrize("name", ["optimizer", "scaler", "dense", "clip_norm"])
def test_an_option_of_another_type_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"{name} must be .*, got 'model'"):
        Options(**{name: "model"}).resolved(4)


def test_a_schedule_of_the_owners_is_described_by_its_densities():
    """An address would differ between the processes, and registration would be refused."""
    ranks = [Options(exchange="all-reduce", owner_density=lambda step: 0.1).resolved(4) for _ in "ab"]
    told = [rank.describe()["owner_density"] for rank in ranks]
    assert told == ["0.1", "0.1"]
    other = Options(exchange="all-reduce", owner_density=lambda step: 1 / (step + 2)).resolved(4)
    assert other.describe()["owner_density"] != told[0]
    with pytest.raises(ValueError, match=r"owner_density must be in \(0, 1\], got 2.0"):
        Options(exchange="all-reduce", owner_density=lambda step: 2.0).resolved(4).describe()


def test_presets_are_the_published_algorithms_and_nothing_else():
    paper = Options(preset="paper").resolved(4)
    assert (paper.selector, paper.mean, paper.preset) == (RTopK(nodes=4), "nodes", None)
    assert Options(preset="dgc", scope="bucket").resolved(4).memory == "momentum-correction"
    with pytest.raises(ValueError, match=r"preset must be one of \('paper', 'dgc'\), got 'topk'"):
        Options(preset="topk").resolved(4)
    with pytest.raises(ValueError, match="preset 'paper' has mean='nodes', got 'received'"):
        Options(preset="paper", mean="received").resolved(4)


def test_every_option_is_in_the_signature_and_explained():
    """One dataclass is signature, help and check: a field without a line of help would be missed here."""
    parameters = inspect.signature(rtopk.ddp.register).parameters
    assert list(parameters) == ["model", *(field.name for field in fields(Options))]
    for field in fields(Options):
        assert parameters[field.name].default is field.default
        # Python 3.13 strips the indentation of docstrings.
        assert re.search(rf"^ *{field.name}: ", rtopk.ddp.register.__doc__, re.MULTILINE), field.name


def test_an_unknown_option_is_refused_with_its_name():
    with pytest.raises(TypeError, match=r"register\(\) got an unexpected keyword argument 'densitty'"):
        rtopk.ddp.register(None, densitty=0.01)
