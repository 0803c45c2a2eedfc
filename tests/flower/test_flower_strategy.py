"""Mod and strategy together, through Flower's own apps and messages, on a grid that misbehaves."""

import io
import logging
import re

import harness
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedMedian
from harness import LocalGrid, initial, quadratic_app

from rtopk import Codec, MomentumCorrection, NoMemory, RandomK, SparseVector, TopK, average
from rtopk.aggregate import RunningMean
from rtopk.flower import RTopKMod, RTopKStrategy
from rtopk.flower.intake import Intake
from rtopk.flower.store import FileStore
from rtopk.local.outer import Nesterov
from rtopk.state_file import digest_bits

ROUNDS = 8


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("flwr").setLevel(logging.ERROR)


def federation(tmp_path, *, clients=3, deliver=None, logs=None, fail=lambda r: False, mod=None, **options):
    logs = [[] for _ in range(clients)] if logs is None else logs
    mod = {"density": 0.1, "store": tmp_path / "clients", **(mod or {})}
    apps = [
        quadratic_app(RTopKMod(**mod), n, logs[n], fail if n == 0 else (lambda r: False))
        for n in range(clients)
    ]
    inner = options.pop("inner", None) or FedAvg(min_train_nodes=1, min_available_nodes=1)
    strategy = RTopKStrategy(inner, **options)
    return strategy, LocalGrid(apps, deliver=deliver), logs


def client_states(tmp_path, strategy, clients=3):
    fingerprint = strategy.model.layout.fingerprint
    return [FileStore(tmp_path / "clients", str(n), fingerprint).load() for n in range(clients)]


def check_mass(tmp_path, strategy, logs, start, result):
    """What all clients moved = what the model moved (times n) + residuals + payloads not accepted."""
    layout, n = strategy.model.layout, len(logs)
    begin, _ = strategy.model.flatten(start)
    end, _ = strategy.model.flatten(result)
    moved = torch.zeros(layout.size, dtype=torch.float64)
    for log in logs:
        for _, update in log:
            moved += layout.flatten({k: v for k, v in update.items() if k in layout.names}).double()
    kept = torch.zeros_like(moved)
    for number, state in enumerate(client_states(tmp_path, strategy, n)):
        transaction = state["transaction"]
        kept += transaction["sparsifier"]["memory"]["residual"].double()
        pending = transaction["pending"]
        if pending and pending["round"] != strategy.intake.accepted.get(str(number)):
            codec = Codec(fingerprint=layout.fingerprint)
            kept += codec.decode(pending["payload"]).to_dense().double()
    return moved, (begin - end).double(), kept


def test_nothing_is_lost_when_all_goes_well(tmp_path):
    strategy, grid, logs = federation(tmp_path)
    start = initial()
    result = strategy.start(grid, start, num_rounds=ROUNDS)
    moved, applied, kept = check_mass(tmp_path, strategy, logs, start, result.arrays)
    assert torch.allclose(3 * applied + kept, moved, atol=1e-4)
    assert not strategy.refusals
    assert float(kept.norm()) > 0.1  # there was something to lose


def faulty(kind):
    """Client 0 has bad luck in rounds 2, 3 and 6; `sizes` records how many were averaged."""

    def deliver(grid, message):
        train = message.metadata.message_type == "train"
        round_ = message.content["rtopk"]["round"] + 1
        if not (train and message.metadata.dst_node_id == 101 and round_ in (2, 3, 6)):
            return [grid.call(message)]
        if kind == "reply lost":
            grid.call(message)
            return []
        if kind == "message lost":
            return []
        if kind == "message twice":
            return [grid.call(message), grid.call(message)]
        if kind == "old message again":
            reply = grid.call(message)
            old = next(m for m in grid.sent if m.metadata.dst_node_id == 101)
            return [reply, grid.call(old)]
        raise AssertionError(kind)

    return deliver


