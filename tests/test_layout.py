"""Named tensors and the flat vector are the same thing, and the fingerprint names it."""

import pytest
import torch
from torch import nn

from rtopk import Layout, SparseVector
from rtopk.layout import nothing


def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 5))


def test_dense_tensors_are_the_tail():
    layout = Layout.of(model())
    assert layout.names == ("0.weight", "3.weight", "0.bias", "1.weight", "1.bias", "3.bias")
    assert (layout.sparse_size, layout.dense_size) == (4 * 27 + 80, 4 + 4 + 4 + 5)
    assert Layout.of(model(), dense=nothing).dense_size == 0


def test_round_trip_and_views():
    network = model()
    layout = Layout.of(network)
    tensors = {name: p.detach() for name, p in network.named_parameters()}
    flat = layout.flatten(tensors)
    views = layout.unflatten(flat)
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())
    views["3.bias"].zero_()
    assert not flat[-5:].any()


def test_frozen_parameters_are_left_out():
    network = model()
    network[0].weight.requires_grad_(False)
    assert "0.weight" not in Layout.of(network).names


def test_fingerprint_tells_layouts_apart():
    a = Layout.of([("w", torch.ones(2, 3)), ("b", torch.ones(3))])
    others = [
        Layout.of([("w", torch.ones(3, 2)), ("b", torch.ones(3))]),
        Layout.of([("v", torch.ones(2, 3)), ("b", torch.ones(3))]),
        Layout.of([("w", torch.ones(2, 3)), ("b", torch.ones(3))], dense=nothing),
        Layout.of([("b", torch.ones(3)), ("w", torch.ones(2, 3))], dense=nothing),
    ]
    assert len({a.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert a.fingerprint == Layout.of([("w", torch.zeros(2, 3)), ("b", torch.zeros(3))]).fingerprint
    # pinned: a payload or a file written today must be known again tomorrow
    assert a.fingerprint == 0x39A5957F3A2D63FC


def test_refuses_what_does_not_fit():
    layout = Layout.of([("w", torch.ones(2, 3)), ("b", torch.ones(3))])
    with pytest.raises(KeyError, match="missing"):
        layout.flatten({"w": torch.ones(2, 3)})
    with pytest.raises(ValueError, match=r"w must have shape \(2, 3\), got \(3, 2\)"):
        layout.flatten({"w": torch.ones(3, 2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match=r"vector must have shape \(9,\), got \(8,\)"):
        layout.unflatten(torch.ones(8))


def test_sparse_vector_checks():
    with pytest.raises(ValueError, match="int64"):
        SparseVector(torch.tensor([1], dtype=torch.int32), torch.ones(1), 3)
    with pytest.raises(ValueError, match="shape of indices"):
        SparseVector(torch.tensor([1, 2]), torch.ones(1), 3)
    with pytest.raises(ValueError, match="cannot hold"):
        SparseVector(torch.tensor([0, 1]), torch.ones(2), 1)
    for indices in ([2, 1], [1, 1], [0, 3], [-1, 0]):
        with pytest.raises(ValueError, match=r"ascending|lie in"):
            SparseVector(torch.tensor(indices), torch.ones(2), 3).check()
