"""Whole replies that a bad client might send: records, names, types, metrics, arrays, headers, messages.

`python tests/flower/reply_fuzzer.py 100000` makes that many bad replies, in training and evaluation, with and
without `each`, in models of float32, float16 and float64, and fails if a round ends or an honest weight
differs from what honest clients alone would give.
"""

import gc
import io
import logging
import random
import struct
import sys
import time
from collections import Counter
from copy import copy

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedTrimmedAvg, Krum, QFedAvg
from harness import LocalGrid, initial, quadratic_app

from rtopk import Codec, SparseVector
from rtopk.flower import RTopKMod, RTopKStrategy

HONEST, BAD = 5, 4
INNERS = [
    (FedAvg, {}, {}),
    (FedAvg, {}, {"each": True}),
    (FedAdam, {}, {}),
    (FedAvgM, {"server_momentum": 0.9}, {}),
    (FedMedian, {}, {}),
    (FedTrimmedAvg, {}, {}),
    (Krum, {"num_malicious_nodes": 1}, {}),
    (QFedAvg, {"client_learning_rate": 0.1, "train_loss_key": "loss"}, {}),
]


def model(kind):
    """Return first arrays: float32, with counters and float64 beside, or float16."""
    arrays = initial(counter=kind == "mixed")
    if kind == "half":
        return ArrayRecord({n: Array(a.numpy().astype(np.float16)) for n, a in arrays.items()})
    return arrays


class Federation:
    """Honest clients, whose replies of two rounds are recorded once, and nodes that send what they like."""

    def __init__(self, inner, options, more, kind):
        self.make = lambda asked=0.0001: RTopKStrategy(  # one message will do: we have the answers of all
            inner(
                fraction_train=asked,
                fraction_evaluate=asked,
                min_train_nodes=1,
                min_evaluate_nodes=1,
                min_available_nodes=1,
                **options,
            ),
            session=7,
            clients={101 + n: str(n) for n in range(HONEST)},
            **more,
        )
        self.kind = kind
        apps = [quadratic_app(RTopKMod(0.2), n) for n in range(HONEST + BAD)]
        strategy, grid = self.make(1.0), LocalGrid(apps)
        arrays = model(kind)
        self.train, self.evaluate = [], []  # per round: node -> reply
        for number in (1, 2):
            replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
            self.train.append({r.metadata.src_node_id: r for r in replies})
            honest = [copied(r) for r in replies if r.metadata.src_node_id < 101 + HONEST]
            arrays, _ = strategy.aggregate_train(number, honest)
            replies = grid.send_and_receive(strategy.configure_evaluate(number, arrays, ConfigRecord(), grid))
            self.evaluate.append({r.metadata.src_node_id: r for r in replies})
        self.grid = grid
        self.weights, self.metrics = [], []
        self.play(lambda *_: None, Counter(), learn=True)

    def play(self, forge, counts, learn=False):
        """Two rounds in which bad nodes send what `forge` makes of their honest replies.

        A lie within the bounds may be taken; then the others' next replies are of another model, and we stop.
        """
        strategy, arrays = self.make(), model(self.kind)
        for number in (1, 2):
            for phase, recorded in (("train", self.train), ("evaluate", self.evaluate)):
                getattr(strategy, f"configure_{phase}")(number, arrays, ConfigRecord(), self.grid)
                nodes = sorted(recorded[number - 1])
                replies = [copied(recorded[number - 1][node]) for node in nodes[:HONEST]]
                bad = [forge(copied(recorded[number - 1][node]), strategy, self) for node in nodes[HONEST:]]
                replies += [reply for reply in bad if reply is not None]
                random.Random(number).shuffle(replies)
                refused = len(strategy.refusals)
                result = getattr(strategy, f"aggregate_{phase}")(number, replies)
                refused = len(strategy.refusals) - refused
                counts[f"{phase} replies"] += len(replies) - HONEST
                counts[f"{phase} refused"] += refused
                if learn:
                    (self.weights if phase == "train" else self.metrics).append(result)
                if phase == "train":
                    arrays = result[0]
                    assert arrays is not None, strategy.refusals
                    assert all(np.isfinite(a.numpy()).all() for a in arrays.values()), strategy.refusals
                    if refused < len(replies) - HONEST:
                        counts["lies within the bounds"] += 1
                        return
                    expected, metrics = self.weights[number - 1]
                    assert {n: a.data for n, a in arrays.items()} == {n: a.data for n, a in expected.items()}
                    assert result[1] == metrics
                elif refused == len(replies) - HONEST:
                    assert result == self.metrics[number - 1]
                else:
                    assert result is not None