def balance(tmp_path, monkeypatch, deliver=None, **options):
    """Run, and return for client 0: what came in, what was accepted of it, what it keeps."""
    accepted = torch.zeros(0)
    commit = Intake.commit

    def spy(self, taken, round_):
        nonlocal accepted
        for offer in taken:
            if offer.client == "0":
                vector = self.decode(offer).to_dense().double()
                accepted = vector if not accepted.numel() else accepted + vector
        commit(self, taken, round_)

    monkeypatch.setattr(Intake, "commit", spy)
    strategy, grid, logs = federation(tmp_path, deliver=deliver, **options)
    strategy.start(grid, initial(), num_rounds=ROUNDS)
    layout = strategy.model.layout
    came_in = sum(layout.flatten(update).double() for _, update in logs[0])
    transaction = client_states(tmp_path, strategy)[0]["transaction"]
    kept = transaction["sparsifier"]["memory"]["residual"].double()
    pending = transaction["pending"]
    if pending and pending["round"] != strategy.intake.accepted.get("0"):
        kept = kept + Codec(fingerprint=layout.fingerprint).decode(pending["payload"]).to_dense().double()
    return came_in, accepted, kept, strategy


@pytest.mark.parametrize("kind", ["reply lost", "message lost", "message twice", "old message again"])
def test_bad_luck_on_the_way(tmp_path, monkeypatch, kind):
    """Client 0's books balance: what came in = what was accepted of it + what it keeps."""
    came_in, accepted, kept, strategy = balance(tmp_path, monkeypatch, faulty(kind))
    assert torch.allclose(accepted + kept, came_in, atol=1e-5)
    reasons = " ".join(refusal.reason for refusal in strategy.refusals)
    if kind == "message twice":
        assert "came already" in reasons
    if kind == "old message again":
        assert "StaleMessageError" in reasons


def test_exception_after_the_change(tmp_path, monkeypatch):
    """A mod outside ours fails after our state was saved: the context may roll back, the file does not."""

    class Fails:
        def __call__(self, message, context, call_next):
            reply = call_next(message, context)
            if message.content["rtopk"]["round"] == 3 and context.node_config["partition-id"] == 0:
                raise RuntimeError("after the change")
            return reply

    real = harness.ClientApp
    monkeypatch.setattr(harness, "ClientApp", lambda mods: real(mods=[Fails(), *mods]))
    came_in, accepted, kept, strategy = balance(tmp_path, monkeypatch)
    assert torch.allclose(accepted + kept, came_in, atol=1e-5)
    assert [r.client for r in strategy.refusals] == ["0", "0"]  # in training and in evaluation


def test_a_failed_training_changes_nothing(tmp_path, monkeypatch):
    came_in, accepted, kept, strategy = balance(tmp_path, monkeypatch, fail=lambda r: r in (3, 4))
    assert torch.allclose(accepted + kept, came_in, atol=1e-5)
    assert len(strategy.refusals) == 2


def test_a_client_away_comes_back_by_a_chain_or_a_snapshot(tmp_path, monkeypatch):
    def deliver(grid, message):
        away = message.metadata.dst_node_id == 101 and 1 < message.content["rtopk"]["round"] + 1 < 6
        return [] if away else [grid.call(message)]

    came_in, accepted, kept, strategy = balance(tmp_path, monkeypatch, deliver)
    assert torch.allclose(accepted + kept, came_in, atol=1e-5)
    assert strategy.intake.accepted["0"] == ROUNDS - 1


def test_a_new_node_id_finds_its_residual(tmp_path, monkeypatch):
    """A SuperNode that restarts has a new node id and an empty context; its client id brings all back."""

    def deliver(grid, message):
        if (
            message.content["rtopk"]["round"] == 4
            and 101 in grid.apps
            and message.metadata.dst_node_id == 101
        ):
            reply = grid.call(message)
            grid.apps[201], grid.contexts[201] = grid.apps.pop(101), grid.contexts.pop(101)
            grid.contexts[201].node_id, grid.contexts[201].state = 201, RecordDict()
            return [reply] if grid.answer else []
        return [grid.call(message)]

    for answer in (True, False):  # the reply before the restart arrived, or not
        LocalGrid.answer = answer
        came_in, accepted, kept, _ = balance(tmp_path / str(answer), monkeypatch, deliver)
        assert torch.allclose(accepted + kept, came_in, atol=1e-5)
        monkeypatch.undo()


