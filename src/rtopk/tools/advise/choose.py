"""Which method to use: the fastest, unless what sends more of the gradient is nearly as fast."""

from collections.abc import Sequence
from dataclasses import dataclass

from rtopk.tools.advise.cost import Prediction

WORTH = 0.75  # compression must save a quarter of dense's step: less is not worth tuning rates anew
NEARLY = 1.05  # within this factor of the fastest, the one that sends more is preferred


@dataclass(frozen=True)
class Advice:
    """The recommendation and the reason."""

    choice: Prediction
    reason: str


def information(prediction: Prediction) -> tuple[float, float]:
    """Order methods by how much of the gradient they send: entries first, bits second."""
    bits = {"fp32": 32, "fp16": 16, "4bit": 4}.get(prediction.values or "fp32", 32)
    if prediction.method == "dense":
        return (2.0, 32)
    if prediction.method == "fp16":
        return (2.0, 16)
    return (prediction.density or 0.0, bits)


def choose(predictions: Sequence[Prediction]) -> Advice:
    """Recommend a method; dense wherever compression does not pay."""
    dense = next(p for p in predictions if p.method == "dense")
    fastest = min(predictions, key=lambda p: p.step_ms)
    if fastest.step_ms > WORTH * dense.step_ms:
        return Advice(
            dense,
            f"nothing is more than {100 * (1 - WORTH):.0f} % faster than dense all-reduce "
            f"({dense.step_ms:,.0f} ms; the fastest, {name(fastest)}, {fastest.step_ms:,.0f} ms): use dense",
        )
    near = [p for p in predictions if p.step_ms <= NEARLY * fastest.step_ms]
    choice = max(near, key=information)
    return Advice(
        choice,
        f"{name(choice)} takes {choice.step_ms:,.0f} ms a step, dense {dense.step_ms:,.0f} ms: "
        f"{dense.step_ms / choice.step_ms:.1f} times as fast",
    )


def name(prediction: Prediction) -> str:
    """Name a method with its density and values."""
    parts = [prediction.method]
    if prediction.density is not None:
        parts.append(f"{100 * prediction.density:g} %")
    if prediction.values is not None:
        parts.append(prediction.values)
    return " ".join(parts)
