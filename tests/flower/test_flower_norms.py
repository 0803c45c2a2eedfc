"""The norm bound follows the clients: it refuses what is absurd, and never for good what is honest."""

import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from harness import LocalGrid, initial

from rtopk import Codec, SparseVector
from rtopk.flower import RTopKMod, RTopKStrategy
from rtopk.flower.intake import LARGEST, ROUNDS, Intake, NormBound, Offer, RefusedError, median

D = 16


def offer(client, norm):
    values = torch.full((D,), norm / math.sqrt(D))
    payload = Codec().encode(SparseVector(torch.arange(D), values, D)).numpy().tobytes()
    return Offer(str(client), client, payload, 1.0)


def judge(intake, norms, model=None):
    """Play one round; return which of the norms were taken."""
    offers = [offer(n, norm) for n, norm in enumerate(norms)]
    _, verdict = intake.average(offers, torch.zeros(D) if model is None else model)
    intake.bound.note(verdict.norms)
    return [o in verdict.taken for o in offers]


def test_one_tiny_reply_freezes_nothing():
    """The attack: after a round of one reply of norm 1e-4, 378 replies of norm 1 were refused, for 189 rounds."""
    intake = Intake(D, 0)
    judge(intake, [1.0, 1.0])
    judge(intake, [1e-4])
    for _ in range(20):
        assert judge(intake, [1.0, 1.0]) == [True, True]
    fresh = Intake(D, 0)  # and as the very first
    judge(fresh, [1e-4])
    assert all(judge(fresh, [1.0, 1.0]) == [True, True] for _ in range(20))


def test_an_honest_client_with_small_steps_stops_nobody():
    """One of three steps by 1e-4 in every round; with two, the model's own norm is what makes 1 plausible."""
    intake = Intake(D, 0)
    assert all(all(judge(intake, [1e-4, 1.0, 2.0])) for _ in range(200))
    pair = Intake(D, 0)
    assert all(all(judge(pair, [1e-4, 1.0], model=torch.ones(D))) for _ in range(200))


@pytest.mark.parametrize("factor", [1e5, 1e-5])
def test_it_recovers_when_the_scale_of_all_changes(factor, caplog):
    intake = Intake(D, 0)
    for _ in range(10):
        judge(intake, [1.0, 1.1, 0.9])
    lost = 0
    while not all(judge(intake, [factor, 1.1 * factor, 0.9 * factor])):
        lost += 1
        assert "most updates of this round, 3 of 3" in caplog.text
    assert lost <= (ROUNDS + 1) // 2
    for _ in range(50):
        assert all(judge(intake, [factor, 1.1 * factor, 0.9 * factor]))


@pytest.mark.parametrize("clients", [1, 2, 5, 20])
@pytest.mark.parametrize("tail", ["lognormal", "pareto"])
def test_long_runs_with_heavy_tails(clients, tail):
    """500 rounds of honest norms over many decades, some zero, some rounds of one tiny reply: few are refused."""
    rng = np.random.default_rng(clients)
    intake, refused, offered, row, longest = Intake(D, 0), 0, 0, 0, 0
    for _ in range(500):
        count = 1 if rng.random() < 0.1 else clients
        norms = rng.lognormal(0.0, 1.5, count) if tail == "lognormal" else rng.pareto(1.2, count) + 0.01
        norms[rng.random(count) < 0.05] = 0.0
        norms[rng.random(count) < 0.05] = 1e-4
        taken = judge(intake, norms)
        refused, offered = refused + taken.count(False), offered + count
        row = row + 1 if taken.count(False) * 2 > count else 0
        longest = max(longest, row)
    assert refused <= 0.02 * offered
    assert longest <= ROUNDS


def test_a_huge_minority_is_refused_for_ever():
    """Two of five send 1e8 in each of 300 rounds, also in rounds where an honest one is away."""
    rng = np.random.default_rng(0)
    intake = Intake(D, 0)
    for number in range(300):
        honest = list(rng.lognormal(0.0, 1.0, 2 if number % 10 == 9 else 3))
        taken = judge(intake, [*honest, 1e8, 1e8] if len(honest) == 3 else [*honest, 1e8])
        assert all(taken[: len(honest)])
        assert not any(taken[len(honest) :])


def test_alone_and_first_nobody_vouches_for_himself():
    bound = NormBound()
    assert bound.limit(1, 2.0, lambda: [3e38]) == 2000.0
    assert bound.limit(1, 0.0, lambda: [3e38]) == LARGEST
    assert NormBound(math.inf).limit(2, 0.0, lambda: [1.0, 1.0]) == LARGEST
    with pytest.raises(RefusedError, match=r"its norm 3e\+38 is above"):
        bound.check(3e38, LARGEST)
    with pytest.raises(RefusedError, match="its norm nan"):
        bound.check(math.nan, LARGEST)


def test_lower_median():
    assert median([]) == 0.0
    assert median([5.0, 1.0]) == 1.0
    assert median([3.0, 1.0, 2.0]) == 2.0


def stepping_app(step):
    """A client that adds `step()` to every weight."""
    app = ClientApp(mods=[RTopKMod(1.0)])

    @app.train()
    def train(message, context):
        arrays = {k: v + step() for k, v in message.content["arrays"].to_torch_state_dict().items()}
        reply = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 10})}
        return Message(RecordDict(reply), reply_to=message)

    return app


def test_a_round_with_one_tiny_reply_through_the_strategy():
    """Only client 0 answers in round 2, with a tiny step; all take part again from round 3 on."""
    number = 0
    strategy = RTopKStrategy(FedAvg(min_train_nodes=1, min_available_nodes=1, fraction_evaluate=0.0))
    grid = LocalGrid([stepping_app(lambda: 1e-5 if number == 2 else 1.0)] * 3)
    arrays = initial()
    for number in range(1, 12):
        replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        arrays, _ = strategy.aggregate_train(number, replies[:1] if number == 2 else replies)
        assert arrays is not None
    assert not strategy.refusals
