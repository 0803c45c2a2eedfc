"""What the FSDP engine waits for in the middle of backward, counted on a simulated device."""

from types import SimpleNamespace

import torch
from fake_device import FakeDevice

from rtopk.fsdp import shards


def test_gradients_that_fsdp_sets_aside_are_one_wait(monkeypatch):
    """Zeros and means of an earlier round, in the middle of backward, if gradients are not set to None."""
    monkeypatch.setattr(shards, "_local", lambda gradient: gradient)
    drawn = {
        "zero": torch.zeros(3),
        "mean": torch.ones(3),
        "mean that became NaN": torch.tensor([0.0, float("nan"), 1.0]),
        "another's": torch.ones(3),
    }
    with FakeDevice() as device:
        parameters = {name: SimpleNamespace(grad=device.tensor(made)) for name, made in drawn.items()}
        parameters["none"] = SimpleNamespace(grad=None)
        means = {id(parameters[name]) for name in ("mean", "mean that became NaN")}
        written = SimpleNamespace(means=means, forget=means.discard)
        state = SimpleNamespace(parameters=parameters, written=written, _zeros={}, _waiting={})
        shards.State._set_aside(state, list(parameters))
        assert len(device.waits) == 1, device.waits
        assert (list(state._zeros), list(state._waiting)) == (["zero"], ["mean"])
        left = [name for name, parameter in parameters.items() if parameter.grad is not None]
        assert left == ["mean that became NaN", "another's"]
        assert means == {id(parameters["mean that became NaN"])}
        device.begin()
        shards.State._set_aside(state, ["none"])
        assert not device.waits
