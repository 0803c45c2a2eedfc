"""What the hook does where its user says nothing: the defaults that depend on other choices."""

import pytest

from rtopk import ErrorFeedback, NoMemory, RTopK, layout
from rtopk.ddp.options import Options

OTHERS = {
    "values": "fp32", "rounding": "nearest", "mean": None, "weights": None, "clip_norm": None, "scope": "global",
    "dense": layout.one_dimensional, "dense_steps": 0, "counts": "steps", "seed": 0, "verify_every": 0,
    "on_nonfinite": "skip", "max_skips": 50,
}  # fmt: skip


@pytest.mark.parametrize(("memory", "mean"), [("error-feedback", "nodes"), ("momentum-correction", "nodes"),
                                              ("none", "received"), (NoMemory, "received"),
                                              (lambda: ErrorFeedback(), "nodes")])  # fmt: skip
def test_the_mean_follows_the_memory(memory, mean):
    assert Options.check(4, 0.01, None, memory, **OTHERS).mean == mean
    assert Options.check(4, 0.01, None, memory, **{**OTHERS, "mean": "nodes"}).mean == "nodes"


def test_the_selector_draws_from_twice_k_unless_one_is_named():
    assert Options.check(4, 0.01, None, "none", **OTHERS).selector.considered(10, 1000) == 20
    papers = RTopK(nodes=4)
    assert Options.check(4, 0.01, papers, "none", **OTHERS).selector is papers