def test_server_and_clients_hold_the_same_bits(tmp_path):
    for options in ({}, {"downlink_density": 0.05, "downlink_values": "fp16", "anchor_every": 3}):
        path = tmp_path / str(len(options))
        strategy, grid, _ = federation(path, **options)
        result = strategy.start(grid, initial(), num_rounds=ROUNDS)
        returned, _ = strategy.model.flatten(result.arrays)
        assert digest_bits(returned) == strategy.versions.digest
        for state in client_states(path, strategy):
            assert digest_bits(state["vector"]) == strategy.versions.digest  # the last evaluation brought it
        assert strategy.ledger.rounds[2].snapshots == 0


def test_a_first_model_that_clients_make_is_not_sent(tmp_path):
    """The digest in the message proves that client and server mean the same bits."""
    strategy, grid, _ = federation(
        tmp_path, initial_known=True, mod={"initial": lambda context: initial(True)}
    )
    strategy.start(grid, initial(True), num_rounds=3)
    assert sum(entry.snapshots for entry in strategy.ledger.rounds.values()) == 0
    assert not strategy.refusals


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"memory": NoMemory}, {"selector": RandomK()}])
def test_a_new_training_starts_over_with_the_files_of_an_old_one(tmp_path, options):
    """Its options may differ, and its first model is the one that clients make."""
    results = []
    for store, rounds in (("new", 3), ("used", 1), ("used", 3)):
        mod = {"initial": lambda context: initial(), "store": tmp_path / store}
        strategy, grid, _ = federation(
            tmp_path, initial_known=True, mod=mod if rounds == 1 else mod | options
        )
        results.append(strategy.start(grid, initial(), num_rounds=rounds).arrays)
        assert not strategy.refusals
        assert sum(entry.snapshots for entry in strategy.ledger.rounds.values()) == 0
    for name in ("w", "b"):
        assert results[2][name].data == results[0][name].data


@pytest.mark.parametrize(
    "mine", [None, lambda context: ArrayRecord({"w": Array(np.ones((9, 3), np.float32))}), "seed"]
)
def test_a_first_model_that_clients_do_not_have_is_sent(tmp_path, mine):
    """Clients that make none, one of another form, or one of another seed, ask for it in the first round."""
    if mine == "seed":
        other = initial().to_torch_state_dict()
        other["w"] += 1e-6
        mine = lambda context: ArrayRecord.from_torch_state_dict(other)  # noqa: E731
    strategy, grid, _ = federation(tmp_path, initial_known=True, mod={"initial": mine})
    strategy.start(grid, initial(), num_rounds=3)
    asked = [r for r in strategy.refusals if "asks for a snapshot" in r.reason]
    assert [r.round for r in asked] == [1, 1, 1]
    assert len(strategy.refusals) == 3
    assert set(strategy.intake.accepted.values()) == {2}
    for state in client_states(tmp_path, strategy):
        assert digest_bits(state["vector"]) == strategy.versions.digest


def test_a_damaged_client_model_asks_for_a_snapshot(tmp_path):
    def deliver(grid, message):
        if message.metadata.dst_node_id == 101 and message.content["rtopk"]["round"] == 3:
            for path in (tmp_path / "clients").glob("*.state"):
                path.write_bytes(b"damaged")
        return [grid.call(message)]

    strategy, grid, _ = federation(tmp_path, deliver=deliver)
    strategy.start(grid, initial(), num_rounds=ROUNDS)
    assert any("asks for a snapshot" in r.reason for r in strategy.refusals)
    assert strategy.intake.accepted["0"] == ROUNDS - 1


@pytest.mark.parametrize("values", ["fp32", "4bit"])
@pytest.mark.parametrize("selector", [None, TopK(), RandomK()])
@pytest.mark.parametrize("mean", ["nodes", "received"])
def test_every_selector_and_mean_learns(tmp_path, selector, mean, values):
    strategy, grid, _ = federation(
        tmp_path, mean=mean, max_density=0.1, mod={"selector": selector, "values": values}
    )
    result = strategy.start(grid, initial(), num_rounds=ROUNDS)
    losses = [result.train_metrics_clientapp[n]["loss"] for n in (1, ROUNDS)]
    assert losses[1] != losses[0]
    assert not strategy.refusals


