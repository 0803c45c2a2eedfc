"""Whatever a client sends, in training and in evaluation, the round goes on as if it had not answered."""

import logging
from copy import copy

import numpy as np
import pytest
import reply_fuzzer
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg
from harness import LocalGrid, initial, move, quadratic_app, tensors

from rtopk import Codec, SparseVector
from rtopk.flower import RTopKMod, RTopKStrategy
from rtopk.flower.records import Model

FEW = {"min_train_nodes": 1, "min_available_nodes": 1}
LAYOUT = Model.of(initial()).layout
SIZE = LAYOUT.size


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("flwr").setLevel(logging.ERROR)


def play(change=None, phase="train", model=None, clients=4, inner=None, **options):
    """One round in which node 101 sends what `change` makes of its reply, or nothing; return what came out."""
    strategy = RTopKStrategy(inner or FedAvg(**FEW), **options)
    grid = LocalGrid([quadratic_app(RTopKMod(0.2), n) for n in range(clients)])
    arrays = initial() if model is None else model

    def exchange(phase, arrays, bad):
        configured = getattr(strategy, f"configure_{phase}")(1, arrays, ConfigRecord(), grid)
        replies = sorted(grid.send_and_receive(configured), key=lambda r: r.metadata.src_node_id)
        replies = [r for r in replies if r.metadata.src_node_id != 101 or bad is None or bad(r)]
        return getattr(strategy, f"aggregate_{phase}")(1, replies)

    silent = (lambda reply: None) if change is None else lambda reply: change(reply) or True
    result, _ = exchange("train", arrays, silent if phase == "train" else None)
    metrics = exchange("evaluate", result, silent if phase == "evaluate" else None)
    return result, metrics, strategy


def same(one, two):
    return {n: a.data for n, a in one.items()} == {n: a.data for n, a in two.items()}


def with_metrics(**changes):
    def change(reply):
        record = {**dict(reply.content["metrics"]), **changes}
        reply.content["metrics"] = MetricRecord({k: v for k, v in record.items() if v is not None})

    return change


def renamed(reply):
    content = dict(reply.content)
    content["model"] = content.pop("arrays")
    reply.content = RecordDict(content)


def with_payload(values, **raw):
    def change(reply):
        data = Codec(fingerprint=LAYOUT.fingerprint).encode(values).numpy().tobytes()
        array = Array(dtype="uint8", shape=(len(data),), stype="rtopk.v1", data=data)
        reply.content["arrays"] = ArrayRecord({**dict(reply.content["arrays"]), "rtopk.0": array, **raw})

    return change


def huge(value):
    return with_payload(SparseVector(torch.arange(SIZE), torch.full((SIZE,), value), SIZE))


METRICS = {
    "empty list": {"loss": []},
    "list": {"loss": [1.0, 2.0]},
    "not a number": {"loss": float("nan")},
    "infinite": {"loss": float("inf")},
    "missing": {"loss": None},
    "extra": {"more": 1.0},
    "weight a list": {"num-examples": [10]},
    "weight missing": {"num-examples": None},
    "weight zero": {"num-examples": 0},
    "weight negative": {"num-examples": -30},
    "weight not a number": {"num-examples": float("nan")},
    "weight 2^60": {"num-examples": 2**60},
    "weight that vanishes": {"num-examples": 5e-324},
}


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("phase", ["train", "evaluate"])
@pytest.mark.parametrize("name", METRICS)
def test_bad_metrics(name, phase, each):
    changes = {("norm" if k == "loss" and phase == "evaluate" else k): v for k, v in METRICS[name].items()}
    expected, metrics, _ = play(phase=phase, each=each)
    arrays, reported, strategy = play(with_metrics(**changes), phase, each=each)
    assert [r.node for r in strategy.refusals] == [101]
    assert same(arrays, expected)
    assert reported == metrics


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("change", [renamed, huge(3e38), huge(1e30), huge(1e10)])
def test_bad_arrays_in_the_first_round(change, each):
    expected, *_ = play(each=each)
    arrays, _, strategy = play(change, each=each)
    assert [r.node for r in strategy.refusals] == [101]
    assert same(arrays, expected)


@pytest.mark.parametrize("value", [3e38, 1e25])
def test_one_client_alone_in_the_first_round(value):
    """Nobody vouches for it but the model's own norm: it is refused, and the next round is as ever."""
    strategy = RTopKStrategy(FedAvg(**FEW, fraction_evaluate=0.0))
    grid = LocalGrid([quadratic_app(RTopKMod(0.2), 0)])
    replies = grid.send_and_receive(strategy.configure_train(1, initial(), ConfigRecord(), grid))
    huge(value)(replies[0])
    assert strategy.aggregate_train(1, replies) == (None, None)
    strategy.start(grid, initial(), num_rounds=2)
    assert strategy.intake.accepted == {"0": 2}
    assert len(strategy.refusals) == 1


