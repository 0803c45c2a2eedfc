"""A server that saves, ends and is started again ends with the bits of one that never stopped."""

import io

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedYogi,
    Krum,
)
from harness import LocalGrid, initial, quadratic_app

from rtopk.flower import RTopKMod, RTopKStrategy
from rtopk.flower import inner as known
from rtopk.local.outer import Nesterov

INNERS = {
    "FedAvg": (FedAvg, {}),
    "FedAvgM": (FedAvgM, {"server_momentum": 0.9, "server_learning_rate": 0.5}),
    "FedAdam": (FedAdam, {}),
    "FedYogi": (FedYogi, {}),
    "FedAdagrad": (FedAdagrad, {}),
    "FedMedian": (FedMedian, {}),
    "Krum": (Krum, {"num_malicious_nodes": 1}),
}


def make(inner="FedAvg", **options):
    kind, arguments = INNERS[inner]
    return RTopKStrategy(kind(min_train_nodes=1, min_available_nodes=1, **arguments), **options)


def make_grid(store, clients=3):
    return LocalGrid([quadratic_app(RTopKMod(0.1, store=store), n) for n in range(clients)])


def through_bytes(state):
    """As a file would keep it: without pickle."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


LOSSY = {"outer": Nesterov(), "downlink_density": 0.05}


@pytest.mark.parametrize(("inner", "options"), [*((name, {}) for name in INNERS), ("FedAdam", LOSSY)])
def test_a_restart_through_start_changes_no_bit(tmp_path, inner, options):
    """Save in `on_round`, as documented: the evaluation after it, which clients have seen, is forgotten."""
    whole = make(inner, **options).start(make_grid(tmp_path / "one"), initial(True), num_rounds=6).arrays
    states = []
    first = make(inner, **options, on_round=lambda number, s: states.append(through_bytes(s.state_dict())))
    grid = make_grid(tmp_path / "two")
    first.start(grid, initial(True), num_rounds=3)
    second = make(inner, **options)
    second.load_state_dict(states[-1])
    assert second.last_round == 3
    result = second.start(grid, initial(True), num_rounds=6 - second.last_round)
    assert not second.refusals
    assert second.last_round == 6
    for name in whole:
        assert result.arrays[name].data == whole[name].data, name
        assert result.arrays[name].dtype == whole[name].dtype


def test_a_server_that_dies_in_the_middle_of_a_round(tmp_path):
    """Clients have trained round 3 for a server that is gone; it comes back at the end of round 2."""
    grid = make_grid(tmp_path)
    first, states = make("FedAdam"), []
    first.on_round = lambda number, s: states.append(through_bytes(s.state_dict()))
    arrays = first.start(grid, initial(), num_rounds=2).arrays
    grid.send_and_receive(first.configure_train(3, arrays, ConfigRecord(), grid))
    second = make("FedAdam")
    second.load_state_dict(states[-1])
    second.start(grid, arrays, num_rounds=3)
    assert not second.refusals
    assert set(second.intake.accepted.values()) == {4}


def test_start_can_be_called_twice(tmp_path):
    grid, strategy = make_grid(tmp_path), make()
    arrays = strategy.start(grid, initial(), num_rounds=2).arrays
    strategy.start(grid, arrays, num_rounds=2)
    assert not strategy.refusals
    assert set(strategy.intake.accepted.values()) == {3}
    assert sorted(strategy.ledger.rounds) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_start_from_a_copy_of_the_result_loses_nothing(tmp_path, kind):
    """What the server has not sent yet, and what float16 does not hold, stays for later rounds."""
    results = []
    for copied in (False, True):
        grid, strategy = make_grid(tmp_path / str(copied)), make(downlink_density=0.05)
        arrays = ArrayRecord({n: Array(a.numpy().astype(kind)) for n, a in initial().items()})
        for _ in range(4):
            arrays = strategy.start(grid, arrays, num_rounds=1).arrays
            if copied:
                arrays = ArrayRecord.from_torch_state_dict(arrays.to_torch_state_dict())
        results.append(strategy.versions)
    assert torch.equal(results[0].target, results[1].target)
    assert results[0].version == results[1].version == 4


class Own(FedAvg):
    """A strategy of somebody's own that counts its rounds."""

    rounds = 0

    def aggregate_train(self, server_round, replies):
        self.rounds += 1
        return super().aggregate_train(server_round, replies)


class Saved(Own):
    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state):
        self.rounds = state["rounds"]


def test_an_unknown_strategy_says_what_it_remembers_or_is_refused(tmp_path):
    strategy = RTopKStrategy(Own(min_train_nodes=1, min_available_nodes=1))
    strategy.start(make_grid(tmp_path / "a"), initial(), num_rounds=1)
    with pytest.raises(ValueError, match=r"Own holds state that is not known.*state_dict"):
        strategy.state_dict()
    strategy = RTopKStrategy(Saved(min_train_nodes=1, min_available_nodes=1))
    strategy.start(make_grid(tmp_path / "b"), initial(), num_rounds=2)
    again = RTopKStrategy(Saved())
    again.load_state_dict(strategy.state_dict())
    assert again.inner.rounds == 2


def test_a_wrapped_strategy_is_saved_with_its_wrapper(tmp_path):
    def wrapped():
        inner = FedAdam(min_train_nodes=1, min_available_nodes=1)
        return DifferentialPrivacyServerSideAdaptiveClipping(inner, 0.1, 3)

    strategy = RTopKStrategy(wrapped())
    strategy.start(make_grid(tmp_path), initial(), num_rounds=2)
    again = RTopKStrategy(wrapped())
    again.load_state_dict(through_bytes(strategy.state_dict()))
    assert again.inner.clipping_norm == strategy.inner.clipping_norm != wrapped().clipping_norm
    for name, value in strategy.inner.strategy.m_t.items():
        np.testing.assert_array_equal(again.inner.strategy.m_t[name], value)


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    strategy = make("FedAdam")
    with pytest.raises(ValueError, match="nothing to save before the first round"):
        strategy.state_dict()
    strategy.start(make_grid(tmp_path), initial(), num_rounds=1)
    state = strategy.state_dict()
    with pytest.raises(ValueError, match=r"inner strategy \['FedAdam'\], this is \['FedAvg'\]"):
        make().load_state_dict(state)
    with pytest.raises(ValueError, match="has begun"):
        strategy.load_state_dict(state)
    other = make("FedAdam")
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="other names or shapes"):
        other.start(make_grid(tmp_path), ArrayRecord({"v": initial()["w"]}), num_rounds=1)


def test_every_strategy_of_flower_is_known_or_refused():
    """A new Flower with another strategy must be looked at."""
    from flwr.serverapp import strategy as flowers

    kinds = {getattr(flowers, name) for name in flowers.__all__} - {flowers.Result, flowers.Strategy}
    trees = {flowers.FedXgbBagging, flowers.FedXgbCyclic}  # no arrays of floats: refused by the model
    assert kinds == set(known.KNOWN) | set(known.CLIPPED_BY_CLIENTS) | trees
