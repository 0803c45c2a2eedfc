"""Strategies that compare or clip clients see every client; what error feedback would break is refused."""

import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
)
from harness import LocalGrid, initial, quadratic_app

from rtopk.flower import RTopKMod, RTopKStrategy

FEW = {"min_train_nodes": 1, "min_available_nodes": 1}
NEED_EACH = [
    FedMedian(),
    FedTrimmedAvg(),
    Krum(),
    MultiKrum(),
    Bulyan(),
    QFedAvg(0.1),
    DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 3),
    DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.1, 3),
]
CLIENT_SIDE = [
    DifferentialPrivacyClientSideFixedClipping(FedAvg(), 1.0, 1.0, 3),
    DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 0.1, 3),
]


class Own(FedAvg):
    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, replies)


class OwnSampling(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        return super().configure_train(server_round, arrays, config, grid)


class OwnKrum(Krum):
    def aggregate_train(self, server_round, replies):
        return super().aggregate_train(server_round, replies)


@pytest.mark.parametrize("inner", NEED_EACH, ids=lambda s: type(s).__name__)
def test_what_needs_every_client_gets_every_client(inner):
    assert RTopKStrategy(inner).each
    with pytest.raises(ValueError, match=f"{type(inner).__name__} must see every client's weights"):
        RTopKStrategy(inner, each=False)
    with pytest.raises(ValueError, match="mean must be 'nodes'"):
        RTopKStrategy(inner, mean="received")


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedAvgM, FedAdam, FedYogi, FedAdagrad, OwnSampling])
def test_what_steps_from_the_mean_gets_the_mean(kind):
    assert not RTopKStrategy(kind(**FEW)).each
    assert RTopKStrategy(kind(**FEW), each=True).each


def test_a_strategy_of_ones_own_sees_what_it_would_see_without_us():
    assert RTopKStrategy(Own()).each
    assert not RTopKStrategy(Own(), each=False).each  # its author knows
    with pytest.raises(ValueError, match="OwnKrum must see every"):
        RTopKStrategy(OwnKrum(), each=False)


class Named(FedAvg):
    """Ask clients for an action of their own, not for the default one."""

    def configure_train(self, *arguments):
        messages = super().configure_train(*arguments)
        return [
            Message(m.content, message_type="train.short", dst_node_id=m.metadata.dst_node_id)
            for m in messages
        ]


def test_a_named_action_of_training_is_compressed_too():
    app = ClientApp(mods=[RTopKMod(0.1)])

    @app.train("short")
    def train(message, context):
        own = ArrayRecord({n: Array(a.numpy() + np.float32(1)) for n, a in message.content["arrays"].items()})
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": own, "metrics": metrics}), reply_to=message)

    strategy = RTopKStrategy(Named(**FEW, fraction_evaluate=0.0))
    strategy.start(LocalGrid([app]), initial(), num_rounds=2)
    assert not strategy.refusals
    assert strategy.intake.accepted == {"0": 1}


def test_a_class_or_an_old_strategy_is_refused():
    from flwr.server.strategy import FedAvg as OldFedAvg

    for wrong in (FedAvg, OldFedAvg(), None):
        with pytest.raises(TypeError, match=r"instance of a strategy of flwr\.serverapp\.strategy"):
            RTopKStrategy(wrong)


@pytest.mark.parametrize("inner", CLIENT_SIDE, ids=lambda s: type(s).__name__)
def test_client_side_clipping_is_refused_at_the_server(inner):
    with pytest.raises(ValueError, match=r"error feedback.*Clip at the server"):
        RTopKStrategy(inner)
    with pytest.raises(ValueError, match="Clip at the server"):
        RTopKStrategy(DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, 3))


