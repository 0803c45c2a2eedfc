"""The server side: a wrapper around any strategy that works on arrays.

The inner strategy samples clients, configures messages and aggregates as usual. This one replaces the model in
each message by what its client needs (see `downlink`), checks the payloads that come back (see `intake`), and
passes the inner strategy the average client, or every client's weights if it needs them (see `aggregation`).
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from rtopk.aggregate import Mean
from rtopk.flower import inner as flowers
from rtopk.flower.aggregation import Aggregation, without_failing
from rtopk.flower.downlink import Versions
from rtopk.flower.intake import Intake, Offer, RefusedError
from rtopk.flower.records import ByteLedger, Model
from rtopk.flower.replies import WEIGHT_LIMIT, Expected, ReplyCheck, read_offer, weight_of
from rtopk.flower.roster import Rebind, Roster, Sender
from rtopk.layout import DenseRule, one_dimensional
from rtopk.local.outer import SGD, Outer, State

log = logging.getLogger("rtopk.flower")
LEAP = 2**32  # of the clock at a restart: more than the messages a server can send after saving


class RTopKStrategy(Strategy):
    """Compress both ways around an inner strategy.

    Up: `mean` is the rule of the average; `weighted` weighs clients by their examples. `each` passes every client's
    weights to the inner strategy, at the cost of one dense model per client; None does so if it needs them.
    `max_density`, `max_norm`, `max_weight` and `outlier` bound what a client may send; weights are capped at
    `weight_ratio` times the median of the round. A client id belongs to the node that `clients` (node id ->
    client id) names, or else to the first node that uses it; `rebind` says when it may move (see `roster`).
    Down: `downlink_density` 1 with `downlink_values` fp32 sends every changed entry exactly; less sends an
    approximation and keeps the rest for later rounds. Every `anchor_every` versions clients get the whole model.
    `outer` acts on the averaged update before the inner strategy. `initial_known` says that clients create the
    first model themselves. `on_round` is called after each training round with its number and this strategy.
    """

    def __init__(
        self,
        inner: Strategy,
        *,
        mean: Mean = "nodes",
        weighted: bool = True,
        each: bool | None = None,
        dense: DenseRule = one_dimensional,
        outer: Outer | None = None,
        max_density: float = 1.0,
        max_norm: float | None = None,
        max_weight: float = WEIGHT_LIMIT,
        weight_ratio: float = 10.0,
        outlier: float = 1000.0,
        rebind: Rebind = "gone",
        clients: Mapping[int, str] | None = None,
        downlink_density: float = 1.0,
        downlink_values: str = "fp32",
        anchor_every: int = 0,
        history: int = 16,
        initial_known: bool = False,
        session: int | None = None,
        on_round: Callable[[int, "RTopKStrategy"], None] = lambda number, strategy: None,
    ) -> None:
        self.each = flowers.choose_each(inner, each)
        if self.each and mean != "nodes":
            raise ValueError(
                f"{type(inner).__name__} gets every client's weights and averages itself: "
                f"mean must be 'nodes', got {mean!r}; each=False averages here, if that will do for it"
            )
        self.inner = inner
        self.dense = dense
        self.outer: Outer = SGD() if outer is None else outer
        self.session = time.time_ns() if session is None else session
        self.on_round = on_round
        self.ledger = ByteLedger()
        self.clock = 0
        self.last_round = 0  # the last round of training, over all starts
        self._intake_options: dict[str, Any] = {
            "mean": mean, "weighted": weighted, "max_density": max_density, "max_norm": max_norm,
            "outlier": outlier,
        }  # fmt: skip
        self._downlink_options: dict[str, Any] = {
            "density": downlink_density, "values": downlink_values, "anchor_every": anchor_every,
            "history": history,
        }  # fmt: skip
        Versions(torch.zeros(1), **self._downlink_options)  # raise now, not in the first round
        Intake(1, 0, **self._intake_options)
        self._outer_state: State = {}
        self.roster = Roster(initial_known, rebind, clients)
        self.replies = ReplyCheck(self.roster, self.ledger, max_weight, weight_ratio)
        self.refusals = self.replies.refusals
        self._raw: Mapping[str, Array] = {}
        self._open: int | None = None  # the round whose replies may still be accepted
        self._before = 0  # rounds of earlier starts
        self._connected: Callable[[], list[int]] = list
        self._returned: ArrayRecord | None = None
        self._restored: Mapping[str, Any] | None = None

    def summary(self) -> None:
        """Log the settings, then those of the inner strategy."""
        log.info("rtopk: up %s, down %s", self._intake_options, self._downlink_options)
        self.inner.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose, then compress what it sends."""
        wished = self._begin(arrays)
        if self._before + server_round <= self.last_round:  # Flower's start counts from 1 again
            self._before = self.last_round
        number = self.last_round = self._before + server_round
        messages = self._encode(number, self.inner.configure_train(number, wished, config, grid), grid)
        self._open = number
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose, then compress what it sends."""
        self._begin(arrays)
        self._open = None  # this message tells clients what was accepted, so nothing may be accepted later
        model, number = self.model.record(self.versions.model, self._raw), self._before + server_round
        return self._encode(number, self.inner.configure_evaluate(number, model, config, grid), grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check, average, let the inner strategy step; only then accept the payloads."""
        number = self._before + server_round
        good = self._usable(number, replies, training=True)
        self._open = None
        key = self._weight_key
        offers = {
            replace(offer, weight=weight_of(message.content, key)): message
            for message, offer in good.items()
            if offer is not None
        }
        aggregation = Aggregation(
            number, self.inner, self.model, self.intake, self.versions.target, self.outer, self._outer_state,
            key, offers,
        )  # fmt: skip

        def refuse(offer: Offer, reason: str) -> None:
            self.replies.refuse(number, offer.node, reason)

        outcome = aggregation.each(refuse) if self.each else aggregation.mean(refuse)
        arrays = None
        if outcome is not None and outcome.target is not None:
            self.versions.advance(outcome.target)
            self._outer_state, self._raw = outcome.outer_state, outcome.raw
            self.intake.commit(outcome.taken, number - 1)
            self.roster.named(self.versions.digest, self.versions.version)
            arrays = self._returned = self.model.record(self.versions.model, self._raw)
        self.on_round(number, self)
        return arrays, None if outcome is None else outcome.metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pass on the replies without our header."""
        number = self._before + server_round
        good = self._usable(number, replies, training=False)
        return without_failing(
            lambda chosen: self.inner.aggregate_evaluate(number, chosen),
            list(good),
            self.inner,
            lambda message, reason: self.replies.refuse(number, message.metadata.src_node_id, reason),
        )

    # -- down ---------------------------------------------------------------------------------------------

    def _begin(self, arrays: ArrayRecord) -> ArrayRecord:
        """Take the model that the round starts from; return the one for the inner strategy."""
        if self._returned is None:
            self.model = Model.of(arrays, self.dense)
            vector, self._raw = self.model.flatten(arrays)
            layout = self.model.layout
            self.versions = Versions(vector, layout, **self._downlink_options)
            self.intake = Intake(
                layout.size, layout.fingerprint, dense_size=layout.dense_size, ceiling=self.model.ceiling,
                **self._intake_options,
            )  # fmt: skip
            if self._restored is not None:
                self._restore(self._restored)
        elif arrays is not self._returned:
            vector, self._raw = self.model.flatten(arrays)
            if not torch.equal(vector, self.model.rounded(self.versions.model)):
                self.versions.advance(vector)  # another model was put in place of ours
        self._returned = arrays
        self.roster.named(self.versions.digest, self.versions.version)
        return self.model.record(self.versions.target, self._raw)

    def _encode(self, number: int, messages: Iterable[Message], grid: Grid) -> list[Message]:
        self.clock += 1
        self._connected = lambda: list(grid.get_node_ids())
        encoded = list(messages)
        stamp = {"session": self.session, "clock": self.clock, "round": number - 1, "nodes": len(encoded)}
        sender = Sender(self.model, self.versions, self.roster, self.intake.accepted, self._raw)
        for message in encoded:
            self.ledger.rounds[number].snapshots += sender.encode(message, stamp) == "snapshot"
            self.ledger.count(number, "down", message.content)
        return encoded

    # -- up -----------------------------------------------------------------------------------------------

    @property
    def _weight_key(self) -> str:
        innermost = flowers.chain(self.inner)[-1]
        return str(getattr(innermost, "weighted_by_key", "num-examples"))

    def _usable(self, number: int, replies: Iterable[Message], training: bool) -> dict[Message, Offer | None]:
        """Return the replies that may be used; in training with their offers."""

        def read(message: Message, client: str, weight: float) -> Offer:
            if self._open != number:
                raise RefusedError(f"round {number} is closed")
            offer = read_offer(message, client, weight, self.model, self._raw)
            self.intake.check(offer, number - 1)
            return offer

        expected = Expected(
            number, self.session, self.versions.digest, self._weight_key, self._connected,
            read if training else None,
        )  # fmt: skip
        return self.replies.usable(replies, expected)

    # -- restart ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted server needs, including the inner strategy: tensors and plain values."""
        if self._returned is None:
            raise ValueError("there is nothing to save before the first round")
        return {
            "session": self.session,
            "clock": self.clock,
            "round": self.last_round,
            "fingerprint": self.model.layout.fingerprint,
            "versions": self.versions.state_dict(),
            "intake": self.intake.state_dict(),
            "roster": self.roster.state_dict(),
            "shapes": dict(self.replies.shapes),
            "outer": dict(self._outer_state),
            "inner": flowers.save(self.inner),
            "raw": {name: torch.from_numpy(array.numpy().copy()) for name, array in self._raw.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; then call `start` with arrays of the same model, whose values do not matter."""
        if self._returned is not None:
            raise ValueError("a strategy that has begun cannot load a state: make a new one")
        state = state if "inner" in state else self._upgraded(state)
        flowers.load(self.inner, state["inner"])
        self.session, self.clock = state["session"], state["clock"] + LEAP
        self.last_round = state["round"]
        self.roster.load_state_dict(state["roster"])
        self.replies.shapes |= state.get("shapes", {})  # missing in states of older versions
        self._outer_state = dict(state["outer"])
        self._restored = state

    def _upgraded(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Complete a state from a version that saved neither the round nor the inner strategy's state."""
        inner = flowers.save(self.inner)
        if any(entry["state"] for entry in inner):
            raise ValueError(
                f"this state was saved by a version that did not keep what {type(self.inner).__name__} remembers: "
                "start a new run from the model in state['versions']['model']"
            )
        accepted = state["intake"]["accepted"]
        intake = {"accepted": accepted, "offered": [[state["intake"]["typical"]]]}
        last = 1 + max(accepted.values(), default=-1)
        return {**state, "round": last, "fingerprint": None, "roster": {"clients": {}}, "raw": {}, "inner": inner,
                "intake": intake}  # fmt: skip

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] not in (self.model.layout.fingerprint, None):
            raise ValueError(
                f"state is of model {state['fingerprint']:016x}, this one is {self.model.layout.fingerprint:016x}: "
                "its arrays have other names or shapes"
            )
        self.versions.load_state_dict(state["versions"])
        self.intake.load_state_dict(state["intake"])
        saved = {name: Array(np.asarray(tensor.numpy())) for name, tensor in state["raw"].items()}
        self._raw = {**self._raw, **saved}
        self._restored = None
