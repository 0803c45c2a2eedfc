"""The weights that ranks share, and parts of a model that synchronise on their own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rtopk.codec import Codec
from rtopk.exchange import OWNER, Exchange, Traffic
from rtopk.layout import DenseRule, Layout, one_dimensional
from rtopk.local.outer import SGD, Outer
from rtopk.memory import give_back
from rtopk.sparsifier import Sparsifier
from rtopk.transport import AllGather

VECTORS = {"common", "velocity", "residual", OWNER, "arrived"}  # in a state, of one entry for each weight


class CommonWeights:
    """The weights that all nodes share, and a model that leaves them and returns to them."""

    def __init__(self, model: nn.Module, layout: Layout, outer: Outer = SGD()) -> None:  # noqa: B008 -- frozen
        self.layout = layout
        self.outer = outer
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.common = self.vector()
        self._outer_state: dict[str, Tensor] = {}

    def vector(self) -> Tensor:
        """Return a copy of the model's own weights as one flat vector."""
        return self.layout.flatten({n: p.detach() for n, p in self._parameters.items()})

    def update(self) -> Tensor:
        """Return how far the model has moved: common - own weights."""
        return self.common - self.vector()

    def restore(self) -> None:
        """Put the common weights into the model."""
        self._put(self.common)

    @torch.no_grad()
    def _put(self, weights: Tensor) -> None:
        for name, values in self.layout.unflatten(weights).items():
            self._parameters[name].copy_(values)

    def follow(self, mean: Tensor) -> None:
        """Take the outer step along the mean update of all nodes, and put the new weights into the model."""
        step, self._outer_state = self.outer.step(mean, self._outer_state)
        self.common = self.common - step
        self.restore()


class Fragment(CommonWeights):
    """A part of the model that synchronises on its own: sent at one step, applied at that step or a later one."""

    def __init__(
        self, model: nn.Module, layout: Layout, outer: Outer, sparsifier: Sparsifier, exchange: Exchange
    ) -> None:
        super().__init__(model, layout, outer)
        self.sparsifier, self.exchange = sparsifier, exchange
        self.round = 0
        self.sent = 0  # bytes of payload
        self._arriving: Callable[[], tuple[Tensor, Traffic]] | None = None

    @property
    def in_flight(self) -> bool:
        """Say whether a payload was sent whose mean has not been applied."""
        return self._arriving is not None

    def send(self, overlap: bool) -> None:
        """Send how far this fragment moved; with `overlap`, without waiting for the others.

        A byte from every rank goes ahead: if the weights of one are not finite, all raise, and nothing is changed.
        """
        transport, update = self.exchange.transport, self.update()
        if isinstance(transport, AllGather):
            self._require_finite(transport, update)
        payload = self.sparsifier.compress(update, self.round)
        if overlap and isinstance(transport, AllGather):
            work, others = transport.start(payload), transport.nodes - 1

            def arriving() -> tuple[Tensor, Traffic]:
                mean = self.exchange.average(work.wait())  # type: ignore[union-attr]
                return torch.as_tensor(mean), Traffic(payload.numel(), others * payload.numel())

            self._arriving = arriving
        else:
            found = self.exchange.mean([payload], self.round)
            self._arriving = lambda: found

    def _require_finite(self, transport: AllGather, update: Tensor) -> None:
        own = (~update.isfinite().all()).to(torch.uint8).view(1)
        lost = [rank for rank, flag in enumerate(transport.start(own).wait()) if flag.item()]
        if lost:
            ranks = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
            raise ValueError(
                f"round {self.round}: the weights of {ranks} are not finite; nothing was sent or changed on any "
                "rank. Load a checkpoint, and lower the learning rate or clip"
            )

    def apply(self, mix: float) -> None:
        """Take the outer step along the mean that was sent for; keep `mix` of what this rank moved away from it."""
        mean, traffic = self._arrived()
        own = self.vector() if mix else None
        self.follow(mean)
        if own is not None:
            self._put(torch.lerp(self.common, own, mix))
        self.sent += round(traffic.sent)
        self.round += 1
        self._arriving = None

    def _arrived(self) -> tuple[Tensor, Traffic]:
        """Wait for the mean, and keep it."""
        assert self._arriving is not None
        found = self._arriving()
        self._arriving = lambda: found
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; a mean that is on its way is waited for."""
        state = {
            "sparsifier": self.sparsifier.state_dict(),
            **self.exchange.state(),
            "common": self.common.clone(),
            "outer": dict(self._outer_state),
            "round": self.round,
            "sent": self.sent,
        }
        if self.in_flight:
            mean, traffic = self._arrived()
            state |= {"arrived": mean.clone(), "bytes": (traffic.sent, traffic.received)}
        return state

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError for a state that does not fit."""
        missing = {"sparsifier", "common", "outer", "round", "sent"} - set(state)
        if missing:
            raise ValueError(f"state lacks {sorted(missing)}: it is not one of LocalSGD, or is incomplete")
        vectors = {"common": state["common"], **state["outer"], **state["sparsifier"]["memory"]}
        vectors |= {name: state[name] for name in (OWNER, "arrived") if name in state}
        for name in VECTORS & set(vectors):
            if vectors[name].shape != self.common.shape:
                raise ValueError(
                    f"state is of {vectors[name].numel()} entries ({name}), this fragment has "
                    f"{self.common.numel()}; use that model and as many fragments"
                )
            if not bool(vectors[name].isfinite().all()):
                raise ValueError(f"{name} of the state is not finite; use an older checkpoint")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this rank."""
        self.sparsifier.load_state_dict(state["sparsifier"])
        returned = self.exchange.load({OWNER: state[OWNER]} if OWNER in state else {})
        if returned is not None:
            give_back(self.sparsifier.memory, returned)
        self.common, self._outer_state = state["common"].clone(), dict(state["outer"])
        self.round, self.sent, self._arriving = state["round"], state["sent"], None
        if "arrived" in state:
            found = state["arrived"].clone(), Traffic(*state["bytes"])
            self._arriving = lambda: found


def cut(model: nn.Module, fragments: int, dense: DenseRule = one_dimensional) -> list[Layout]:
    """Cut a model's trainable tensors, in their order, into parts of about the same number of entries."""
    tensors = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not 1 <= fragments <= len(tensors):
        raise ValueError(f"fragments must be in [1, {len(tensors)}], the number of tensors, got {fragments}")
    parts: list[list[tuple[str, Tensor]]] = [[] for _ in range(fragments)]
    total, seen = sum(p.numel() for _, p in tensors), 0
    for place, (name, parameter) in enumerate(tensors):
        # By the middle of the tensor; but every part gets one.
        number = min(fragments - 1, (2 * seen + parameter.numel()) * fragments // (2 * total))
        number = max(number, fragments - (len(tensors) - place))
        number = min(number, next((i for i, part in enumerate(parts) if not part), fragments))
        parts[number].append((name, parameter))
        seen += parameter.numel()
    return [Layout.of(part, dense) for part in parts]


def codec_of(layout: Layout, values: str, fixed: bool) -> Codec:
    """Return the codec of a fragment. `fixed`: sizes cannot be negotiated while training goes on."""
    tail = layout.dense_size if fixed else 0
    return Codec(values, fingerprint=layout.fingerprint, fixed=fixed, dense_size=tail)