def copied(message):
    fresh = copy(message)
    if message.has_content():
        fresh.content = RecordDict({name: record.copy() for name, record in message.content.items()})
    return fresh


# -- what a bad client may change: each takes (rng, reply, strategy, federation) and changes or returns the reply

NUMBERS = [
    0,
    -1,
    1,
    2**60,
    2**63 - 1,
    -(2**63),
    float("nan"),
    float("inf"),
    -float("inf"),
    1e308,
    -1e308,
    5e-324,
    -0.0,
]
VALUES = [*NUMBERS, [], [0.0], [1, 2], [float("nan")], [1.5] * 1000]
TEXTS = [
    "",
    "0",
    "arrays",
    "metrics",
    "rtopk",
    "config",
    "\x1b[31m",
    "ü" * 50,
    "x" * 100_000,
    "../../etc",
    "\u202e",
]


def odd_metrics(rng, reply, strategy, federation):
    name = next(iter(reply.content.metric_records))
    key = rng.choice(["num-examples", "loss", "norm", "new", "\x1b]0;"])
    record = dict(reply.content[name])
    if rng.random() < 0.2:
        record.pop(key, None)
    else:
        record[key] = rng.choice(VALUES)
    if rng.random() < 0.1:
        record = {}
    reply.content[name] = MetricRecord(record)


def odd_records(rng, reply, strategy, federation):
    content = dict(reply.content)
    action, name = rng.choice(["rename", "drop", "add", "swap", "copy"]), rng.choice(list(content))
    record = content[name]
    if action == "rename":
        del content[name]
        content[rng.choice(TEXTS)] = record
    elif action == "drop":
        del content[name]
    elif action == "add":
        kind = rng.choice([ArrayRecord, MetricRecord, ConfigRecord])
        content[f"more{rng.choice(TEXTS)}"] = kind()
    elif action == "swap":
        content[name] = rng.choice(
            [ArrayRecord(), MetricRecord({"num-examples": 10}), ConfigRecord({"a": b""})]
        )
    else:
        content[name + "2"] = record
    reply.content = RecordDict(content)


