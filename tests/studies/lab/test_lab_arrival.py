"""What arrives of known gradients, under each rule and mean."""

import pytest
import torch

from rtopk.seed import generator
from rtopk.studies.lab.arrival import Arrival, Choice


def watched(gradients_of, steps, memory, nodes=4, d=400, density=0.05):
    arrival = Arrival(nodes, d, density, memory)
    for step in range(steps):
        arrival.observe(gradients_of(step))
    return arrival.cosines()


def steady(step, nodes=4, d=400):
    """The same gradient at all nodes, in every step: its entries fall slowly."""
    return [torch.linspace(2, 1, d) for _ in range(nodes)]


def test_everything_arrives_at_density_1():
    rng = generator(0)
    cosines = watched(lambda step: list(torch.randn(4, 400, generator=rng)), 3, memory=False, density=1.0)
    assert set(cosines) == {Choice(1.0, "nodes"), Choice(1.0, "received")}  # r cannot exceed d
    assert all(value == pytest.approx(1.0, abs=1e-6) for value in cosines.values())


def test_without_a_memory_top_k_sends_the_same_entries_for_ever():
    cosines = watched(steady, 60, memory=False)
    top = torch.zeros(400)
    top[:20] = steady(0)[0][:20]
    exact = torch.nn.functional.cosine_similarity(top, steady(0)[0], dim=0)
    assert cosines[Choice(1.0, "nodes")] == pytest.approx(float(exact), abs=1e-5)
    # Draws reach all of the 80 largest.
    assert cosines[Choice(4.0, "nodes")] > 1.8 * cosines[Choice(1.0, "nodes")]


def test_with_a_memory_all_of_it_arrives_in_the_end():
    assert min(watched(steady, 60, memory=True).values()) > 0.95


def test_the_mean_of_received_does_not_favour_what_many_nodes_send():
    """One entry that all nodes send and one that a single node sends are due in the ratio of 4 to 1."""

    def gradients(step):
        found = [torch.zeros(400) for _ in range(4)]
        for node, gradient in enumerate(found):
            gradient[0] = 1.0
            gradient[1 if node == 0 else 10 + node] = 1.0
        return found

    cosines = watched(gradients, 1, memory=False, density=2 / 400)
    assert cosines[Choice(1.0, "nodes")] == pytest.approx(1.0, abs=1e-6)
    assert cosines[Choice(1.0, "received")] == pytest.approx(
        (1 + 4 / 4) / (5**0.5 * (1 + 4 / 16) ** 0.5), abs=1e-5
    )


def test_a_choice_names_itself_as_a_user_writes_it():
    assert Choice(1.0, "nodes").label == 'selector=TopK(), mean="nodes"'
    assert Choice(5.0, "received").label == 'selector=RTopK(r_over_k=5), mean="received"'
