"""One round on the server: the clients' offers -> the next model, through the inner strategy.

The inner strategy gets one reply, the average client, or every client's weights. Only the inner strategy changes
here, and that is undone if it fails (see `guard`).
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import Tensor

from rtopk.flower import guard
from rtopk.flower.intake import Intake, Offer, Verdict
from rtopk.flower.records import Model, the_arrays
from rtopk.flower.replies import raw_mean
from rtopk.kernels import require_finite
from rtopk.local.outer import SGD, Outer, State

Refuse = Callable[[Offer, str], None]


@dataclass(frozen=True)
class Outcome:
    """The result of a round; `target` is None if the model does not change."""

    target: Tensor | None
    outer_state: State
    raw: Mapping[str, Array]
    taken: Sequence[Offer]
    metrics: MetricRecord | None


@dataclass(frozen=True)
class Aggregation:
    """Aggregate the offers of one round."""

    server_round: int
    inner: Strategy
    model: Model
    intake: Intake
    target: Tensor  # (d,) where the round starts
    outer: Outer
    outer_state: State
    weight_key: str
    offers: Mapping[Offer, Message]

    def mean(self, refuse: Refuse) -> Outcome | None:
        """Pass the average client to the inner strategy."""
        mean, verdict = self.intake.average(self.offers, self.target)
        self._note(verdict, refuse)

        def act(taken: Sequence[Offer]) -> Outcome:
            if mean is not None and len(taken) == len(verdict.taken):
                return self._mean(taken, mean)
            return self._mean(taken, self.intake.mean_of(taken))

        return self._guarded(act, verdict, refuse)

    def each(self, refuse: Refuse) -> Outcome | None:
        """Pass every client's weights to the inner strategy."""
        verdict, contents = Verdict(), {}
        for offer, vector in self.intake.judged(self.offers, self.target, verdict):
            own, content = self.target.clone(), self.offers[offer].content
            own[vector.indices] -= vector.values
            name, arrays = the_arrays(content)
            whole = self.model.record(own, {n: arrays[n] for n in self.model.raw})
            contents[offer] = RecordDict({**dict(content), name: whole})
        self._note(verdict, refuse)

        def act(taken: Sequence[Offer]) -> Outcome:
            return self._each({offer: contents[offer] for offer in taken})

        return self._guarded(act, verdict, refuse)

    def _guarded(
        self, act: Callable[[Sequence[Offer]], Outcome], verdict: Verdict, refuse: Refuse
    ) -> Outcome | None:
        if not verdict.taken:
            return None
        begun = bool(self.intake.accepted)  # until then a strategy that does not suit the model should raise
        return guard.aggregate(act, verdict.taken, self.inner, refuse, fatal=not begun)

    def _note(self, verdict: Verdict, refuse: Refuse) -> None:
        self.intake.bound.note(verdict.norms)
        for offer, reason in verdict.refused.items():
            refuse(offer, reason)

    def _mean(self, taken: Sequence[Offer], mean: Tensor) -> Outcome:
        step, outer_state = self.outer.step(mean, self.outer_state)
        contents, key = [self.offers[offer].content for offer in taken], self.weight_key
        raw = raw_mean(self.model, contents, self._shares(taken))
        metrics = aggregate_metricrecords(contents, key)
        metrics[key] = sum(offer.weight for offer in taken)
        name, reply = the_arrays(contents[0])[0], copy(self.offers[taken[0]])
        arrays = self.model.record(self.target - step, raw)
        reply.content = RecordDict({name: arrays, next(iter(contents[0].metric_records)): metrics})
        result, reported = self.inner.aggregate_train(self.server_round, [reply])
        if result is None:
            return Outcome(None, self.outer_state, {}, (), reported)
        combine = getattr(self.inner, "train_metrics_aggr_fn", None)
        if combine is not None:
            reported = combine(contents, key)
        target, _ = self.model.flatten(result)
        require_finite(target, "the model after aggregation")
        return Outcome(target, outer_state, raw, taken, reported)

    def _each(self, contents: Mapping[Offer, RecordDict]) -> Outcome:
        taken, messages = list(contents), []
        raw = raw_mean(self.model, list(contents.values()), self._shares(taken))
        for offer, content in contents.items():
            message = copy(self.offers[offer])  # the inner strategy may empty the records it gets
            message.content = RecordDict(
                {n: r.copy() if isinstance(r, ArrayRecord) else r for n, r in content.items()}
            )
            messages.append(message)
        result, reported = self.inner.aggregate_train(self.server_round, messages)
        if result is None:
            return Outcome(None, self.outer_state, {}, (), reported)
        moved, own = self.model.flatten(result)
        step, outer_state = self.outer.step(self.target - moved, self.outer_state)
        # SGD with rate 1 is where the inner strategy went, without the rounding of going there by a difference.
        target = moved if self.outer == SGD() else self.target - step
        if self.intake.ceiling is not None:  # a step of the outer optimizer may go beyond float16
            target = target.clamp(-self.intake.ceiling, self.intake.ceiling)
        require_finite(target, "the model after aggregation")
        return Outcome(target, outer_state, raw | self._floats(own), taken, reported)

    def _floats(self, raw: Mapping[str, Array]) -> dict[str, Array]:
        """Return the uncompressed float arrays, in the model's types, as the inner strategy left them."""
        types = dict(zip(self.model.names, self.model.dtypes, strict=True))
        found = {}
        for name, array in raw.items():
            if np.issubdtype(np.dtype(types[name]), np.floating):
                values = array.numpy()
                if not bool(np.isfinite(values).all()):
                    raise ValueError(f"array {name} after aggregation holds NaN or Inf")
                found[name] = Array(np.asarray(values, dtype=types[name]))
        return found

    def _shares(self, taken: Sequence[Offer]) -> list[float]:
        return [offer.weight if self.intake.weighted else 1.0 for offer in taken]
