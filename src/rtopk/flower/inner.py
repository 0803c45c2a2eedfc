"""Facts about Flower's strategies: whether they need every client's weights, and which state they keep.

Strategies that compare or clip clients are disarmed if they see only the average client. A strategy's state
must be saved with ours, or a restarted run takes a different course.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)


@dataclass(frozen=True)
class Known:
    """A strategy of Flower: `each` if it must see every client, `state` its attributes that rounds change.

    `current_arrays` is left out where `configure_train` sets it anew.
    """

    each: bool
    state: tuple[str, ...] = ()


KNOWN: dict[type, Known] = {
    FedAvg: Known(each=False),
    FedProx: Known(each=False),
    FedAvgM: Known(each=False, state=("current_arrays", "momentum_vector")),
    FedAdagrad: Known(each=False, state=("m_t", "v_t")),
    FedAdam: Known(each=False, state=("m_t", "v_t")),
    FedYogi: Known(each=False, state=("m_t", "v_t")),
    FedMedian: Known(each=True),
    FedTrimmedAvg: Known(each=True),
    Krum: Known(each=True),
    MultiKrum: Known(each=True),
    Bulyan: Known(each=True),
    QFedAvg: Known(each=True),
    DifferentialPrivacyServerSideFixedClipping: Known(each=True),
    DifferentialPrivacyServerSideAdaptiveClipping: Known(each=True, state=("clipping_norm",)),
}
CLIPPED_BY_CLIENTS = (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyClientSideAdaptiveClipping,
)


def choose_each(inner: Strategy, each: bool | None) -> bool:
    """Return whether a strategy gets every client's weights: what it needs, or what is asked for if that suffices.

    A strategy with its own `aggregate_train` gets them, because we cannot know what it needs.
    """
    if not isinstance(inner, Strategy):
        raise TypeError(f"inner must be an instance of a strategy of flwr.serverapp.strategy, got {inner!r}")
    for part in chain(inner):
        if isinstance(part, CLIPPED_BY_CLIENTS):
            raise ValueError(
                f"{type(part).__name__} needs updates that clients clip, and error feedback adds to them what "
                "was kept back: their norm is not bounded. Clip at the server: "
                "DifferentialPrivacyServerSideFixedClipping or ...AdaptiveClipping"
            )
    lineage = type(inner).__mro__
    written = next(c for c in lineage if "aggregate_train" in vars(c))
    needed = any(KNOWN[c].each for c in lineage if c in KNOWN)
    if each is None:
        return needed or written not in KNOWN
    if needed and not each:
        raise ValueError(
            f"{type(inner).__name__} must see every client's weights: each must be True or None, got False"
        )
    return each


def chain(inner: Any) -> list[Any]:
    """Return a strategy and the strategies that it wraps."""
    found = [inner]
    while isinstance(getattr(found[-1], "strategy", None), Strategy):
        found.append(found[-1].strategy)
    return found


def save(inner: Strategy) -> list[dict[str, Any]]:
    """Return the state of a strategy and of those that it wraps: tensors and plain values.

    An unknown strategy may define `state_dict` and `load_state_dict`; otherwise it is refused.
    """
    return [{"type": type(part).__name__, "state": _save(part)} for part in chain(inner)]


def load(inner: Strategy, state: list[dict[str, Any]]) -> None:
    """Continue from what `save` returned."""
    parts = chain(inner)
    names, saved = [type(part).__name__ for part in parts], [entry["type"] for entry in state]
    if names != saved:
        raise ValueError(f"state is of the inner strategy {saved}, this is {names}")
    for part, entry in zip(parts, state, strict=True):
        if type(part) not in KNOWN:
            part.load_state_dict(entry["state"])
            continue
        for name, value in entry["state"].items():
            setattr(part, name, _thaw(value))


def _save(part: Any) -> Mapping[str, Any]:
    known = KNOWN.get(type(part))
    if known is not None and getattr(part, "accountant", None) is None:
        return {name: _freeze(getattr(part, name)) for name in known.state}
    if known is None and hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        state: Mapping[str, Any] = part.state_dict()
        return state
    what = "a privacy accountant" if known else "state that is not known"
    raise ValueError(
        f"{type(part).__name__} holds {what}, so a restarted run would be another one: "
        "give it state_dict() and load_state_dict(), or do not save"
    )


def _freeze(value: Any) -> Any:
    if isinstance(value, ArrayRecord):
        return {"record": {name: _tensor(array.numpy()) for name, array in value.items()}}
    if isinstance(value, dict):
        return {"dict": {name: _tensor(array) for name, array in value.items()}}
    if isinstance(value, list):
        return {"list": [_tensor(array) for array in value]}
    return value  # None or a number


def _thaw(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, items), *_ = value.items()
    if kind == "list":
        return [tensor.numpy().copy() for tensor in items]
    arrays = {name: tensor.numpy().copy() for name, tensor in items.items()}
    return arrays if kind == "dict" else ArrayRecord({name: Array(a) for name, a in arrays.items()})


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def snapshot(inner: Strategy) -> list[dict[str, Any]]:
    """Copy the state of a strategy, so that a failed aggregation can be undone."""
    return [_copied(vars(part)) for part in chain(inner)]


def undo(inner: Strategy, before: list[dict[str, Any]]) -> None:
    """Restore a strategy to a snapshot, which stays valid."""
    for part, attributes in zip(chain(inner), before, strict=True):
        vars(part).clear()
        vars(part).update(_copied(attributes))


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    holders = (dict, list, ArrayRecord)  # a strategy may empty these; arrays it replaces
    return {name: value.copy() if isinstance(value, holders) else value for name, value in attributes.items()}