def test_client_side_clipping_is_refused_at_the_client():
    """The wrapper is outside of ours: only clients can see it. No payload leaves them."""
    app = quadratic_app(RTopKMod(0.1), 1.0)
    app._mods = [RTopKMod(0.1), fixedclipping_mod]
    ours = RTopKStrategy(FedAvg(**FEW, fraction_evaluate=0.0))
    strategy = DifferentialPrivacyClientSideFixedClipping(ours, 1.0, 1.0, 3)
    grid = LocalGrid([app] * 3)
    replies = grid.send_and_receive(strategy.configure_train(1, initial(), ConfigRecord(), grid))
    assert all(reply.has_error() and "Clip at the server" in reply.error.reason for reply in replies)


def shifted(client, by, mods=None, examples=10):
    """A client that adds a number to all weights."""
    app = ClientApp(mods=mods or [RTopKMod(1.0)])

    @app.train()
    def train(message, context):
        arrays = {n: a.numpy() + by for n, a in message.content["arrays"].items()}
        record = ArrayRecord({n: Array(np.asarray(a)) for n, a in arrays.items()})
        metrics = MetricRecord({"num-examples": examples, "loss": 1.0})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    return app


def start():
    return ArrayRecord({"w": Array(np.ones((4, 5), np.float32)), "wide": Array(np.ones(3))})


@pytest.mark.parametrize(
    "inner",
    [FedMedian(**FEW), Krum(**FEW, num_malicious_nodes=1), FedTrimmedAvg(**FEW, beta=0.3), Bulyan(**FEW)],
)
def test_a_robust_strategy_resists_a_poisoner(inner):
    """Four move by 1, one by -300, within our bounds: the mean would move by -59. Also where arrays go whole."""
    inner.min_available_nodes, inner.fraction_evaluate = 5, 0.0
    if isinstance(inner, Bulyan):
        inner.num_malicious_nodes = 0
        moves = [1.0, 1.0, 1.0, 1.0, 1.0]
    else:
        moves = [1.0, 1.0, -300.0, 1.0, 1.0]
    strategy = RTopKStrategy(inner)
    result = strategy.start(LocalGrid([shifted(n, by) for n, by in enumerate(moves)]), start(), num_rounds=1)
    assert not strategy.refusals
    for name in ("w", "wide"):
        np.testing.assert_allclose(result.arrays[name].numpy(), 2.0, rtol=1e-6)
        assert result.arrays[name].dtype == start()[name].dtype


def test_server_side_clipping_bounds_each_client():
    """One client moves by 300 per weight: the mean may move by no more than clip / clients for it."""
    inner = DifferentialPrivacyServerSideFixedClipping(FedAvg(**FEW, fraction_evaluate=0.0), 0.0, 1.0, 4)
    grid = LocalGrid([shifted(n, 300.0 if n == 2 else 1e-6) for n in range(4)])
    result = RTopKStrategy(inner, outlier=math.inf).start(grid, start(), num_rounds=1)
    moved = np.concatenate([(result.arrays[n].numpy() - 1.0).ravel() for n in ("w", "wide")])
    assert np.linalg.norm(moved) == pytest.approx(0.25, rel=1e-4)


def test_local_noise_is_added_before_compression():
    """[RTopKMod, LocalDpMod] compresses what is noisy already; the other order says that it cannot."""
    noisy = LocalDpMod(clipping_norm=1.0, sensitivity=0.1, epsilon=1.0, delta=1e-5)
    strategy = RTopKStrategy(FedAvg(**FEW, fraction_evaluate=0.0))
    grid = LocalGrid([shifted(n, 5.0, mods=[RTopKMod(1.0), noisy]) for n in range(3)])
    assert strategy.start(grid, initial(), num_rounds=1).arrays
    assert not strategy.refusals
    wrong = RTopKStrategy(FedAvg(**FEW, fraction_evaluate=0.0))
    wrong.start(LocalGrid([shifted(0, 5.0, mods=[noisy, RTopKMod(1.0)])] * 3), initial(), num_rounds=1)
    assert len(wrong.refusals) == 3
    assert not wrong.intake.accepted
