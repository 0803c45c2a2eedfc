"""How well a job's own gradients arrive under each rule and mean, and what that predicts about the map of regimes.

Beside a run that moves no differently for it, every choice compresses the same gradients. After some steps, the sum
of what arrived is held against the sum of what was due: the cosine between the two. A learning rate that is tuned
makes up for length, so only the direction counts.

The prediction is written down before the map's runs. For each pair of levels of overlap and nodes, a dense run of
the task goes some rounds, and `Arrival` watches its gradients with and without a memory. How a rule's lead over
top-k depends on how much more of the gradients arrives, and on how long an entry waits for its draw, is learnt from
another map: a plane with a memory and one without.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
from torch import Tensor

from rtopk.aggregate import Mean, average
from rtopk.memory import ErrorFeedback, NoMemory
from rtopk.select import RTopK, top_k
from rtopk.sparsifier import Sparsifier, entries_sent
from rtopk.studies.paper.regimes import DENSITY, DRAWS, MEANS, RULES, Design
from rtopk.studies.paper.regimes_page import Map, more_arrives
from rtopk.studies.train.loop import Node, Run, seeded


@dataclass(frozen=True)
class Choice:
    """A rule and a mean; r / k is 1 for top-k."""

    r_over_k: float
    mean: Mean

    @property
    def label(self) -> str:
        """Name both, as a user would choose them."""
        rule = "TopK()" if self.r_over_k == 1 else f"RTopK(r_over_k={self.r_over_k:g})"
        return f'selector={rule}, mean="{self.mean}"'


class Arrival:
    """Watch the gradients of n nodes, with a memory or without."""

    def __init__(self, nodes: int, d: int, density: float, memory: bool, seed: int = 0) -> None:
        factors = sorted({1.0, min(2.0, 1 / density), min(float(nodes), 1 / density)})
        self.memory = memory
        self._nodes = {
            factor: [
                Sparsifier(
                    RTopK(r_over_k=factor),
                    density,
                    ErrorFeedback() if memory else NoMemory(),
                    seed=seed,
                    node=i,
                )
                for i in range(nodes)
            ]
            for factor in factors
        }
        means: tuple[Mean, ...] = ("nodes", "received")
        self._arrived = {Choice(factor, mean): torch.zeros(d) for factor in factors for mean in means}
        self._due, self._step = torch.zeros(d), 0

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Compress one step's gradients, one of each node, under every choice."""
        self._due += torch.stack(list(gradients)).mean(0)
        for factor, nodes in self._nodes.items():
            vectors = [
                node.codec.decode(node.compress(gradient, self._step))
                for node, gradient in zip(nodes, gradients, strict=True)
            ]
            for choice, arrived in self._arrived.items():
                if choice.r_over_k == factor:
                    arrived += average(vectors, choice.mean)
        self._step += 1

    def cosines(self) -> dict[Choice, float]:
        """Return the cosine between what arrived and what was due, under every choice."""
        return {
            choice: float(torch.nn.functional.cosine_similarity(arrived, self._due, dim=0))
            for choice, arrived in self._arrived.items()
        }


def node_gradient(run: Run, node: Node) -> Tensor:
    """Return the gradient that the node will send from in this round; leave its buffers as they are."""
    buffers = node.buffers
    with run.at(node), seeded(run.config.seed, "forward", node.number, run.round):
        gradient, _ = run.gradient(node, run.config.rate(run.round))
    node.buffers = buffers
    return gradient


def overlap(gradients: Sequence[Tensor], k: int) -> float:
    """Return the mean part of one node's k largest entries that is also among another's."""
    sets = [set(top_k(g, k).tolist()) for g in gradients]
    pairs = list(itertools.combinations(sets, 2))
    return sum(len(a & b) for a, b in pairs) / (k * len(pairs)) if pairs else 1.0


def watch(design: Design, rounds: int, on_round: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Return what arrives in each kind of job under each rule and mean, after so many rounds."""
    found = []
    factors = design.factors
    for at_overlap, at_nodes in itertools.product((0, 1), repeat=2):
        options = {**factors["overlap"][at_overlap][1], **factors["nodes"][at_nodes][1]}
        dense = dataclasses.replace(
            design.config,
            method="dense",
            memory="none",
            learning_rate=design.rates[1],
            rounds=rounds,
            **options,
        )
        run = Run(dense)
        arrivals = [Arrival(dense.nodes, run.layout.size, DENSITY, memory) for memory in (False, True)]
        shared = 0.0
        while run.round < rounds:
            gradients = [node_gradient(run, node) for node in run.nodes]
            shared += overlap(gradients, entries_sent(run.layout.size, DENSITY)) / rounds
            for arrival in arrivals:
                arrival.observe(gradients)
            run.advance()
            on_round()
        for at_memory, arrival in enumerate(arrivals):
            cosines = {(choice.r_over_k, choice.mean): value for choice, value in arrival.cosines().items()}
            found.append(
                {
                    "memory": at_memory, "overlap": at_overlap, "nodes": at_nodes, "measured_overlap": shared,
                    "rounds": rounds,
                    "cosines": {
                        rule: {mean: cosines[factor or float(dense.nodes), mean] for mean in MEANS}
                        for rule, factor in RULES.items()
                    },
                }
            )  # fmt: skip
    return found


def predict(watched: list[dict[str, Any]], design: Design, known: Map) -> list[dict[str, Any]]:
    """Add each rule's predicted lead over top-k, in points, in short and in long runs, learnt from a known map."""
    planes = [_plane(known, memory) for memory in (0, 1)]

    def lead(cell: dict[str, Any], rule: str, rounds: int) -> float:
        found: float = sum(map(mul, planes[cell["memory"]], _features(design, cell, rule, rounds)))
        return found

    return [
        {**cell, "leads": {rule: [lead(cell, rule, rounds) for rounds in (0, 1)] for rule in DRAWS}}
        for cell in watched
    ]


def _plane(known: Map, memory: int) -> list[float]:
    """Return the coefficients of the features that fit a map's leads best, least squares."""
    leads = known.leads()
    jobs = [(at, rule) for at in known.design.jobs if at[0] == memory for rule in DRAWS]
    features = [_features(known.design, known.foretold(at), rule, at[3]) for at, rule in jobs]
    measured = torch.tensor([leads[job].mean for job in jobs])
    found: list[float] = torch.linalg.lstsq(torch.tensor(features), measured[:, None]).solution[:, 0].tolist()
    return found


def _features(design: Design, cell: Mapping[str, Any], rule: str, rounds: int) -> list[float]:
    """Return 1, how much more arrives than under top-k, and how long an entry waits for its draw.

    The wait is (r / k - 1) over the visits, density x rounds, that a run makes to an entry.
    """
    factor = RULES[rule] or design.nodes[cell["nodes"]]
    return [1.0, more_arrives(cell["cosines"])[rule], (factor - 1) / (DENSITY * design.rounds[rounds])]
