"""Local SGD with an outer optimizer: on two ranks of gloo, and its optimizers against torch's."""

import math
import os
import socket
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from rtopk import Dealt, NoMemory, Threshold, rtop_k
from rtopk.local import PRESETS, LocalSGD
from rtopk.local.fragments import cut
from rtopk.local.outer import SGD, Nesterov, by_name
from rtopk.memory import DecayedErrorFeedback
from rtopk.seed import generator

STEPS = 100


def test_nesterov_is_torchs():
    start, rng = torch.randn(50), torch.Generator().manual_seed(1)
    weight = nn.Parameter(start.clone())
    theirs = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    ours, state = start.clone(), {}
    for _ in range(5):
        update = torch.randn(50, generator=rng)
        weight.grad = update.clone()
        theirs.step()
        step, state = Nesterov().step(update, state)
        ours -= step
    assert torch.allclose(ours, weight.detach(), atol=1e-5)


def test_sgd_with_rate_one_is_the_update_itself():
    update = torch.randn(5)
    assert SGD().step(update, {})[0] is update


def test_decayed_error_feedback():
    memory = DecayedErrorFeedback(0.5)
    memory.add(torch.tensor([4.0, 2.0]))
    assert memory.add(torch.tensor([1.0, 1.0])).tolist() == [3.0, 2.0]
    with pytest.raises(ValueError, match="finite"):
        memory.add(torch.tensor([float("nan"), 0.0]))
    assert memory.residual.tolist() == [3.0, 2.0]
    with pytest.raises(ValueError, match="decay"):
        DecayedErrorFeedback(0.0)


def test_unknown_outer():
    with pytest.raises(ValueError, match="sgd, nesterov, sparseloco"):
        by_name("adam")


def train(model, local, steps, rank):
    return descend(model, steps, torch.Generator().manual_seed(rank), local.step)


def descend(model, steps, rng, after=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        inputs = torch.randn(16, 6, generator=rng)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after()
    return float(loss.detach())


def make():
    model = nn.Linear(6, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    return model


def test_one_rank_at_density_one_is_plain_training():
    model, plain = make(), make()
    local = LocalSGD(model, 3, density=1.0)
    train(model, local, 9, 0)
    train(plain, LocalSGD(make(), 100), 9, 0)
    assert local.round == 3
    assert torch.allclose(model.weight, plain.weight, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"fragments": 2, "delay": 1}])
def test_synchronise_leaves_nothing_on_its_way(options):
    model = make()
    local = LocalSGD(model, 4, density=1.0, **options)
    train(model, local, 3, 0)  # with a delay, a fragment is on its way
    assert any(fragment.in_flight for fragment in local.fragments) == bool(options)
    local.synchronise()
    assert not any(fragment.in_flight for fragment in local.fragments)
    assert torch.equal(local.common, torch.cat([model.weight.detach().flatten(), model.bias.detach()]))
    assert not torch.equal(local.common, torch.full((7,), 0.1))


def test_what_is_on_its_way_is_applied_even_if_the_delay_changes():
    model, other = make(), make()
    local, without = LocalSGD(model, 4, density=1.0, delay=1), LocalSGD(other, 4, density=1.0)
    train(model, local, 3, 0)
    other.load_state_dict(model.state_dict())
    without.load_state_dict(local.state_dict())
    train(model, local, 1, 1)
    train(other, without, 1, 1)
    assert torch.equal(without.common, local.common)


def test_the_mean_follows_the_memory():
    assert LocalSGD(make(), 1).mean == "nodes"
    assert LocalSGD(make(), 1, memory=NoMemory()).mean == "received"
    assert LocalSGD(make(), 1, memory=NoMemory(), mean="nodes").mean == "nodes"


