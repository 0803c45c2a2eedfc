"""Server and clients hold the same bits, in whatever order clients come and go."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtopk.flower.downlink import OutOfStepError, Update, Versions, follow
from rtopk.layout import Layout
from rtopk.state_file import digest_bits

D = 200
LAYOUT = Layout(("w", "b"), ((18, 10), (20,)), dense_size=20)
FORMS = [
    {},
    {"density": 0.05},
    {"density": 0.05, "values": "4bit"},
    {"values": "bf16"},
    {"density": 0.1, "values": "fp16", "layout": LAYOUT, "anchor_every": 3},
]


def target(number):
    rng = torch.Generator().manual_seed(number)
    return torch.randn(D, generator=rng) * (torch.rand(D, generator=rng) < 0.1)


@pytest.mark.parametrize("options", FORMS)
@settings(max_examples=25)
@given(visits=st.lists(st.lists(st.integers(0, 2), max_size=3, unique=True), min_size=1, max_size=12))
def test_clients_hold_the_servers_bits(options, visits):
    """Each round some of three clients come; each then holds the model, from wherever it was."""
    versions = Versions(target(0), history=4, **options)
    held = dict.fromkeys(range(3), (None, None))  # client -> version, vector
    for number, visitors in enumerate(visits):
        for n in visitors:
            base, vector = held[n]
            update = versions.since(base)
            fingerprint, lossless = versions.codec.fingerprint, versions.lossless
            model = follow(vector, update, size=D, fingerprint=fingerprint, lossless=lossless)
            assert torch.equal(model.view(torch.int32), versions.model.view(torch.int32))
            held[n] = (versions.version, model)
        versions.advance(versions.target + target(number + 1))


@pytest.mark.parametrize("options", FORMS)
def test_nothing_is_lost_on_the_way_down(options):
    """What clients do not have yet is what the server keeps back."""
    versions = Versions(target(0), **options)
    goal = versions.model.double()
    for number in range(1, 20):
        step = target(number)
        goal += step.double()
        versions.advance(versions.target + step)
        assert torch.allclose(versions.target.double(), goal, atol=1e-4)
    if versions.lossless:
        assert torch.equal(versions.target, versions.model)


def test_lossless_is_exact_for_any_bits():
    """Also where a difference could not be: signed zeros, tiny numbers, and values far apart."""
    start = torch.tensor([0.0, -0.0, 1e-45, 1.0, 1e30, 5.0])
    goal = torch.tensor([-0.0, 0.0, 1.0, 1e-45, -1e-30, 5.0])
    versions = Versions(start)
    versions.advance(goal)
    model = follow(start, versions.since(0), size=6, fingerprint=0, lossless=True)
    assert torch.equal(model.view(torch.int32), goal.view(torch.int32))


def test_who_gets_what():
    versions = Versions(target(0), history=2, density=0.02)
    assert versions.since(None).kind == "snapshot"
    assert versions.since(0).kind == "held"
    for number in range(1, 4):
        versions.advance(versions.target + target(number))
    assert versions.since(2).kind == "deltas"
    assert len(versions.since(1).payloads) == 2
    assert versions.since(0).kind == "snapshot"  # more than `history` behind
    assert versions.since(99).kind == "snapshot"  # a version that never was


def test_a_chain_larger_than_a_snapshot_is_a_snapshot():
    versions = Versions(torch.ones(D))
    for number in range(1, 4):
        versions.advance(torch.full((D,), 1.0 + number))
    assert versions.since(0).kind == "snapshot"


def test_anchor_sends_everybody_the_whole_model():
    versions = Versions(target(0), density=0.02, anchor_every=2)
    versions.advance(target(1))
    assert versions.since(0).kind == "deltas"
    versions.advance(target(2))
    assert versions.since(1).kind == "snapshot"
    assert torch.equal(versions.model, target(2))


def test_a_client_out_of_step_says_so():
    versions = Versions(target(0))
    versions.advance(target(1))
    wrong = target(0)
    unchanged = (target(0) == target(1)).nonzero()[0]
    wrong[unchanged] += 1
    with pytest.raises(OutOfStepError, match="the server has"):
        follow(wrong, versions.since(0), size=D, fingerprint=0, lossless=True)
    with pytest.raises(OutOfStepError, match="holds none"):
        follow(None, versions.since(0), size=D, fingerprint=0, lossless=True)
    part = versions.since(0).payloads
    with pytest.raises(OutOfStepError, match="all 200 entries"):
        follow(None, Update("snapshot", 1, 1, b"", part), size=D, fingerprint=0, lossless=True)


def test_a_target_that_is_not_finite_changes_nothing():
    versions = Versions(target(0))
    before = versions.digest
    with pytest.raises(ValueError, match="finite"):
        versions.advance(torch.full((D,), float("nan")))
    assert (versions.version, versions.digest) == (0, before)
    assert digest_bits(versions.model) == before


def test_state_goes_on():
    options = {"density": 0.05, "values": "fp16"}
    one = Versions(target(0), **options)
    for number in range(1, 5):
        one.advance(one.target + target(number))
    two = Versions(target(0), **options)
    two.load_state_dict(one.state_dict())
    for versions in (one, two):
        versions.advance(versions.target + target(9))
    assert one.digest == two.digest
    assert len(two.since(2).payloads) == 3
    with pytest.raises(ValueError, match="this one has 3"):
        Versions(torch.zeros(3)).load_state_dict(one.state_dict())