@pytest.mark.parametrize("each", [False, True])
def test_a_float16_model_stays_finite(each):
    """An update that passes every norm and moves a weight beyond 65,504."""
    model = reply_fuzzer.model("half")
    values = torch.full((SIZE,), 3.0)
    values[7] = 9e4
    expected, *_ = play(model=model, each=each)
    arrays, _, strategy = play(
        with_payload(SparseVector(torch.arange(SIZE), values, SIZE)), model=model, each=each, outlier=1e9
    )
    assert ["beyond 65504" in r.reason for r in strategy.refusals] == [True]
    assert same(arrays, expected)


@pytest.mark.parametrize("value", [1.7e308, 1e200, 1e30, 1e7])
@pytest.mark.parametrize("each", [False, True])
def test_arrays_that_go_whole_have_the_same_bounds(value, each):
    def change(reply):
        arrays = {**dict(reply.content["arrays"]), "wide": Array(np.array([value, 0.0, -value]))}
        reply.content["arrays"] = ArrayRecord(arrays)

    expected, *_ = play(model=initial(True), each=each)
    arrays, _, strategy = play(change, model=initial(True), each=each)
    assert ["its norm" in r.reason for r in strategy.refusals] == [True]
    assert same(arrays, expected)


def test_no_client_alone_decides_a_counter():
    def change(reply):
        arrays = {**dict(reply.content["arrays"]), "count": Array(np.array(-(2**63)))}
        reply.content["arrays"] = ArrayRecord(arrays)

    arrays, *_ = play(change, model=initial(True))
    assert arrays["count"].numpy() == 6


@pytest.mark.parametrize("each", [False, True])
def test_one_of_ten_does_not_decide_the_weights(each, caplog):
    """2^40 examples count as ten times the median: 10 of 19 parts, not all."""
    honest, *_ = play(with_metrics(**{"num-examples": 100}), clients=10, each=each)
    greedy, _, strategy = play(with_metrics(**{"num-examples": 2**40}), clients=10, each=each)
    assert not strategy.refusals
    assert same(greedy, honest)
    assert "counts as 100, 10 times the median" in caplog.text
    with pytest.raises(ValueError, match="weight_ratio must be at least 1"):
        RTopKStrategy(FedAvg(), weight_ratio=0.5)


def test_of_two_clients_one_cannot_make_the_other_vanish():
    """The smaller weight is the median of two: the other counts ten times as much, also in float32."""
    strategy = RTopKStrategy(FedAvg(**FEW, fraction_evaluate=0.0))
    grid = LocalGrid([quadratic_app(RTopKMod(1.0), n) for n in range(2)])
    replies = grid.send_and_receive(strategy.configure_train(1, initial(), ConfigRecord(), grid))
    replies.sort(key=lambda reply: reply.metadata.src_node_id)
    with_metrics(**{"num-examples": 2.0**-40})(replies[0])
    own, _ = strategy.model.flatten(initial())
    arrays, _ = strategy.aggregate_train(1, replies)
    moved = own - strategy.model.flatten(arrays)[0]
    honest = own - strategy.model.flatten(ArrayRecord.from_torch_state_dict(move(tensors(initial()), 1.0)))[0]
    assert torch.allclose(moved, honest, atol=0.02)
    assert not torch.allclose(moved, honest, atol=0.001)


def test_evaluation_weights_are_capped_too():
    _, honest, _ = play(with_metrics(**{"num-examples": 100, "norm": 5.0}), "evaluate")
    _, greedy, _ = play(with_metrics(**{"num-examples": 2**40, "norm": 5.0}), "evaluate")
    assert greedy == honest


@pytest.mark.parametrize("restarted", [False, True])
def test_of_two_forms_the_usual_one_stays(restarted):
    """Two clients, one of which changes its metrics: the form of the round before decides, not who came first."""
    strategy = RTopKStrategy(FedAvg(**FEW, fraction_evaluate=0.0))
    grid = LocalGrid([quadratic_app(RTopKMod(0.2), n) for n in range(2)])
    arrays = strategy.start(grid, initial(), num_rounds=1).arrays
    if restarted:
        state, strategy = strategy.state_dict(), RTopKStrategy(FedAvg(**FEW))
        strategy.load_state_dict(state)
    replies = grid.send_and_receive(strategy.configure_train(2, arrays, ConfigRecord(), grid))
    replies.sort(key=lambda reply: reply.metadata.src_node_id)
    with_metrics(more=1.0)(replies[0])
    strategy.aggregate_train(2, replies)
    assert strategy.intake.accepted == {"0": 0, "1": 1}


class Fragile(FedAdam):
    """A strategy that cannot bear a loss above 1000, and changes itself before it says so."""

    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        for reply in replies:
            if reply.content["metrics"]["loss"] > 1000:
                raise KeyError(f"round {server_round}")
        return result


def test_who_breaks_the_inner_strategy_is_left_out():
    """Twice in a row: its moments are those of the honest clients only."""
    results = []
    for change in (None, with_metrics(loss=5000.0)):
        arrays, _, strategy = play(change, inner=Fragile(**FEW))
        results.append((arrays, strategy.inner.m_t))
    assert [r.reason for r in strategy.refusals] == ["aggregation fails with it: KeyError: 'round 1'"]
    assert same(results[0][0], results[1][0])
    for name, value in results[0][1].items():
        np.testing.assert_array_equal(results[1][1][name], value)


