"""What a few steps of a job predict about the map of regimes, written down before the map's runs.

For each pair of levels of overlap and nodes, a dense run of the task goes some rounds, and `Arrival` watches its
gradients with and without a memory. How many points a rule's lead over top-k is worth for how much more of the
gradients arrives is learnt from another map: a straight line, one with a memory and one without.
"""

import dataclasses
from collections.abc import Callable
from itertools import product
from statistics import linear_regression
from typing import Any

from rtopk.studies.lab.arrival import Arrival
from rtopk.studies.lab.gradients import node_gradient, overlap
from rtopk.studies.paper.regimes import MEANS, RULES, Design
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
        arrivals = [Arrival(dense.nodes, run.layout.size, 0.01, memory) for memory in (False, True)]
        shared = 0.0
        while run.round < rounds:
            gradients = [node_gradient(run, node) for node in run.nodes]
            shared += overlap(gradients, run.layout.size // 100) / rounds
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


def predict(watched: list[dict[str, Any]], known: Map) -> list[dict[str, Any]]:
    """Add each rule's predicted lead over top-k, in points, learnt from a map whose jobs were watched alike."""
    lines = [_line(known, memory) for memory in (0, 1)]
    return [
        {
            **cell,
            "leads": {
                rule: lines[cell["memory"]][0] + lines[cell["memory"]][1] * more
                for rule, more in more_arrives(cell["cosines"]).items()
            },
        }
        for cell in watched
    ]


def _line(known: Map, memory: int) -> tuple[float, float]:
    """Return intercept and slope of the leads over top-k against how much more arrives."""
    leads = known.leads()
    points = [
        (more, leads[at, rule].mean)
        for at in known.design.jobs
        if at[0] == memory
        for rule, more in more_arrives(known.foretold(at)["cosines"]).items()
    ]
    slope, intercept = linear_regression(*zip(*points, strict=True))
    return intercept, slope
