"""Past this machine: the predicted winner over nodes and rates, for large models and slow links."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rtopk.tools.advise.choose import Advice, choose
from rtopk.tools.advise.cost import Link, Prediction, Workload, predict
from rtopk.tools.advise.machine import Machine

NODES = (2, 4, 8, 16, 32, 64, 128, 256, 512)
MBITS = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0)


@dataclass(frozen=True)
class Scene:
    """A model, what its step takes without communication, and how far apart the nodes are."""

    name: str
    size: int
    step_ms: float
    latency_ms: float


SCENES = (
    Scene("ResNet-18 (11 M), one room", 11_200_000, 100, 0.1),
    Scene("ResNet-18 (11 M), across a continent", 11_200_000, 100, 30),
    Scene("7 B model, one room", 7_000_000_000, 5_000, 0.1),
    Scene("7 B model, across a continent", 7_000_000_000, 5_000, 30),
)


@dataclass(frozen=True)
class Point:
    """What is predicted for a scene on one link."""

    scene: Scene
    nodes: int
    mbit: float
    predictions: list[Prediction]
    advice: Advice


def simulate(
    machine: Machine,
    scenes: Sequence[Scene] = SCENES,
    nodes: Sequence[int] = NODES,
    mbits: Sequence[float] = MBITS,
) -> Iterator[Point]:
    """Predict and choose on every combination."""
    for scene in scenes:
        work = Workload.of_size(scene.size, scene.step_ms)
        for n in nodes:
            for mbit in mbits:
                predictions = predict(machine, work, Link(n, mbit, scene.latency_ms))
                yield Point(scene, n, mbit, predictions, choose(predictions))
