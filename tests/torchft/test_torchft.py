"""Compressed DiLoCo on torchft: the books balance whatever the engine does. `replicas.py` has the scenarios."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchft")
DEFAULT = ["undisturbed", "link_of_one", "link_of_all", "not_finite"]


def launch(*names):
    command = [sys.executable, str(Path(__file__).with_name("replicas.py")), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return launch(*DEFAULT)


def check(result, failed, senders):
    assert "raised" not in result, result["raised"]
    assert result == {"failed": failed, "senders": senders}


def test_undisturbed(found):
    check(found["undisturbed"], [0, 0, 0], [[3] * 6])


def test_a_round_that_the_others_committed_counts_as_sent(found):
    check(found["link_of_one"], [0, 1, 0], [[3, 3, 3, 2, 3, 3]])  # healed, it sits one out


def test_a_round_that_nobody_committed_is_taken_back(found):
    check(found["link_of_all"], [1, 1, 1], [[3] * 6])


def test_an_update_that_is_not_finite_stays_away(found):
    check(found["not_finite"], [0, 0, 0], [[3, 3, 3, 2, 3]])


@pytest.mark.slow
def test_streaming_rounding_and_decay():
    found = launch("streaming", "streaming_in_4_bits", "decayed")
    for name in ("streaming", "streaming_in_4_bits"):
        assert "raised" not in found[name], found[name]["raised"]
        assert found[name]["failed"] == [1, 0, 0]
    check(found["decayed"], [1, 1, 1], [[3] * 6])


def test_a_checkpoint_that_others_have_overtaken_is_dropped():
    """Its residual may have been sent and applied since."""
    import torch

    from rtopk.torchft.books import Books, Compression

    own = Books(None, Compression(), 0)
    own.lay_out({"weight": torch.zeros(3, 4)})
    state = {"residual": torch.ones(12)}
    own.load(state, own.made(state))
    assert torch.equal(own.sparsifier.memory.residual, torch.ones(12))
    own.heal([[3, 7]])
    assert own.sparsifier.memory.residual is None


def test_a_state_that_does_not_fit_changes_nothing():
    """The second fragment refuses, so the first keeps its residual too."""
    from types import SimpleNamespace

    import torch

    from rtopk.torchft import DiLoCo
    from rtopk.torchft.books import Books, Compression

    both = [Books(None, Compression(), number) for number in (0, 1)]
    for own in both:
        own.lay_out({"weight": torch.zeros(3, 4)})
        own.sparsifier.memory.add(torch.ones(12))
    trainer = SimpleNamespace(books=both)
    with pytest.raises(ValueError, match="12"):
        DiLoCo.load_state_dict(
            trainer, {"memories": [{"residual": torch.zeros(12)}, {"residual": torch.zeros(9)}]}
        )
    assert all(torch.equal(own.sparsifier.memory.residual, torch.ones(12)) for own in both)
    assert not any(own.loaded for own in both)
    with pytest.raises(ValueError, match="1 fragments, this model has 2"):
        DiLoCo.load_state_dict(trainer, {"memories": [{}]})


def test_what_cannot_work_is_refused():
    from torchft.process_group import ProcessGroupGloo

    import rtopk.torchft
    from rtopk import RAgeK

    class Theirs:
        _pg = ProcessGroupGloo()

    with pytest.raises(ValueError, match="ProcessGroupGloo, which sends everything"):
        rtopk.torchft.DiLoCo(Theirs(), [], None, None, 4)
    with pytest.raises(ValueError, match="come and go"):
        rtopk.torchft.Compression(selector=RAgeK(nodes=2))
    with pytest.raises(ValueError, match="density"):
        rtopk.torchft.Compression(density=2.0)
    with pytest.raises(ValueError, match="mean must be one of"):
        rtopk.torchft.Compression(mean="median")
    with pytest.raises(ValueError, match="memory must be a class or a function"):
        rtopk.torchft.Compression(memory="error-feedback")
