"""What a few steps of a job predict about the map of regimes, written down before the map's runs.

For each pair of levels of overlap and nodes, a dense run of the task goes some rounds, and `Arrival` watches its
gradients with and without a memory. How a rule's lead over top-k depends on how much more of the gradients arrives,
and on how long an entry waits for its draw, is learnt from another map: a plane with a memory and one without.
"""

import dataclasses
from collections.abc import Callable, Mapping
from itertools import product
from operator import mul
from typing import Any

import torch

from rtopk.sparsifier import entries_sent
from rtopk.studies.lab.arrival import Arrival
from rtopk.studies.lab.gradients import node_gradient, overlap
from rtopk.studies.paper.regimes import DENSITY, DRAWS, MEANS, RULES, Design
from rtopk.studies.paper.regimes_page import Map, more_arrives
from rtopk.studies.train.loop import Run


def watch(design: Design, rounds: int, on_round: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Return what arrives in each kind of job under each rule and mean, after so many rounds."""
    found = []
    factors = design.factors
    for at_overlap, at_nodes in product((0, 1), repeat=2):
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
