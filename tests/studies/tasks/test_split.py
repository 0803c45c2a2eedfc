"""Dividing data among nodes."""

import pytest
import torch

from rtopk.studies.tasks.objectives import split


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "class"])
def test_every_example_goes_to_one_node(kind):
    targets = torch.arange(1000) % 10
    parts = split(targets, 7, kind, alpha=0.5, seed=3)
    assert sorted(torch.cat(parts).tolist()) == list(range(1000))
    assert [p.tolist() for p in split(targets, 7, kind, 0.5, 3)] == [p.tolist() for p in parts]
    assert [p.tolist() for p in split(targets, 7, kind, 0.5, 4)] != [p.tolist() for p in parts]


def test_dirichlet_is_less_alike_than_iid():
    targets = torch.arange(2000) % 10

    def largest_share(parts):
        return max(float(torch.bincount(targets[p], minlength=10).max() / len(p)) for p in parts if len(p))

    assert largest_share(split(targets, 5, "iid", 0.5, 0)) < 0.2
    assert largest_share(split(targets, 5, "dirichlet", 0.1, 0)) > 0.4


def test_split_by_class_gives_a_node_few_classes():
    targets = torch.arange(1000) % 10
    parts = split(targets, 5, "class", 0.5, 0)
    assert [sorted(set(targets[part].tolist())) for part in parts] == [[2 * i, 2 * i + 1] for i in range(5)]


def test_refuses_more_nodes_than_examples():
    with pytest.raises(ValueError, match="3 examples cannot be divided among 4 nodes"):
        split(torch.zeros(3), 4, "iid", 0.5, 0)
