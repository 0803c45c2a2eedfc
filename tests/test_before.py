"""States that an older version wrote: this one goes on from them as that one did.

The files in tests/before were made by commit 044ea21, before the modules moved to their rooms.
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from rtopk import Codec, Dealt, ErrorFeedback, MomentumCorrection, NoMemory, RAgeK, RTopK, Sparsifier, TopK
from rtopk.local import LocalSGD

BEFORE = Path(__file__).parent / "before"
NODES = {
    "rtopk-ef": (RTopK(nodes=4), ErrorFeedback),
    "topk-momentum": (TopK(), MomentumCorrection),
    "rage": (RAgeK(nodes=4), ErrorFeedback),
    "dealt": (Dealt(nodes=4), NoMemory),
}


def gradient(d, step, seed=0):
    return torch.randn(d, generator=torch.Generator().manual_seed(1000 * seed + step)) ** 3


def network():
    return torch.nn.Sequential(torch.nn.Linear(12, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))


def train(model, optimizer, steps, rank):
    for step in steps:
        inputs = gradient(12 * 6, step, rank + 1).view(6, 12).clamp(-2, 2)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), torch.arange(6) % 4).backward()
        optimizer.step()


@pytest.mark.parametrize("name", NODES)
def test_a_sparsifier_goes_on_with_the_same_payloads(name):
    saved = torch.load(BEFORE / "sparsifiers.pt", weights_only=True)[name]
    rule, memory = NODES[name]
    node = Sparsifier(rule, 0.05, memory(), Codec("int8", "stochastic"), seed=3, node=1)
    node.load_state_dict(saved["state"])
    for step, payload in zip((4, 5), saved["payloads"], strict=True):
        assert torch.equal(node.compress(gradient(300, step), step), payload)


def test_local_sgd_goes_on_to_the_same_weights():
    saved = torch.load(BEFORE / "local.pt", weights_only=True)
    model = network()
    model.load_state_dict(saved["weights"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSGD(model, 2, density=0.1, outer="nesterov")
    local.load_state_dict(saved["state"])
    for step in range(5, 9):
        train(model, optimizer, [step], 0)
        local.step()
    # Not to the bit: the processor decides how a matrix product is summed. These weights move by 0.02 and more.
    torch.testing.assert_close(model.state_dict(), saved["after"], rtol=0.0, atol=1e-6)


def test_a_flower_client_and_a_server_go_on(tmp_path, monkeypatch):
    """The client's file is read and its residual is there; the server's state is taken as it is."""
    pytest.importorskip("flwr")
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent / "flower")])
    from flwr.serverapp.strategy import FedAvg
    from harness import LocalGrid, initial, quadratic_app, tensors

    from rtopk.flower import RTopKMod, RTopKStrategy

    store = tmp_path / "clients"
    shutil.copytree(BEFORE / "flower" / "clients", store)
    before = {path.name: path.read_bytes() for path in store.glob("*.state")}
    apps = [quadratic_app(RTopKMod(density=0.1, store=store, client_id=f"c{i}"), float(i)) for i in range(3)]
    saved = torch.load(BEFORE / "flower" / "server.pt", weights_only=True)
    inner = FedAvg(fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3)
    strategy = RTopKStrategy(inner, downlink_density=0.2)
    strategy.load_state_dict(saved["state"])
    result = strategy.start(LocalGrid(apps), initial(), num_rounds=2, timeout=5)
    assert list(strategy.refusals) == []
    moved = tensors(result.arrays)
    assert all(not torch.equal(moved[name], tensor) for name, tensor in saved["arrays"].items())
    assert {path.name for path in store.glob("*.state")} == set(before)
    assert all((store / name).read_bytes() != raw for name, raw in before.items())