@pytest.mark.parametrize("memory", [NoMemory, MomentumCorrection])
def test_other_memories(tmp_path, memory):
    strategy, grid, _ = federation(tmp_path, mod={"memory": memory})
    strategy.start(grid, initial(), num_rounds=3)
    assert not strategy.refusals


def test_density_one_is_fedavg(tmp_path):
    """Nothing dropped, weighted by examples: the model of stock FedAvg, up to rounding."""
    strategy, grid, _ = federation(tmp_path, mod={"density": 1.0})
    ours = strategy.start(grid, initial(True), num_rounds=3)
    plain = LocalGrid([quadratic_app(lambda m, c, n: n(m, c), k) for k in range(3)])
    theirs = FedAvg().start(plain, initial(True), num_rounds=3)
    for name in ("w", "b", "wide"):
        np.testing.assert_allclose(
            ours.arrays[name].numpy(), theirs.arrays[name].numpy(), rtol=1e-4, atol=1e-5
        )
    assert ours.arrays["wide"].dtype == "float64"
    assert ours.arrays["count"].numpy() == 8  # 5 + 3 rounds
    assert ours.arrays["count"].dtype == "int64"  # FedAvg makes a float of it


@pytest.mark.parametrize(("weighted", "expected"), [(True, 3.0), (False, 2.0)])
def test_arrays_that_go_whole_are_weighted_like_the_rest(tmp_path, weighted, expected):
    strategy, mine, others = first_round(tmp_path, initial(True), clients=2, weighted=weighted)
    for message, value, examples in ((mine, 0.0, 10), (others[0], 4.0, 30)):
        record = message.content["arrays"]
        message.content["arrays"] = ArrayRecord({**dict(record), "wide": Array(np.full(3, value))})
        message.content["metrics"]["num-examples"] = examples
    arrays, _ = strategy.aggregate_train(1, [mine, *others])
    np.testing.assert_allclose(arrays["wide"].numpy(), expected)


@pytest.mark.parametrize("inner", [FedAdam, FedMedian])
def test_other_inner_strategies(tmp_path, inner):
    made = inner(min_train_nodes=1, min_available_nodes=1)
    strategy, grid, _ = federation(
        tmp_path, inner=made, each=inner is FedMedian, mod={"density": 1.0}, downlink_values="bf16"
    )
    ours = strategy.start(grid, initial(), num_rounds=2)
    plain = LocalGrid([quadratic_app(lambda m, c, n: n(m, c), k) for k in range(3)])
    theirs = inner().start(plain, initial(), num_rounds=2)
    for name in ("w", "b"):
        np.testing.assert_allclose(
            ours.arrays[name].numpy(), theirs.arrays[name].numpy(), rtol=0.02, atol=0.02
        )


def test_stock_fedavg_fails_loudly_on_our_bytes(tmp_path):
    """A compressed reply that reaches a strategy that does not know it is an error, not an average of bytes."""
    strategy, grid, _ = federation(tmp_path)
    messages = strategy.configure_train(1, initial(), ConfigRecord(), grid)
    replies = grid.send_and_receive(messages)
    with pytest.raises(Exception, match=r"[Uu]nsupported|numpy"):
        FedAvg().aggregate_train(1, replies)


def test_nesterov_and_restart_of_the_server(tmp_path):
    """A server that saves, ends and goes on reaches the same bits as one that never stopped."""
    one, grid, _ = federation(tmp_path / "one", outer=Nesterov())
    whole = one.start(grid, initial(), num_rounds=4).arrays
    first, grid, _ = federation(tmp_path / "two", outer=Nesterov())
    middle = first.start(grid, initial(), num_rounds=2).arrays
    second = RTopKStrategy(FedAvg(min_train_nodes=1, min_available_nodes=1), outer=Nesterov())
    second.load_state_dict(first.state_dict())
    arrays = middle
    for number in (3, 4):  # a restarted server goes on counting rounds
        config = ConfigRecord()
        replies = grid.send_and_receive(second.configure_train(number, arrays, config, grid))
        arrays, _ = second.aggregate_train(number, replies)
    assert not second.refusals
    for name in ("w", "b"):
        assert arrays[name].data == whole[name].data


