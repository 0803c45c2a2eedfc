"""One round on the server: the clients' offers -> the next model, through the inner strategy.

The inner strategy gets one reply, the average client, or every client's weights. Only the inner strategy changes
here, and that is undone if it fails: replies that make it fail are left out, and the round continues.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from traceback import format_tb
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from torch import Tensor

from rtopk.flower.inner import snapshot, undo
from rtopk.flower.intake import Intake, Judgement, Offer
from rtopk.flower.records import Model, the_arrays
from rtopk.flower.replies import reason_of
from rtopk.kernels import require_finite
from rtopk.local.outer import SGD, Outer, State

Refuse = Callable[[Offer, str], None]
Reply = TypeVar("Reply", bound=Hashable)
Result = TypeVar("Result")
log = logging.getLogger("rtopk.flower")


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

        def act(taken: Sequence[Offer]) -> Outcome:
            if mean is not None and len(taken) == len(verdict.taken):
                return self._mean(taken, mean)
            return self._mean(taken, self.intake.mean_of(taken))

        return self._aggregate(act, verdict, refuse)

    def each(self, refuse: Refuse) -> Outcome | None:
        """Pass every client's weights to the inner strategy."""
        verdict, contents = Judgement(), {}
        for offer, vector in self.intake.judged(self.offers, self.target, verdict):
            own, content = self.target.clone(), self.offers[offer].content
            own[vector.indices] -= vector.values
            name, arrays = the_arrays(content)
            whole = self.model.record(own, {n: arrays[n] for n in self.model.raw})
            contents[offer] = RecordDict({**dict(content), name: whole})
        return self._aggregate(lambda taken: self._each({o: contents[o] for o in taken}), verdict, refuse)

    def _aggregate(
        self, act: Callable[[Sequence[Offer]], Outcome], verdict: Judgement, refuse: Refuse
    ) -> Outcome | None:
        self.intake.bound.note(verdict.norms)
        for offer, reason in verdict.refused.items():
            refuse(offer, reason)
        if not verdict.taken:
            return None
        begun = bool(self.intake.accepted)  # until then a strategy that does not suit the model should raise
        return without_failing(act, verdict.taken, self.inner, refuse, fatal=not begun)

    def _mean(self, taken: Sequence[Offer], mean: Tensor) -> Outcome:
        step, outer_state = self.outer.step(mean, self.outer_state)
        contents, key = [self.offers[offer].content for offer in taken], self.weight_key
        raw = self._raw_mean(taken, contents)
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
        raw = self._raw_mean(taken, list(contents.values()))
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

    def _raw_mean(self, taken: Sequence[Offer], contents: Sequence[RecordDict]) -> dict[str, Array]:
        """Return the raw arrays of a round: the weighted mean of floats, the middle one of everything else."""
        weights = [offer.weight if self.intake.weighted else 1.0 for offer in taken]
        raw: dict[str, Array] = {}
        for name in self.model.raw:
            arrays, dtype = [the_arrays(content)[1][name] for content in contents], self.model.types[name]
            if np.issubdtype(np.dtype(dtype), np.floating):
                total = sum(w * array.numpy() for w, array in zip(weights, arrays, strict=True))
                raw[name] = Array(np.asarray(total / sum(weights), dtype=dtype))
            elif all(array.data == arrays[0].data for array in arrays):
                raw[name] = arrays[0]
            else:  # no client alone decides a counter
                ordered = np.sort(np.stack([array.numpy() for array in arrays]), axis=0)
                raw[name] = Array(np.asarray(ordered[(len(arrays) - 1) // 2]))
        return raw

    def _floats(self, raw: Mapping[str, Array]) -> dict[str, Array]:
        """Return the uncompressed float arrays, in the model's types, as the inner strategy left them."""
        found = {}
        for name, array in raw.items():
            dtype = self.model.types[name]
            if np.issubdtype(np.dtype(dtype), np.floating):
                values = array.numpy()
                if not bool(np.isfinite(values).all()):
                    raise ValueError(f"array {name} after aggregation holds NaN or Inf")
                found[name] = Array(np.asarray(values, dtype=dtype))
        return found


def without_failing(
    action: Callable[[Sequence[Reply]], Result],
    replies: Sequence[Reply],
    inner: Strategy,
    refuse: Callable[[Reply, str], None],
    fatal: bool = False,
) -> Result | None:
    """Return `action(replies)`; if it fails, leave out the replies on which it fails alone.

    Return None, with the strategy unchanged, if that fails too or singles nobody out. With `fatal`, an action
    that fails on each of several replies raises: then the clients are not the cause.
    """
    before = snapshot(inner)

    def attempt(chosen: Sequence[Reply]) -> Result | Exception:
        try:
            with np.errstate(all="ignore"):  # what is not finite afterwards is an error of its own
                return action(chosen)
        except Exception as error:
            undo(inner, before)
            return error

    result = attempt(replies)
    if not isinstance(result, Exception):
        return result
    failed = {}
    for reply in replies if len(replies) > 1 else ():
        alone = attempt([reply])
        undo(inner, before)
        if isinstance(alone, Exception):
            failed[reply] = reason_of(alone)
    rest = [reply for reply in replies if reply not in failed]
    if fatal and failed and not rest:
        raise result
    if failed and rest:
        for reply, reason in failed.items():
            refuse(reply, f"aggregation fails with it: {reason}")
        log.warning(
            "aggregation failed with all replies, and is tried with %d of %d", len(rest), len(replies)
        )
        result = attempt(rest)
        if not isinstance(result, Exception):
            return result
    log.error(
        "aggregation failed: %s; the model stays as it was, the round ends without it\n%s",
        reason_of(result),
        "".join(format_tb(result.__traceback__)),  # not the whole exception: its text may be a client's
    )
    return None
