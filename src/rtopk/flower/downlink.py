"""The downlink: versions of the server's model, and what a client needs to get from its version to the latest.

One payload leads from a version to the next. If `lossless`, it holds the new values of the entries that changed.
With a `density` below 1 or a narrow value form, it is the encoded difference, and what that leaves out stays at
the server for the next round. Both sides add the same decoded numbers, so they hold the same bits, and a digest in
every message proves it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rtopk.codec import Codec
from rtopk.kernels import require_finite
from rtopk.layout import Layout
from rtopk.memory import NoMemory
from rtopk.schedule import check_density
from rtopk.select import TopK
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier
from rtopk.state_file import digest_bits

Kind = Literal["held", "deltas", "snapshot"]


class OutOfStepError(ValueError):
    """The client's model is not the one that the server expects; it needs a snapshot."""


@dataclass(frozen=True)
class Update:
    """What takes a client from `base` to `version`."""

    kind: Kind
    base: int
    version: int
    digest: bytes
    payloads: tuple[Tensor, ...]  # none if held, one of every entry if a snapshot


class Versions:
    """The server's side.

    `model` is what every client holds after the update to `version`. `density` 1 with `values` fp32 is
    lossless. Every `anchor_every` versions all clients get a snapshot with nothing left out (0: never).
    `history` deltas are kept for clients that were away; the chain is sent if it is smaller than a snapshot.
    """

    def __init__(
        self,
        model: Tensor,  # (d,) float32
        layout: Layout | None = None,
        *,
        density: float = 1.0,
        values: str = "fp32",
        anchor_every: int = 0,
        history: int = 16,
    ) -> None:
        require_finite(model, "model")
        check_density(density, "downlink density")
        if anchor_every < 0 or history < 1:
            raise ValueError(f"need anchor_every >= 0 and history >= 1, got {anchor_every}, {history}")
        self.model = model.clone()
        self.version = 0
        self.digest = digest_bits(self.model)
        self.codec = Codec(values, fingerprint=layout.fingerprint if layout else 0)
        self.lossless = density == 1.0 and values == "fp32"  # clients get exactly the target
        self.anchor_every = anchor_every
        # It keeps nothing itself: each difference is taken from the model that the clients hold.
        self._sparsifier = Sparsifier(TopK(), density, NoMemory(), self.codec, layout=layout)
        self.back = torch.zeros(0)  # what the clients do not have yet: target - model; empty if nothing
        self._deltas: deque[tuple[int, Tensor]] = deque(maxlen=history)  # (base, payload)
        self._snapshot: Tensor | None = None

    @property
    def target(self) -> Tensor:
        """The model that the clients should reach."""
        return self.model + self.back if self.back.numel() else self.model

    def advance(self, target: Tensor) -> None:
        """Make the next version, as close to the target as one payload allows."""
        if target.shape != self.model.shape:
            raise ValueError(f"target must have {self.model.numel()} entries, got {target.numel()}")
        require_finite(target, "target")
        version, payload, back = self.version + 1, None, torch.zeros(0)
        if self.anchor_every and version % self.anchor_every == 0:
            model = target.clone()
        elif self.lossless:
            changed = (target.view(torch.int32) != self.model.view(torch.int32)).nonzero()[:, 0]
            payload, model = self.codec.encode(SparseVector.gather(target, changed)), target.clone()
        else:
            model = self.model.clone()
            self._sparsifier.watch = lambda sent: _add_(model, sent)
            payload = self._sparsifier.compress(target - self.model, version)
            back = target - model
        self.model, self.back, self.version, self.digest = model, back, version, digest_bits(model)
        self._snapshot = None
        if payload is None:
            self._deltas.clear()
        else:
            self._deltas.append((version - 1, payload))

    def since(self, base: int | None) -> Update:
        """Return what a client at version `base` needs; None for a client that holds nothing."""
        if base == self.version:
            return Update("held", self.version, self.version, self.digest, ())
        chain = [p for b, p in self._deltas if base is not None and b >= base]
        whole = 40 + 4 * self.model.numel()
        reaches = base is not None and bool(chain) and len(chain) == self.version - base
        if reaches and sum(p.numel() for p in chain) < whole:
            return Update("deltas", base or 0, self.version, self.digest, tuple(chain))
        if self._snapshot is None:
            everything = SparseVector(torch.arange(self.model.numel()), self.model, self.model.numel())
            self._snapshot = Codec(fingerprint=self.codec.fingerprint).encode(everything)
        return Update("snapshot", self.version, self.version, self.digest, (self._snapshot,))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next version depends on."""
        return {
            "model": self.model.clone(),
            "back": self.back.clone(),
            "version": self.version,
            "deltas": [(base, payload) for base, payload in self._deltas],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same model."""
        if state["model"].shape != self.model.shape:
            raise ValueError(
                f"state is of a model of {state['model'].numel()} entries, this one has {self.model.numel()}"
            )
        self.model, self.back, self.version = state["model"].clone(), state["back"].clone(), state["version"]
        self.digest = digest_bits(self.model)
        self._snapshot = None
        self._deltas.clear()
        self._deltas.extend((base, payload) for base, payload in state["deltas"])


def follow(held: Tensor | None, update: Update, *, size: int, fingerprint: int, lossless: bool) -> Tensor:
    """Return a client's model after an update; OutOfStepError unless it is bit-identical to the server's."""
    codec = Codec(fingerprint=fingerprint)
    sent = (codec.decode(payload, size=size) for payload in update.payloads)
    if update.kind == "snapshot":
        if len(update.payloads) != 1:
            raise OutOfStepError(f"a snapshot is one payload, got {len(update.payloads)}")
        whole = next(sent)
        if len(whole) != size:
            raise OutOfStepError(f"a snapshot has all {size} entries, got {len(whole)}")
        model = whole.values
    elif held is None:
        raise OutOfStepError(f"an update from version {update.base} needs a model, this client holds none")
    else:
        model = held.clone()
        for vector in sent:
            if lossless:
                model[vector.indices] = vector.values
            else:
                _add_(model, vector)
    if digest_bits(model) != update.digest:
        raise OutOfStepError(
            f"after {update.kind} to version {update.version} the model is {digest_bits(model).hex()}, "
            f"the server has {update.digest.hex()}"
        )
    return model


def _add_(model: Tensor, sent: SparseVector) -> None:
    """Add the decoded numbers, on both sides in the same way."""
    model[sent.indices] += sent.values