def bad_replies(reply, strategy):
    """Name every bad reply a client can make out of its good one."""
    header, record = reply.content["rtopk"], reply.content["arrays"]
    payload = record["rtopk.0"].data
    size, fingerprint = strategy.model.layout.size, strategy.model.layout.fingerprint

    def change(payload=payload, metrics=None, stype="rtopk.v1", **changes):
        array = Array(dtype="uint8", shape=(len(payload),), stype=stype, data=payload)
        return RecordDict(
            {
                "arrays": ArrayRecord({"rtopk.0": array}),
                "metrics": MetricRecord(metrics or dict(reply.content["metrics"])),
                "rtopk": ConfigRecord({**dict(header), **changes}),
            }
        )

    def encoded(values, at=None, d=size, print_=fingerprint):
        indices = torch.arange(len(values)) if at is None else at
        vector = SparseVector(indices, torch.tensor(values), d)
        return Codec(fingerprint=print_).encode(vector).numpy().tobytes()

    nan = bytearray(encoded([1.0, 2.0]))
    huge = encoded([1e30, 1e30])
    return {
        "garbage": change(payload=b"\x00\xff" * 50),
        "empty": change(payload=b""),
        "truncated": change(payload=payload[:-3]),
        "one bit flipped": change(payload=bytes([*payload[:60], payload[60] ^ 1, *payload[61:]])),
        "oversized": change(payload=payload + bytes(2_000_000)),
        "too many entries": change(payload=encoded([1.0] * size)),
        "another model's size": change(payload=encoded([1.0], d=size + 1)),
        "another model": change(payload=encoded([1.0], print_=123)),
        "not finite": change(payload=bytes(nan[:40]) + b"\x00\x00\xc0\x7f" + bytes(nan[44:])),
        "absurd norm": change(payload=huge),
        "stale round": change(round=header["round"] - 1),
        "future round": change(round=header["round"] + 1),
        "other session": change(session=1),
        "other base": change(digest=b"0" * 16),
        "no client": change(client=""),
        "long client": change(client="x" * 1000),
        "client not text": change(client=7),
        "wrong stype": change(stype="numpy.ndarray"),
        "negative weight": change(metrics={"num-examples": -5, "loss": 1.0}),
        "nan weight": change(metrics={"num-examples": float("nan"), "loss": 1.0}),
        "infinite weight": change(metrics={"num-examples": float("inf"), "loss": 1.0}),
        "odd metrics": change(metrics={"num-examples": 10, "other": 1.0}),
        "no records": RecordDict(),
    }


def first_round(path, model=None, **options):
    """Return a strategy in its first round, the reply of client 0 and the others'."""
    strategy, grid, _ = federation(path, **options)
    replies = grid.send_and_receive(strategy.configure_train(1, model or initial(), ConfigRecord(), grid))
    mine = next(r for r in replies if r.metadata.src_node_id == 101)
    return strategy, mine, [r for r in replies if r is not mine]


def test_bad_clients_cannot_hurt(tmp_path):
    """With each bad reply of client 0 the round ends as if only clients 1 and 2 had answered."""
    strategy, mine, others = first_round(tmp_path / "good")
    names = list(bad_replies(mine, strategy))
    expected, _ = strategy.aggregate_train(1, others)
    for name in names:
        strategy, mine, others = first_round(tmp_path / name, max_density=0.1)
        mine.content = bad_replies(mine, strategy)[name]
        arrays, _ = strategy.aggregate_train(1, [mine, *others])
        assert [refusal.node for refusal in strategy.refusals] == [101], name
        if name == "odd metrics":
            assert strategy.refusals[0].client == "0"
        for key in ("w", "b"):
            assert arrays[key].data == expected[key].data, name
        assert "0" not in strategy.intake.accepted