@pytest.mark.parametrize("outer", ["sgd", "nesterov", "sparseloco"])
def test_state_goes_on(outer):
    whole = make()
    local = LocalSGD(whole, 2, density=0.4, outer=outer)
    train(whole, local, 4, 0)
    copy = make()
    copy.load_state_dict(whole.state_dict())
    resumed = LocalSGD(copy, 2, density=0.4, outer=outer)
    resumed.load_state_dict(local.state_dict())
    train(whole, local, 4, 1)
    train(copy, resumed, 4, 1)
    assert torch.equal(whole.weight, copy.weight)


def _without(*path):
    def change(state):
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return change


def _with(value, *path):
    def change(state):
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = value

    return change


LAST = ("fragments", 1)


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("steps"), "state lacks 'steps'"),
        (_without("fragments", 1), "1 fragments, this has 2"),
        (_without(*LAST, "round"), r"state lacks \['round'\]"),
        (_with(torch.zeros(3), *LAST, "common"), r"3 entries \(common\), this fragment has 1"),
        (_with(torch.zeros(3), *LAST, "sparsifier", "memory", "residual"), "3 entries .residual."),
        (_with(torch.zeros(3), *LAST, "outer", "velocity"), "3 entries .velocity."),
        (_with(torch.zeros(3), *LAST, "arrived"), "3 entries .arrived."),
        (_with(torch.zeros(3), *LAST, "owner_residual"), "3 entries .owner_residual."),
        (_with(torch.full((1,), torch.nan), *LAST, "common"), "common of the state is not finite"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, said, fresh):
    options = {"density": 0.4, "outer": "nesterov", "fragments": 2, "delay": 1}
    model, other = make(), make()
    local, target = LocalSGD(model, 4, **options), LocalSGD(other, 4, **options)
    train(model, local, 11, 0)  # the second fragment is on its way
    if not fresh:
        train(other, target, 7, 1)
    state, before = deepcopy(local.state_dict()), deepcopy(target.state_dict())
    assert "arrived" in state["fragments"][1]
    change(state)
    with pytest.raises(ValueError, match=said):
        target.load_state_dict(state)
    assert str(target.state_dict()) == str(before)


OUTER = ("sgd", "nesterov", "sparseloco")


EXCHANGES = {  # name -> options; the first two are to be equal
    "gathered": {},
    "whole union": {"exchange": "all-reduce", "owner_density": "all"},
    "reduced": {"exchange": "all-reduce"},
    "streaming": {"fragments": 2, "delay": 2, "mix": 0.5, "outer": "nesterov", "values": "fp16"},
}
STREAMING = {"density": 1.0, "outer": "nesterov", "fragments": 2, "delay": 2, "mix": 0.5}


