"""What the server lets in: every claim of a client is checked before anything is allocated or added.

Garbage, truncated, oversized, replayed and stale payloads, those of another model, NaN, Inf and absurd norms
are refused with a reason; the round goes on with the rest. What a round took in counts as accepted only once
the strategy has used it (`commit`), and that is what clients are told.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.aggregate import Mean, RunningMean
from rtopk.codec import Codec, PayloadError
from rtopk.flower.transaction import NOTHING
from rtopk.schedule import check_density
from rtopk.sparse import SparseVector

CLIENT_LIMIT = 128  # characters of a client id
WEIGHT_LIMIT = 2.0**40  # examples
ENTRY_BYTES = 32  # more than any codec needs for an entry: positions and values


class RefusedError(ValueError):
    """A reply that the server does not use."""


@dataclass(frozen=True)
class Offer:
    """A reply as it came: nothing of it is believed."""

    client: str
    node: int
    session: int
    round: int
    digest: bytes  # of the model it trained from
    payload: bytes
    weight: float


@dataclass(frozen=True)
class Refusal:
    """Who was refused when, and why."""

    round: int
    client: str
    node: int
    reason: str


class Intake:
    """Judge the offers of a round and average those that pass, in the order of client ids.

    `max_density` is the largest part of the entries that a payload may hold, `max_norm` the largest norm.
    A norm more than `outlier` times the median (of the last round; of this one if it is the first) is absurd.
    """

    def __init__(
        self,
        size: int,
        fingerprint: int,
        *,
        dense_size: int = 0,
        max_density: float = 1.0,
        max_norm: float | None = None,
        max_weight: float = WEIGHT_LIMIT,
        outlier: float = 1000.0,
        mean: Mean = "nodes",
        weighted: bool = True,
    ) -> None:
        if max_norm is not None and not 0.0 < max_norm < math.inf:
            raise ValueError(f"max_norm must be positive and finite, or None, got {max_norm}")
        if not outlier > 1.0:
            raise ValueError(f"outlier must be greater than 1, got {outlier}")
        self.size = size
        self.codec = Codec(fingerprint=fingerprint)
        sparse_size = size - dense_size
        self.entries = dense_size + max(1, round(check_density(max_density, "max_density") * sparse_size))
        self.max_norm = max_norm
        self.max_weight = max_weight
        self.outlier = outlier
        self.mean: Mean = mean
        self.weighted = weighted
        self.accepted: dict[str, int] = {}
        self.typical = 0.0  # median norm of the last round that was committed

    def check(self, offer: Offer, session: int, round_: int, digest: bytes) -> None:
        """Raise RefusedError unless the offer is for this round of this model, by its own words."""
        if not 0 < len(offer.client) <= CLIENT_LIMIT or not offer.client.isprintable():
            raise RefusedError(f"client id must be 1 to {CLIENT_LIMIT} printable characters")
        if offer.session != session:
            raise RefusedError(f"it is of session {offer.session}, this is {session}")
        if offer.round != round_:
            raise RefusedError(f"it is of round {offer.round}, this is round {round_}")
        if self.accepted.get(offer.client, NOTHING) >= round_:
            raise RefusedError(f"round {round_} of this client was accepted already")
        if offer.digest != digest:
            raise RefusedError("it was trained from another model than this round's")
        if not 0.0 < offer.weight <= self.max_weight:
            raise RefusedError(f"its weight must be in (0, {self.max_weight:g}], got {offer.weight}")
        if len(offer.payload) > 1024 + ENTRY_BYTES * self.entries:
            raise RefusedError(f"{len(offer.payload)} bytes are too many for {self.entries} entries")

    def decode(self, offer: Offer) -> SparseVector:
        """Return the vector of an offer that was checked."""
        try:
            payload = torch.frombuffer(bytearray(offer.payload), dtype=torch.uint8)
            return self.codec.decode(payload, size=self.size, entries=self.entries)
        except (PayloadError, ValueError) as error:
            raise RefusedError(str(error)) from error

    def average(self, offers: Sequence[Offer]) -> tuple[Tensor | None, list[Offer], dict[Offer, str], float]:
        """Average what can be decoded; return mean, whom it holds, whom not and why, and the typical norm.

        One vector of all entries, and one offer decoded at a time.
        """
        running = RunningMean(self.size, self.mean, self.weighted)
        refused: dict[Offer, str] = {}
        taken: list[Offer] = []
        norms: list[float] = []
        typical = self.typical or self.first_look(offers)
        for offer in sorted(offers, key=lambda o: client_order(o.client)):
            try:
                vector = self.decode(offer)
                norm = self.norm(vector, typical)
            except RefusedError as error:
                refused[offer] = str(error)
                continue
            running.add(vector, offer.weight)
            taken.append(offer)
            norms.append(norm)
        if not taken:
            return None, taken, refused, typical
        return running.result(), taken, refused, median(norms)

    def first_look(self, offers: Sequence[Offer]) -> float:
        """Return the median norm of offers, where there is no round before to compare with."""
        norms = []
        for offer in offers:
            try:
                norms.append(self.norm(self.decode(offer), 0.0))
            except RefusedError:
                continue
        return median(norms)

    def norm(self, vector: SparseVector, typical: float) -> float:
        """Return the norm of a vector; RefusedError if it is too large."""
        values = vector.values.numpy()
        norm = math.sqrt(
            float(np.einsum("i,i->", values, values, dtype=np.float64))
        )  # one thread: see RunningMean
        if self.max_norm is not None and norm > self.max_norm:
            raise RefusedError(f"its norm {norm:g} is above the limit {self.max_norm:g}")
        if typical and norm > self.outlier * typical:
            raise RefusedError(f"its norm {norm:g} is more than {self.outlier:g} times the usual {typical:g}")
        return norm

    def commit(self, taken: Sequence[Offer], round_: int, typical: float) -> None:
        """Record that the strategy has used these offers."""
        for offer in taken:
            self.accepted[offer.client] = round_
        self.typical = typical

    def state_dict(self) -> dict[str, Any]:
        """Return what the next round depends on."""
        return {"accepted": dict(self.accepted), "typical": self.typical}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.accepted, self.typical = dict(state["accepted"]), float(state["typical"])


def median(norms: Sequence[float]) -> float:
    """Return the lower median: of two clients the smaller, so that one absurd norm cannot set it."""
    return sorted(norms)[(len(norms) - 1) // 2] if norms else 0.0


def client_order(client: str) -> tuple[int, int, str]:
    """Order ids: numbers by value, then names; ascii digits only, so that the order is the same everywhere."""
    number = client.isascii() and client.isdigit()
    return (0, int(client), "") if number else (1, 0, client)


def tag(client: str) -> bytes:
    """Name a client in 8 bytes that do not show its id."""
    return hashlib.blake2b(client.encode(), digest_size=8).digest()


def pack_table(accepted: Mapping[str, int]) -> bytes:
    """Write the last accepted rounds of all clients: for a node that has not said who it is."""
    return b"".join(tag(client) + round_.to_bytes(8, "little") for client, round_ in accepted.items())


def look_up(table: bytes, client: str) -> int:
    """Return a client's last accepted round from a table, NOTHING if it is not there."""
    wanted = tag(client)
    for place in range(0, len(table) - 15, 16):
        if table[place : place + 8] == wanted:
            return int.from_bytes(table[place + 8 : place + 16], "little")
    return NOTHING