class Loud(FedAvg):
    """A strategy that says in its errors what clients sent."""

    def aggregate_evaluate(self, server_round, replies):
        raise KeyError("\x1b[2J" + 5_000_000 * "!")


def test_an_exception_of_the_inner_strategy_is_logged_without_its_text(caplog):
    play(lambda reply: None, inner=Loud(**FEW))
    (record,) = [r for r in caplog.records if r.levelname == "ERROR" and r.name == "rtopk.flower"]
    assert "aggregate_evaluate" in record.getMessage()  # where it was raised
    assert "\x1b" not in record.getMessage()
    assert len(record.getMessage()) < 5_000
    assert record.exc_info is None


class Broken(FedAvg):
    broken = True

    def aggregate_train(self, server_round, replies):
        if self.broken:
            raise KeyError("a mistake of the server")
        return super().aggregate_train(server_round, replies)


def test_a_strategy_that_fails_with_everybody(caplog):
    """Before anything was learned it raises: the server has a mistake. Later the model stays, and rounds go on."""
    grid = LocalGrid([quadratic_app(RTopKMod(0.2), n) for n in range(3)])
    strategy = RTopKStrategy(Broken(**FEW))
    with pytest.raises(KeyError, match="a mistake of the server"):
        strategy.start(grid, initial(), num_rounds=1)
    strategy.inner.broken = False
    arrays = strategy.start(grid, initial(), num_rounds=1).arrays
    strategy.inner.broken = True
    assert strategy.start(grid, arrays, num_rounds=2).arrays == ArrayRecord()  # no round brought any
    assert "the model stays as it was" in caplog.text
    strategy.inner.broken = False
    strategy.start(grid, arrays, num_rounds=1)
    assert set(strategy.intake.accepted.values()) == {4}
    assert not strategy.refusals


@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_what_clients_say_is_logged_short_and_escaped(phase, caplog):
    text = "\x1b[2J\x1b]0;owned\x07\nround 9: all is well\u202e" + 5_000_000 * "!"

    def fails(reply):
        reply.__dict__["_content"], reply.__dict__["_error"] = None, Error(2, text)

    def odd(reply):
        reply.content["metrics"] = MetricRecord({"num-examples": 10, text: 1.0})

    def named(reply):
        reply.content = RecordDict(
            {
                **dict(reply.content),
                text: ConfigRecord({text: text}),
                "rtopk": ConfigRecord({"client": text, "digest": b""}),
            }
        )

    for change in (fails, odd, named):
        caplog.clear()
        _, _, strategy = play(change, phase)
        (refusal,) = strategy.refusals
        assert len(refusal.reason) < 1000
        assert refusal.reason.isprintable()
        mine = [record.getMessage() for record in caplog.records if record.name == "rtopk.flower"]
        assert all(len(line) < 1200 and line.isprintable() for line in mine)


def test_a_reply_to_an_earlier_evaluation_is_refused():
    strategy = RTopKStrategy(FedAvg(**FEW))
    grid = LocalGrid([quadratic_app(RTopKMod(0.2), n) for n in range(3)])
    arrays = strategy.start(grid, initial(), num_rounds=1).arrays
    old = grid.send_and_receive(strategy.configure_evaluate(1, arrays, ConfigRecord(), grid))
    strategy.start(grid, arrays, num_rounds=1)
    assert strategy.aggregate_evaluate(1, [copy(reply) for reply in old]) is None
    assert {r.reason for r in strategy.refusals} == {"it is of round 0, this is round 1"}


def test_a_reply_to_training_is_none_to_evaluation():
    """Of two clients, one answers the evaluation with what it sent in training: it stays out, not the other."""
    strategy = RTopKStrategy(FedAvg(**FEW))
    grid = LocalGrid([quadratic_app(RTopKMod(0.2), n) for n in range(2)])
    trained = grid.send_and_receive(strategy.configure_train(1, initial(), ConfigRecord(), grid))
    again = reply_fuzzer.copied(trained[0])
    arrays, _ = strategy.aggregate_train(1, trained)
    replies = grid.send_and_receive(strategy.configure_evaluate(1, arrays, ConfigRecord(), grid))
    honest = next(r for r in replies if r.metadata.src_node_id != again.metadata.src_node_id)
    norm = honest.content["metrics"]["norm"]
    assert strategy.aggregate_evaluate(1, [again, honest])["norm"] == norm
    assert [r.node for r in strategy.refusals] == [again.metadata.src_node_id]


def test_fuzzed_replies():
    """`reply_fuzzer.py` says what is made and what must hold."""
    counts = reply_fuzzer.fuzz(400, combinations=reply_fuzzer.COMBINATIONS[::4])
    assert counts["train refused"] > 0.8 * counts["train replies"]
    assert counts["evaluate refused"] > 0.5 * counts["evaluate replies"]


@pytest.mark.slow
def test_a_hundred_thousand_fuzzed_replies():
    counts = reply_fuzzer.fuzz(100_000, seed=1)
    assert counts["train refused"] > 0.8 * counts["train replies"]