def alike(one, other):
    """Compare states: tensors by their bits."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def _rank(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        for outer in OUTER:
            model = make()
            local = LocalSGD(model, 5, density=0.5, outer=outer)
            loss = train(model, local, STEPS, rank)
            found = {"weights": local.common, "loss": loss, "sent": local.sent}
            torch.save(found, f"{folder}/{outer}-{rank}.pt")
        for name, options in EXCHANGES.items():
            model = make()
            local = LocalSGD(model, 5, density=0.3, **options)
            train(model, local, 21, rank)  # with fragments and a delay, one is on its way
            assert any(fragment.in_flight for fragment in local.fragments) == (name == "streaming")
            state = local.state_dict()
            again = LocalSGD(
                make(), 5, density=0.3, **options
            )  # from common weights; then what this rank had
            again.model.load_state_dict(model.state_dict())
            again.load_state_dict(state)
            for one in (local, again):
                train(one.model, one, 20, rank)
            torch.save([local.common, again.common], f"{folder}/{name}-{rank}.pt")
        model = make()
        local = LocalSGD(model, 5, **STREAMING)
        train(model, local, STEPS, rank)
        torch.save([local.common, model.weight.detach()], f"{folder}/by-hand-{rank}.pt")
        for options in ({}, {"delay": 2}, {"exchange": "all-reduce"}):  # a NaN on one rank, told to both
            model = make()
            local = LocalSGD(model, 5, density=0.3, **options)
            train(model, local, 11, rank)
            local.synchronise()
            before = local.state_dict()
            if rank == 1:
                model.bias.data.fill_(math.nan)
            with pytest.raises(ValueError, match="the weights of rank 1 are not finite"):
                train(model, local, 20, rank)
            assert alike(local.state_dict()["fragments"], before["fragments"])
        with pytest.raises(ValueError, match="state is of 1 ranks, this job has 2"):
            local.load_state_dict({**before, "world": 1})
        with torch.no_grad():
            model.weight += rank
        with pytest.raises(ValueError, match="other weights than rank 0"):
            LocalSGD(model, 5)
    finally:
        dist.destroy_process_group()


def by_hand(outer):
    """The same two ranks in one process, slow and obvious; return the weights and what rank 0 kept back."""
    rngs = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    residuals, velocity = [torch.zeros(7), torch.zeros(7)], torch.zeros(7)
    common = torch.full((7,), 0.1)
    for round_ in range(STEPS // 5):
        mean = torch.zeros(7)
        for rank in (0, 1):
            own = nn.Linear(6, 1)
            with torch.no_grad():
                own.weight.copy_(common[:6].view(1, 6))
                own.bias.copy_(common[6:])
            descend(own, 5, rngs[rank])
            moved = common - torch.cat([own.weight.detach().flatten(), own.bias.detach()])
            if outer == "sparseloco":
                residuals[rank] *= 0.95
            residuals[rank] += moved
            chosen = rtop_k(residuals[rank][:6], 3, 3, generator(0, rank, round_))
            sent = torch.zeros(7)
            sent[chosen] = residuals[rank][chosen]
            sent[6] = residuals[rank][6]  # the bias is dense
            residuals[rank] -= sent
            mean += sent / 2
        if outer == "nesterov":
            velocity = 0.9 * velocity + mean
            mean = 0.7 * (mean + 0.9 * velocity)
        common = common - mean
    return common


def streaming_by_hand():
    """Weight and bias are fragments: sent after steps 5, 10, ... and 3, 8, ..., applied two steps later."""
    models = [make(), make()]
    rngs = [torch.Generator().manual_seed(rank) for rank in (0, 1)]
    common = {"weight": torch.full((1, 6), 0.1), "bias": torch.full((1,), 0.1)}
    velocity = {name: torch.zeros_like(tensor) for name, tensor in common.items()}
    arriving = {}
    for step in range(1, STEPS + 1):
        for model, rng in zip(models, rngs, strict=True):
            descend(model, 1, rng)
        for name, sent in (("weight", step % 5 == 0), ("bias", step % 5 == 3)):
            if sent:
                moved = [common[name] - getattr(model, name).detach() for model in models]
                arriving[name] = step + 2, (moved[0] + moved[1]) / 2
            due, mean = arriving.get(name, (0, None))
            if due == step:
                velocity[name] = 0.9 * velocity[name] + mean
                common[name] = common[name] - 0.7 * (mean + 0.9 * velocity[name])
                with torch.no_grad():
                    for model in models:
                        own = getattr(model, name)
                        own.copy_((common[name] + own) / 2)
    return torch.cat([common["weight"].flatten(), common["bias"]]), [m.weight.detach() for m in models]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_train(name):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    few = {"density": 0.3} if name in ("sparseloco", "compact") else {}  # theirs is one entry of this model
    local = LocalSGD.preset(name, model, 8, **few)
    first = train(model, local, 8, 0)
    assert train(model, local, 200, 1) < first
    assert local.sent > 0
    with pytest.raises(
        ValueError, match="preset must be one of diloco, streaming, sparseloco, compact, got 'fedavg'"
    ):
        LocalSGD.preset("fedavg", model, 8)


def deep():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("inner", ["AdamW", "Muon"])
def test_inner_optimizers_resume_to_the_bit_within_a_round(name, inner):
    if not hasattr(torch.optim, inner):
        pytest.skip(f"torch {torch.__version__} has no {inner}")

    def start(model):
        few = {"streaming": {"fragments": 2}, "diloco": {}}.get(name, {"density": 0.3})
        optimizer = getattr(torch.optim, inner)(model.parameters(), lr=0.02)
        return LocalSGD.preset(name, model, 5, **few), optimizer

    def steps(model, local, optimizer, first, last):
        for step in range(first, last):
            inputs = torch.randn(16, 6, generator=generator("data", step))
            optimizer.zero_grad()
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            local.step()

    whole = deep()
    local, optimizer = start(whole)
    steps(whole, local, optimizer, 0, 13)
    copy = deep()
    resumed, again = start(copy)
    copy.load_state_dict(whole.state_dict())
    resumed.load_state_dict(local.state_dict())
    again.load_state_dict(deepcopy(optimizer.state_dict()))  # torch would share its tensors
    for model, own, inner_optimizer in ((whole, local, optimizer), (copy, resumed, again)):
        steps(model, own, inner_optimizer, 13, 30)
    assert local.round == resumed.round > 3
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), copy.parameters(), strict=True))
    assert not torch.equal(whole[0].weight, deep()[0].weight)


def test_a_model_is_cut_into_parts_of_equal_size():
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(6)))
    for fragments in (1, 2, 3, 5, 12):
        parts = cut(model, fragments)
        names = [name for layout in parts for name in layout.names]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        assert all(layout.size for layout in parts)
        if fragments <= 3:
            assert (
                max(layout.size for layout in parts) < 1.3 * sum(layout.size for layout in parts) / fragments
            )
    with pytest.raises(ValueError, match=r"fragments must be in \[1, 12\]"):
        cut(model, 13)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": 5}, "delay must be in"),
        ({"delay": 1, "exchange": "all-reduce"}, "delay must be 0"),
        ({"fragments": 2, "memory": NoMemory()}, "a memory of its own"),
        ({"fragments": 9}, "fragments must be at most local_steps"),
        ({"mix": 1.0}, "mix must be in"),
        ({"delay": 1.5}, "delay must be a whole number"),
        ({"outer": 3}, "outer must be one of"),
        ({"mean": "median"}, "mean must be one of"),
        ({"memory": "error-feedback"}, "memory must be a memory"),
        ({"exchange": "ring"}, "exchange must be one of"),
        ({"selector": Dealt(3)}, "3"),
        ({"selector": Threshold(0.1), "delay": 1}, "delay must be 0 with"),
    ],
)
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        LocalSGD(make(), 5, **options)


def test_auto_ignores_what_owners_pass_on_where_there_are_none():
    LocalSGD(make(), 5, exchange="auto", owner_density=0.02)
    with pytest.raises(ValueError, match="owner_density must be in"):
        LocalSGD(make(), 5, exchange="auto", owner_density=2.0)


def test_two_ranks_stay_alike_and_do_what_the_papers_say(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path)), nprocs=2)
    for outer in OUTER:
        one, two = (torch.load(tmp_path / f"{outer}-{rank}.pt", weights_only=True) for rank in (0, 1))
        assert torch.equal(one["weights"], two["weights"])
        assert torch.allclose(one["weights"], by_hand(outer), atol=1e-4), outer
        assert one["loss"] < 0.5
        assert one["sent"] > 0
    common, own = streaming_by_hand()
    for rank in (0, 1):
        theirs = torch.load(tmp_path / f"by-hand-{rank}.pt", weights_only=True)
        assert torch.allclose(theirs[0], common, atol=1e-4)
        assert torch.allclose(theirs[1], own[rank], atol=1e-4)
    found = {
        name: [torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for rank in (0, 1)]
        for name in EXCHANGES
    }
    for (one, again), (two, _) in found.values():
        assert torch.equal(one, two)
        assert torch.equal(one, again)
    assert torch.equal(found["gathered"][0][0], found["whole union"][0][0])
    assert not torch.equal(found["gathered"][0][0], found["reduced"][0][0])
