"""The server's line: a strategy around any strategy that works on arrays.

The inner strategy samples clients, configures messages and aggregates as ever. This one replaces the model in
each message by what its client needs (see `downlink`), judges and averages the payloads that come back (see
`intake`), and gives the inner strategy one reply: the average client. Strategies that need every client's
weights (median, Krum) get them with `each=True`, at the price of one dense model per client.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from rtopk.aggregate import Mean
from rtopk.flower import replies as reading
from rtopk.flower.downlink import Versions
from rtopk.flower.intake import Intake, Offer, Refusal, RefusedError, client_order
from rtopk.flower.ledger import ByteLedger
from rtopk.flower.outgoing import Roster, Sender
from rtopk.flower.records import Model, content_bytes, data_bytes, the_arrays
from rtopk.layout import DenseRule, one_dimensional
from rtopk.local.outer import SGD, Outer

log = logging.getLogger("rtopk.flower")
REFUSALS_KEPT = 10_000


class RTopKStrategy(Strategy):
    """Compress both ways around an inner strategy.

    Up: `mean` is the rule of the average, `weighted` weighs clients by their examples, `max_density`,
    `max_norm`, `max_weight` and `outlier` bound what a client may send. Down: `downlink_density` 1 with
    `downlink_values` fp32 sends every changed entry exactly; less sends an approximation and keeps the rest
    for later rounds. `anchor_every` rounds everybody gets the whole model. `outer` acts on the averaged
    update before the inner strategy. `initial_known` says that clients make the first model themselves.
    """

    def __init__(
        self,
        inner: Strategy,
        *,
        mean: Mean = "nodes",
        weighted: bool = True,
        each: bool = False,
        dense: DenseRule = one_dimensional,
        outer: Outer | None = None,
        max_density: float = 1.0,
        max_norm: float | None = None,
        max_weight: float = 2.0**40,
        outlier: float = 1000.0,
        downlink_density: float = 1.0,
        downlink_values: str = "fp32",
        anchor_every: int = 0,
        history: int = 16,
        initial_known: bool = False,
        session: int | None = None,
        on_round: Callable[[int, "RTopKStrategy"], None] = lambda number, strategy: None,
    ) -> None:
        if each and mean != "nodes":
            raise ValueError("each=True leaves the average to the inner strategy: mean must be 'nodes'")
        self.inner = inner
        self.dense = dense
        self.each = each
        self.outer: Outer = SGD() if outer is None else outer
        self.session = time.time_ns() if session is None else session
        self.on_round = on_round
        self.ledger = ByteLedger()
        self.refusals: list[Refusal] = []
        self.clock = 0
        self._intake_options: dict[str, Any] = {
            "mean": mean, "weighted": weighted, "max_density": max_density, "max_norm": max_norm,
            "max_weight": max_weight, "outlier": outlier,
        }  # fmt: skip
        self._downlink_options: dict[str, Any] = {
            "density": downlink_density, "values": downlink_values, "anchor_every": anchor_every,
            "history": history,
        }  # fmt: skip
        self._outer_state: dict[str, torch.Tensor] = {}
        self.roster = Roster(initial_known)
        self._raw: dict[str, Array] = {}
        self._open: int | None = None  # the round whose replies may still be accepted
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
        messages = self._dress(server_round, self.inner.configure_train(server_round, wished, config, grid))
        self._open = server_round
        return messages

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose, then compress what it sends."""
        self._begin(arrays)
        self._open = None  # this message tells clients what was accepted: nothing can be after it
        model = self.model.record(self.versions.model, self._raw)
        return self._dress(server_round, self.inner.configure_evaluate(server_round, model, config, grid))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Judge, average, let the inner strategy step; only then are the payloads accepted."""
        good = self._judge(server_round, replies, training=True)
        self._open = None
        offers = {offer: message for message, offer in good if offer is not None}
        offers = {o: offers[o] for o in reading.alike(offers, self._weight_key, self._refuse(server_round))}
        if self.each:
            result = self._aggregate_each(server_round, offers)
        else:
            result = self._aggregate_mean(server_round, offers)
        self.on_round(server_round, self)
        return result

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pass on the replies without our header."""
        good = [message for message, _ in self._judge(server_round, replies, training=False)]
        good = reading.alike_metrics(good, self._weight_key, self._refuse(server_round))
        return self.inner.aggregate_evaluate(server_round, good)

    # -- down ---------------------------------------------------------------------------------------------

    def _begin(self, arrays: ArrayRecord) -> ArrayRecord:
        """Take the model that the round starts from; return the one that the inner strategy is to see."""
        if self._returned is None:
            self.model = Model.of(arrays, self.dense)
            vector, self._raw = self.model.flatten(arrays)
            layout = self.model.layout
            self.versions = Versions(
                vector, layout.fingerprint, dense_size=layout.dense_size, **self._downlink_options
            )
            self.intake = Intake(
                layout.size, layout.fingerprint, dense_size=layout.dense_size, **self._intake_options
            )
            if self._restored is not None:
                self._restore(self._restored)
        elif arrays is not self._returned:  # somebody put another model in our place
            vector, self._raw = self.model.flatten(arrays)
            self.versions.advance(vector)
        self._returned = arrays
        self.roster.named(self.versions.digest, self.versions.version)
        return self.model.record(self.versions.target, self._raw)

    def _dress(self, server_round: int, messages: Iterable[Message]) -> list[Message]:
        self.clock += 1
        stamp = {"session": self.session, "clock": self.clock, "round": server_round - 1}
        sender = Sender(self.model, self.versions, self.roster, self.intake.accepted, self._raw)
        dressed = list(messages)
        entry = self.ledger.rounds[server_round]
        for message in dressed:
            kind = sender.dress(message, {**stamp, "nodes": len(dressed)})
            self.ledger.count(
                server_round, "down", data_bytes(message.content), content_bytes(message.content)
            )
            entry.snapshots += kind == "snapshot"
        return dressed

    # -- up -----------------------------------------------------------------------------------------------

    @property
    def _weight_key(self) -> str:
        return str(getattr(self.inner, "weighted_by_key", "num-examples"))

    def _refuse(self, server_round: int) -> Callable[[str, int, str], None]:
        def refuse(client: str, node: int, reason: str) -> None:
            client = client or self.roster.client(node)
            log.warning("round %d: refused client %r (node %d): %s", server_round, client, node, reason)
            self.ledger.rounds[server_round].refused += 1
            if len(self.refusals) < REFUSALS_KEPT:
                self.refusals.append(Refusal(server_round, client, node, reason))

        return refuse

    def _judge(
        self, server_round: int, replies: Iterable[Message], training: bool
    ) -> list[tuple[Message, Offer | None]]:
        """Return the replies that are what they should be, with their offers in training."""
        refuse = self._refuse(server_round)
        good: list[tuple[Message, Offer | None]] = []
        seen: set[str] = set()
        for message in replies:
            node = message.metadata.src_node_id
            client = self.roster.client(node)
            try:
                client, held = reading.identify(message, self.session)
                self.roster.met(node, client)
                if held is None:
                    self.roster.asked(node)
                    raise RefusedError("it does not hold the model and asks for a snapshot")
                offer = None
                size = content_bytes(message.content)
                if training:
                    if self._open != server_round:
                        raise RefusedError(f"round {server_round} is closed")
                    offer = reading.read(message, self.model, client, self._weight_key, self._raw)
                    self.intake.check(offer, self.session, server_round - 1, self.versions.digest)
                    if client in seen:
                        raise RefusedError("a reply with this client id came already")
                    seen.add(client)
                if held == self.versions.digest:
                    self.roster.holds(node, held)
                self.ledger.count(server_round, "up", data_bytes(message.content), size)
            except Exception as error:  # whatever a client sends, the round goes on
                reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                refuse(client, node, reason)
                continue
            reading.strip(message)
            good.append((message, offer))
        return good

    def _aggregate_mean(
        self, server_round: int, offers: Mapping[Offer, Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        mean, taken, refused, typical = self.intake.average(list(offers))
        for offer, reason in refused.items():
            self._refuse(server_round)(offer.client, offer.node, reason)
        if mean is None:
            return None, None
        step, outer_state = self.outer.step(mean, self._outer_state)
        contents = [offers[offer].content for offer in taken]
        raw = reading.raw_mean(self.model, contents, self._shares(taken))
        key = self._weight_key
        metrics = aggregate_metricrecords(contents, key)
        metrics[key] = sum(offer.weight for offer in taken)
        arrays = self.model.record(self.versions.target - step, raw)
        average = RecordDict({the_arrays(contents[0])[0]: arrays, **_named(contents[0], metrics)})
        reply = offers[taken[0]]
        reply.content = average
        result, reported = self.inner.aggregate_train(server_round, [reply])
        if result is None:
            return None, reported
        combine = getattr(self.inner, "train_metrics_aggr_fn", None)
        if combine is not None:
            reported = combine(contents, key)
        vector, _ = self.model.flatten(result)
        self.versions.advance(vector)
        self._outer_state, self._raw = outer_state, raw
        self.intake.commit(taken, server_round - 1, typical)
        return self._publish(), reported

    def _aggregate_each(
        self, server_round: int, offers: Mapping[Offer, Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Give the inner strategy every client's weights."""
        taken, norms, messages, raws = [], [], [], []
        typical = self.intake.typical or self.intake.first_look(list(offers))
        for offer in sorted(offers, key=lambda o: client_order(o.client)):
            try:
                vector = self.intake.decode(offer)
                norms.append(self.intake.norm(vector, typical))
            except RefusedError as error:
                self._refuse(server_round)(offer.client, offer.node, str(error))
                continue
            message, own = offers[offer], self.versions.target.clone()
            own[vector.indices] -= vector.values
            name, arrays = the_arrays(message.content)
            raws.append(RecordDict(dict(message.content)))
            message.content[name] = self.model.record(own, {n: arrays[n] for n in self.model.raw})
            messages.append(message)
            taken.append(offer)
        if not taken:
            return None, None
        raw = reading.raw_mean(self.model, raws, self._shares(taken))
        result, reported = self.inner.aggregate_train(server_round, messages)
        if result is None:
            return None, reported
        moved, _ = self.model.flatten(result)
        step, outer_state = self.outer.step(self.versions.target - moved, self._outer_state)
        # SGD with rate 1 is where the inner strategy went, without the rounding of going there by a difference.
        self.versions.advance(moved if self.outer == SGD() else self.versions.target - step)
        self._outer_state, self._raw = outer_state, raw
        self.intake.commit(taken, server_round - 1, sorted(norms)[(len(norms) - 1) // 2])
        return self._publish(), reported

    def _shares(self, taken: list[Offer]) -> list[float]:
        return [offer.weight if self.intake.weighted else 1.0 for offer in taken]

    def _publish(self) -> ArrayRecord:
        self.roster.named(self.versions.digest, self.versions.version)
        self._returned = self.model.record(self.versions.model, self._raw)
        return self._returned

    # -- restart ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a restarted server needs to go on: start it with the arrays it returned last."""
        return {
            "session": self.session,
            "clock": self.clock,
            "versions": self.versions.state_dict(),
            "intake": self.intake.state_dict(),
            "outer": dict(self._outer_state),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; it takes hold when the first round begins."""
        self.session, self.clock = state["session"], state["clock"]
        self._outer_state = dict(state["outer"])
        self._restored = state

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.versions.load_state_dict(state["versions"])
        self.intake.load_state_dict(state["intake"])
        self._restored = None


def _named(content: RecordDict, metrics: MetricRecord) -> dict[str, MetricRecord]:
    return {next(iter(content.metric_records)): metrics}
