"""What a few steps of a job predict about the map of regimes, written down before the map's runs.

For each pair of levels of overlap and nodes, a dense run of the task goes some rounds, and `Arrival` watches its
gradients with and without a memory. The choice under which most arrives is predicted to win.
"""

import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

from rtopk.studies.lab.arrival import Arrival
from rtopk.studies.lab.gradients import node_gradient, overlap
from rtopk.studies.paper.regimes import MEANS, RULES, Design
from rtopk.studies.train.loop import Run


def predict(design: Design, rounds: int, on_round: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
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