def odd_header(rng, reply, strategy, federation):
    header = dict(reply.content["rtopk"])
    key = rng.choice(["client", "session", "round", "digest", "need", "other"])
    values = [0, -1, 2**62, 1.5, True, b"", b"0" * 16, [], [1], ["a"], *TEXTS, str(rng.randrange(5)), 7]
    header[key] = rng.choice(values)
    if rng.random() < 0.2:
        del header[key]
    reply.content["rtopk"] = ConfigRecord(header)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def odd_array(rng, reply, strategy, federation):
    """Change one array: its type, shape, kind or bytes."""
    if not reply.content.array_records:
        return
    name, record = next(iter(reply.content.array_records.items()))
    key = rng.choice(list(record))
    array = record[key]
    data = bytearray(array.data)
    for _ in range(rng.randrange(4)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.3:
        data = data[: rng.randrange(len(data) + 1)] + bytes(rng.choice([0, 0, 1, 5000]))
    if rng.random() < 0.2:
        kind = rng.choice([np.float32, np.float64, np.int64, np.float16, np.bool_, np.complex128])
        data = npy(np.ones(rng.choice([0, 1, 3, 280]), kind))
    changed = Array(
        dtype=rng.choice([array.dtype] * 4 + ["float32", "object", "O", "", "<U9", "void"]),
        shape=rng.choice([tuple(array.shape)] * 4 + [(), (0,), (2**40,), (3, -1)]),
        stype=rng.choice([array.stype] * 4 + ["numpy.ndarray", "rtopk.v1", "pickle", ""]),
        data=bytes(data),
    )
    arrays = dict(record)
    arrays[key] = changed
    if rng.random() < 0.2:
        arrays[rng.choice(["rtopk.0", "rtopk.1", "rtopk.", "w", *TEXTS])] = arrays.pop(key)
    if rng.random() < 0.1:
        arrays["more"] = changed
    reply.content[name] = ArrayRecord(arrays)


def odd_values(rng, reply, strategy, federation):
    """A payload that is well formed, of values and positions that no honest client sends."""
    if not reply.content.array_records:
        return
    name, record = next(iter(reply.content.array_records.items()))
    layout = strategy.model.layout
    size = layout.size if rng.random() < 0.9 else rng.choice([1, layout.size + 1])
    k = rng.randrange(size + 1)
    draw = torch.Generator().manual_seed(rng.randrange(2**31))
    indices = torch.randperm(size, generator=draw)[:k].sort().values
    scale = rng.choice([1e5, 7e4, 1e8, 1e19, 3e38, 1e30])
    values = torch.full((k,), scale) * torch.randn(k, generator=draw).sign()
    fingerprint = layout.fingerprint if rng.random() < 0.9 else 5
    codec = Codec(rng.choice(["fp32", "bf16", "4bit"]), fingerprint=fingerprint)
    try:
        payload = codec.encode(SparseVector(indices, values, size)).numpy().tobytes()
    except ValueError:
        payload = b""
    if rng.random() < 0.2:  # NaN and Inf, with the checksum wrong
        payload = payload[:-4] + struct.pack("<f", rng.choice([float("nan"), float("inf")]))
    arrays = dict(record)
    arrays["rtopk.0"] = Array(dtype="uint8", shape=(len(payload),), stype="rtopk.v1", data=payload)
    for raw in strategy.model.raw:
        if rng.random() < 0.5 and raw == "wide":
            arrays[raw] = Array(np.array([1.7e308, rng.choice([-1.7e308, 1e200, np.nan, 0.0]), 1e30]))
    reply.content[name] = ArrayRecord(arrays)


def odd_message(rng, reply, strategy, federation):
    """An error, nothing at all, another phase's or round's reply, or another client's."""
    choice = rng.randrange(5)
    if choice == 0:
        reply.__dict__["_content"] = None
        reply.__dict__["_error"] = Error(2, rng.choice(TEXTS))
    elif choice == 1:
        reply.content = RecordDict()
    else:
        others = rng.choice([*federation.train, *federation.evaluate])
        other = others[rng.choice(sorted(others))]
        reply.content = copied(other).content


CHANGES = [odd_metrics, odd_records, odd_header, odd_array, odd_values, odd_message]


def forger(rng):
    def forge(reply, strategy, federation):
        if rng.random() < 0.05:
            return None
        for change in rng.sample(CHANGES, rng.choice([1, 1, 1, 2, 3])):
            try:
                change(rng, reply, strategy, federation)
            except (KeyError, IndexError, ValueError, TypeError, StopIteration):
                continue  # an earlier change took what this one needs, or Flower cannot even write it
        return reply

    return forge


COMBINATIONS = [
    (*inner, kind)
    for inner in INNERS
    for kind in ("plain", "mixed", "half")
    if (inner[0], kind) != (QFedAvg, "mixed")  # QFedAvg knows no integers
]


def fuzz(count, seed=0, combinations=COMBINATIONS):
    """Send at least `count` bad replies; return how many of what."""
    loggers = [logging.getLogger(name) for name in ("flwr", "rtopk.flower")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        federations = [Federation(*combination) for combination in combinations]
        gc.freeze()  # QFedAvg collects garbage for every client
        rng, counts = random.Random(seed), Counter()
        while counts["train replies"] + counts["evaluate replies"] < count:
            for federation in federations:
                federation.play(forger(rng), counts)
                counts["plays"] += 1
        return counts
    finally:
        gc.unfreeze()
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


if __name__ == "__main__":
    torch.set_num_threads(1)
    started = time.monotonic()
    print(dict(fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
    print(f"{time.monotonic() - started:.0f} s")