def npy(array, shape):
    """Write an array as Flower does, with another shape in numpy's own header."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"shape": shape, "fortran_order": False, "descr": array.dtype.str}
    )
    return file.getvalue() + array.tobytes()


@pytest.mark.parametrize(
    ("shape", "dtype", "data", "reason"),
    [
        ((3,), "float64", npy(np.zeros(3), (10**12,)), "the bytes of its array wide"),  # 8 TB if believed
        ((10**12,), "float64", npy(np.zeros(3), (10**12,)), "got float64 of shape"),
        ((3,), "float32", npy(np.zeros(3, np.float32), (3,)), "got float32"),
        ((3,), "float64", npy(np.array([1.0, np.nan, 0.0]), (3,)), "NaN or Inf"),
        ((3,), "float64", npy(np.zeros(30_000), (3,)), "the bytes of its array wide"),
        ((3,), "float64", b"garbage", "magic"),
        ((3,), "float64", npy(np.zeros(2), (3,)), "wide|reshape|read"),
    ],
)
def test_raw_arrays_are_not_believed(tmp_path, shape, dtype, data, reason):
    strategy, mine, others = first_round(tmp_path, initial(True))
    record = mine.content["arrays"]
    bad = Array(dtype=dtype, shape=shape, stype="numpy.ndarray", data=data)
    mine.content["arrays"] = ArrayRecord({**dict(record), "wide": bad})
    arrays, _ = strategy.aggregate_train(1, [mine, *others])
    assert arrays is not None
    assert [refusal.node for refusal in strategy.refusals] == [101]
    assert re.search(reason, strategy.refusals[0].reason)


def test_a_replayed_payload_is_refused(tmp_path):
    strategy, grid, _ = federation(tmp_path)
    config = ConfigRecord()
    replies = grid.send_and_receive(strategy.configure_train(1, initial(), config, grid))
    old = RecordDict(dict(replies[0].content))
    arrays, _ = strategy.aggregate_train(1, replies)
    replies = grid.send_and_receive(strategy.configure_train(2, arrays, config, grid))
    replies[0].content = old
    strategy.aggregate_train(2, replies)
    assert [r.reason for r in strategy.refusals] == ["it is of round 0, this is round 1"]
    before = strategy.versions.digest
    assert strategy.aggregate_train(2, replies) == (None, None)  # the round is closed
    assert strategy.versions.digest == before


@pytest.mark.parametrize(
    "option",
    [{"mean": "received "}, {"max_density": 2.0}, {"max_norm": -1.0}, {"outlier": 0.5}, {"max_weight": 0.0},
     {"downlink_density": 0.0}, {"downlink_values": "fp8"}, {"anchor_every": -1}, {"history": 0}],
)  # fmt: skip
def test_wrong_options_are_refused_before_a_round_is_trained(option):
    with pytest.raises(ValueError, match=next(iter(option)).removeprefix("downlink_")):
        RTopKStrategy(FedAvg(), **option)


@pytest.mark.parametrize(
    "option", [{"density": 5.0}, {"density": "1 %"}, {"values": "fp8"}, {"rounding": "up"}]
)
def test_wrong_options_of_a_client_are_refused_too(option):
    """At every message it would be a run that ends well and learns nothing."""
    with pytest.raises(ValueError, match=next(iter(option))):
        RTopKMod(**option)


def test_norm_bound(tmp_path):
    strategy, grid, _ = federation(tmp_path, max_norm=1e-6)
    strategy.start(grid, initial(), num_rounds=1)
    assert all("above the limit" in r.reason for r in strategy.refusals)
    assert len(strategy.refusals) == 3


def test_weights_are_the_examples():
    """The mean is that of `average`, in client order."""
    a = SparseVector(torch.tensor([0]), torch.tensor([2.0]), 3)
    b = SparseVector(torch.tensor([0, 2]), torch.tensor([4.0, 1.0]), 3)
    running = RunningMean(3, "nodes", True)
    running.add(a, 1.0)
    running.add(b, 3.0)
    assert torch.equal(running.result(), average([a, b], weights=[1.0, 3.0]))
