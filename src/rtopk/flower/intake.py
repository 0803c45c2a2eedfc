"""What the server accepts: every claim of a client is checked before anything is allocated or added.

Garbage, truncated, oversized, replayed and stale payloads, payloads of another model, NaN, Inf and absurd norms
are refused with a reason; the round continues with the rest. An offer counts as accepted only once the strategy
has used it (`commit`), and that is what clients are told.
"""

import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rtopk.aggregate import Mean, RunningMean
from rtopk.codec import Codec
from rtopk.flower.transaction import NOTHING
from rtopk.schedule import check_density
from rtopk.sparse import SparseVector
from rtopk.sparsifier import entries_sent
from rtopk.state_file import byte_tensor

ENTRY_BYTES = 32  # more than any codec needs for an entry: positions and values
ROUNDS = 5  # whose norms are remembered
LARGEST = 2.0**60  # norm of any update: beyond it, squares and weighted sums leave float32
log = logging.getLogger("rtopk.flower")


class RefusedError(ValueError):
    """A reply that the server does not use."""


@dataclass(frozen=True)
class Offer:
    """A reply as received, unchecked."""

    client: str
    node: int
    payload: bytes
    weight: float
    beside: float = 0.0  # norm of the change in its uncompressed arrays


@dataclass
class Judgement:
    """The result of judging the offers of a round."""

    taken: list[Offer] = field(default_factory=list)
    refused: dict[Offer, str] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)  # of all that could be decoded


class NormBound:
    """How large an update may be, compared with what all clients offered recently.

    The limit is `outlier` times the median norm of the updates offered in the last rounds, whether they were used
    or not. So it follows the clients: one reply cannot set it, and if it is wrong for most of them it is right
    again after at most half of the remembered rounds. An update no larger than the model is never an outlier.
    """

    def __init__(self, outlier: float = 1000.0, max_norm: float | None = None) -> None:
        if max_norm is not None and not 0.0 < max_norm < math.inf:
            raise ValueError(f"max_norm must be positive and finite, or None, got {max_norm}")
        if not outlier > 1.0:
            raise ValueError(f"outlier must be greater than 1, got {outlier}")
        self.outlier, self.max_norm = outlier, max_norm
        self.offered: deque[list[float]] = deque(maxlen=ROUNDS)

    def limit(self, count: int, model: float, norms: Callable[[], Sequence[float]]) -> float:
        """Return the largest norm that this round may use.

        `count` updates are offered, `model` is the norm of the model. `norms` returns those of this round;
        it is called only while fewer than that are remembered.
        """
        most = LARGEST if self.max_norm is None else min(self.max_norm, LARGEST)
        if math.isinf(self.outlier):
            return most
        known = [norm for offered in self.offered for norm in offered]
        if len(known) < count:
            known += [norm for norm in norms() if norm > 0.0]
        if len(known) < 2:  # a norm cannot vouch for itself
            return min(self.outlier * model or LARGEST, most)
        return min(max(self.outlier * median(known), model), most)

    def check(self, norm: float, limit: float) -> None:
        """Raise RefusedError if a norm is too large."""
        if not norm <= limit:
            usual = f", {self.outlier:g} times the usual or the model's own norm"
            raise RefusedError(
                f"its norm {norm:g} is above the limit {limit:g}{'' if limit == self.max_norm else usual}"
            )

    def note(self, norms: Sequence[float]) -> None:
        """Record the norms offered in a round, except zeros, which carry no scale."""
        kept = [norm for norm in norms if 0.0 < norm <= LARGEST]
        if kept:
            self.offered.append(kept)


class Intake:
    """Judge the offers of a round and average those that pass, in the order of client ids.

    `max_density` is the largest part of the entries that a payload may hold, `max_norm` the largest norm,
    `outlier` how many times the usual norm is too much (see `NormBound`). `ceiling` is the largest magnitude of
    each weight, None if all may be as large as float32 can hold.
    """

    def __init__(
        self,
        size: int,
        fingerprint: int,
        *,
        dense_size: int = 0,
        max_density: float = 1.0,
        max_norm: float | None = None,
        outlier: float = 1000.0,
        mean: Mean = "nodes",
        weighted: bool = True,
        ceiling: Tensor | None = None,
    ) -> None:
        self.size = size
        self.codec = Codec(fingerprint=fingerprint)
        sparse_size = size - dense_size
        self.entries = dense_size + entries_sent(sparse_size, check_density(max_density, "max_density"))
        self.bound = NormBound(outlier, max_norm)
        RunningMean(0, mean)  # refuses what is no mean
        self.mean: Mean = mean
        self.weighted = weighted
        self.ceiling = ceiling
        self.accepted: dict[str, int] = {}  # client -> its last round that was used

    def check(self, offer: Offer, round_: int) -> None:
        """Raise RefusedError unless the offer may be decoded in this round."""
        if self.accepted.get(offer.client, NOTHING) >= round_:
            raise RefusedError(f"round {round_} of this client was accepted already")
        if len(offer.payload) > 1024 + ENTRY_BYTES * self.entries:
            raise RefusedError(f"{len(offer.payload)} bytes are too many for {self.entries} entries")

    def decode(self, offer: Offer) -> SparseVector:
        """Return the vector of a checked offer."""
        try:
            return self.codec.decode(byte_tensor(offer.payload), size=self.size, entries=self.entries)
        except ValueError as error:
            raise RefusedError(str(error)) from error

    def judged(
        self, offers: Iterable[Offer], target: Tensor, verdict: Judgement
    ) -> Iterator[tuple[Offer, SparseVector]]:
        """Yield the offers that pass with their vectors, one decoded at a time; `target` is the model."""
        offers = sorted(offers, key=lambda o: client_order(o.client))
        limit = self.bound.limit(len(offers), norm_of(target), lambda: self._norms(offers))
        absurd = 0  # how many are above it
        for offer in offers:
            try:
                vector = self.decode(offer)
                norm = _norm(offer, vector)
                verdict.norms.append(norm)
                absurd += norm > limit
                self.bound.check(norm, limit)
                self._check_ceiling(vector, target)
            except RefusedError as error:
                verdict.refused[offer] = str(error)
                continue
            verdict.taken.append(offer)
            yield offer, vector
        if 2 * absurd > len(offers):
            log.warning(
                "most updates of this round, %d of %d, are refused for norms above %g; the limit follows what "
                "clients offer within some rounds, except max_norm=%s",
                absurd, len(offers), limit, self.bound.max_norm,
            )  # fmt: skip

    def average(self, offers: Iterable[Offer], target: Tensor) -> tuple[Tensor | None, Judgement]:
        """Average what passes, None if nothing does; decodes one offer at a time."""
        verdict = Judgement()
        mean = self._mean(self.judged(offers, target, verdict))
        return mean, verdict

    def mean_of(self, offers: Iterable[Offer]) -> Tensor:
        """Average offers that have already passed."""
        mean = self._mean((offer, self.decode(offer)) for offer in offers)
        assert mean is not None
        return mean

    def _mean(self, vectors: Iterable[tuple[Offer, SparseVector]]) -> Tensor | None:
        running = RunningMean(self.size, self.mean, self.weighted)
        for offer, vector in vectors:
            running.add(vector, offer.weight)
        return running.result() if running.nodes else None

    def _norms(self, offers: Iterable[Offer]) -> list[float]:
        """Return the norms of what can be decoded."""
        norms = []
        for offer in offers:
            try:
                norms.append(_norm(offer, self.decode(offer)))
            except RefusedError:
                continue
        return norms

    def _check_ceiling(self, vector: SparseVector, target: Tensor) -> None:
        if self.ceiling is None:
            return
        own = (target[vector.indices] - vector.values).abs()
        beyond = own[own > self.ceiling[vector.indices]]
        if beyond.numel():
            raise RefusedError(f"it moves a float16 weight to {float(beyond.max()):g}, beyond 65504")

    def commit(self, taken: Sequence[Offer], round_: int) -> None:
        """Record that the strategy has used these offers."""
        for offer in taken:
            self.accepted[offer.client] = round_

    def state_dict(self) -> dict[str, Any]:
        """Return what the next round depends on."""
        return {"accepted": dict(self.accepted), "offered": [list(norms) for norms in self.bound.offered]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.bound.offered = deque((list(norms) for norms in state["offered"]), maxlen=ROUNDS)
        self.accepted = dict(state["accepted"])


def median(numbers: Sequence[float]) -> float:
    """Return the lower median: of two the smaller, so that one absurd number cannot set it."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0


def norm_of(vector: Tensor) -> float:
    """Return the Euclidean norm, summed in float64 by one thread (see `RunningMean`)."""
    values = vector.numpy()
    return math.sqrt(float(np.einsum("i,i->", values, values, dtype=np.float64)))


def _norm(offer: Offer, vector: SparseVector) -> float:
    """Return the norm of all that an offer changes."""
    return math.hypot(norm_of(vector.values), offer.beside)


def client_order(client: str) -> tuple[int, int, str]:
    """Order ids: numbers by value, then names; ascii digits only, so that the order is the same everywhere."""
    number = client.isascii() and client.isdigit()
    return (0, int(client), client) if number else (1, 0, client)


def tag(client: str) -> bytes:
    """Identify a client in 8 bytes that do not reveal its id."""
    return hashlib.blake2b(client.encode(), digest_size=8).digest()


def pack_table(accepted: Mapping[str, int]) -> bytes:
    """Write the last accepted rounds of all clients, for a node that has not identified itself."""
    return b"".join(tag(client) + round_.to_bytes(8, "little") for client, round_ in accepted.items())


def look_up(table: bytes, client: str) -> int:
    """Return a client's last accepted round from a table, NOTHING if it is not there."""
    wanted = tag(client)
    for place in range(0, len(table) - 15, 16):
        if table[place : place + 8] == wanted:
            return int.from_bytes(table[place + 8 : place + 16], "little")
    return NOTHING
