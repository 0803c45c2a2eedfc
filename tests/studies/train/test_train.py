"""The one loop: it learns, repeats to the bit, resumes to the bit, and treats buffers as it says."""

import dataclasses
import hashlib
import json
import math

import pytest
import torch
from torch import nn

import rtopk
from rtopk.seed import generator
from rtopk.sparsifier import Sparsifier
from rtopk.studies.config import ADDED, Config, methods
from rtopk.studies.federation import Federation
from rtopk.studies.tasks import digits
from rtopk.studies.tasks.objectives import Classification, Examples
from rtopk.studies.train.execute import Interrupted, execute
from rtopk.studies.train.loop import Run, seeded
from rtopk.studies.train.records import append, digest, read

NEEDED = {"threshold": {"threshold": 0.05}, "powersgd": {"matrix_rank": 2}}  # options without a default
SMALL = Config(rounds=12, nodes=3, evaluate_every=4, learning_rate=0.05)


def weights(config, task=None):
    run = Run(config, task)
    for _ in range(config.rounds):
        run.advance()
    return run.vector()


def normed_task():
    """A task whose model has BatchNorm and dropout: buffers and a global generator in the forward pass."""
    data = torch.randn(90, 6, generator=generator("data"))
    targets = (data.sum(1) > 0).long()
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))  # noqa: E731
    return Classification((data[:60], targets[:60]), (data[60:], targets[60:]), model)


@pytest.mark.parametrize("setting", ["distributed", "federated"])
@pytest.mark.parametrize("method", methods())
def test_same_seed_same_bits_other_seed_other_bits(method, setting):
    config = dataclasses.replace(SMALL, method=method, setting=setting, rounds=4, **NEEDED.get(method, {}))
    first = weights(config)
    assert torch.equal(first, weights(config))
    assert not torch.equal(first, weights(dataclasses.replace(config, seed=1)))


@pytest.mark.parametrize("setting", ["distributed", "federated"])
def test_it_learns(setting):
    rounds = 250 if setting == "distributed" else 25
    record = execute(
        Config(method="rtop-k", density=0.05, rounds=rounds, setting=setting, learning_rate=0.05)
    )
    assert record["final"]["accuracy"] > 80.0  # chance is 10
    assert record["curve"][-1]["train_loss"] < record["curve"][0]["train_loss"] or len(record["curve"]) == 1


def test_dense_distributed_is_plain_sgd_on_the_joint_batch():
    """n nodes with batches of b are one node with the batch of all of them."""
    config = dataclasses.replace(
        SMALL, method="dense", momentum=0.9, weight_decay=0.01, rate_schedule="constant"
    )
    run = Run(config)
    with seeded(config.seed, "weights"):
        model = run.task.make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    for round_ in range(5):
        batches = [node.shard[round_] for node in run.nodes]
        run.advance()
        optimizer.zero_grad()
        loss = run.task.loss(model, (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])))
        loss.backward()
        optimizer.step()
    expected = run.layout.flatten({name: p.detach() for name, p in model.named_parameters()})
    assert torch.allclose(run.vector(), expected, atol=1e-6)


def test_dense_federated_is_fedavg():
    """The centre's new weights are the mean of where the nodes went, each alone from the common weights."""
    config = dataclasses.replace(
        SMALL, method="dense", setting="federated", rate_schedule="constant", momentum=0.5
    )
    run = Run(config)
    ends = []
    for node in run.nodes:
        with seeded(config.seed, "weights"):
            model = run.task.make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
        for step in range(node.shard.steps_per_epoch):
            optimizer.zero_grad()
            run.task.loss(model, node.shard[step]).backward()
            optimizer.step()
        ends.append(run.layout.flatten({name: p.detach() for name, p in model.named_parameters()}))
    run.advance()
    assert torch.allclose(run.vector(), torch.stack(ends).mean(0), atol=1e-6)


def test_adamw_at_the_centre_is_torchs_and_gives_its_first_beta_to_the_memory():
    config = dataclasses.replace(SMALL, method="dense", optimizer="adamw", learning_rate=0.01)
    run = Run(config)
    model = run.task.make_model()
    model.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, betas=(0.9, 0.999), weight_decay=0.0)
    batches = [node.shard[0] for node in run.nodes]
    run.advance()
    run.task.loss(model, (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))).backward()
    optimizer.step()
    expected = run.layout.flatten({name: p.detach() for name, p in model.named_parameters()})
    assert torch.allclose(run.vector(), expected, atol=1e-5)
    moved = Run(dataclasses.replace(config, method="top-k", memory="momentum-correction"))
    assert moved.optimizer.param_groups[0]["betas"] == (0.0, 0.999)
    assert moved.nodes[0].sparsifier.memory.momentum == 0.9


@pytest.mark.parametrize("rule", ["top-k", "rtop-k", "intersection"])
def test_whatever_owners_pass_on_nothing_is_lost(rule):
    """Applied + the nodes' residuals + the owners' residuals = what came in."""
    config = dataclasses.replace(
        SMALL, nodes=4, method="top-k", exchange="all-reduce", owner_rule=rule, momentum=0.0,
        rate_schedule="constant", learning_rate=0.001, density=0.02,
    )  # fmt: skip
    run = Run(config)
    before, came_in = run.vector(), torch.zeros(run.layout.size)
    for _ in range(5):
        for node in run.nodes:
            with run.at(node):
                came_in += run.gradient(node, 0.0)[0] / 4
        run.advance()
    applied = (before - run.vector()) / 0.001
    kept = sum(node.sparsifier.memory.residual for node in run.nodes) / 4
    owned = run.exchange.state().get("owner_residual", torch.zeros_like(kept))
    assert bool(owned.any()) == (rule != "intersection")
    assert torch.allclose(applied + kept + owned, came_in, atol=2e-4)


def test_weights_by_examples():
    config = dataclasses.replace(SMALL, split="dirichlet", alpha=0.3, weighted=True)
    run = Run(config)
    assert run.weights == [float(len(node.shard)) for node in run.nodes]
    assert len(set(run.weights)) > 1
    assert not torch.equal(weights(config), weights(dataclasses.replace(config, weighted=False)))


@pytest.mark.parametrize("setting", ["distributed", "federated"])
def test_buffers_belong_to_nodes_and_are_evaluated_by_their_mean(setting):
    task = normed_task()
    run = Run(Config(nodes=3, batch=10, rounds=5, setting=setting, density=0.5), task)
    for _ in range(3):
        run.advance()
    means = [node.buffers["1.running_mean"] for node in run.nodes]
    assert not torch.equal(means[0], means[1])
    steps = 3 if setting == "distributed" else 3 * run.nodes[0].shard.steps_per_epoch
    assert all(int(node.buffers["1.num_batches_tracked"]) == steps for node in run.nodes)
    run.evaluate()
    assert torch.allclose(run.model[1].running_mean, torch.stack(means).mean(0))
    assert int(run.model[1].num_batches_tracked) == steps
    assert torch.equal(run.nodes[0].buffers["1.running_mean"], means[0])  # evaluation changed no node
    assert run.model.training


def test_evaluation_does_not_change_the_run():
    task, config = normed_task(), Config(nodes=3, batch=10, rounds=6, density=0.5)
    looked_at, left_alone = Run(config, task), Run(config, task)
    for _ in range(6):
        looked_at.advance()
        looked_at.evaluate()
        left_alone.advance()
    assert torch.equal(looked_at.vector(), left_alone.vector())


def test_a_run_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    weights(Config(nodes=2, batch=10, rounds=3, density=0.5), normed_task())
    assert torch.equal(torch.get_rng_state(), before)


def test_bytes_are_those_of_the_payloads():
    run = Run(dataclasses.replace(SMALL, nodes=4))
    sizes = []
    exchange = run.transport.exchange
    run.transport.exchange = lambda payloads: (
        sizes.append([p.numel() for p in payloads]) or exchange(payloads)
    )
    run.advance()
    assert run.sent == round(sum(sizes[0]) / 4)
    assert run.received == round(sum(sizes[0]) * 3 / 4)


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "error-feedback", "warm_up": 6},
        {"memory": "momentum-correction", "warm_up": 6},
        {"memory": "none", "warm_up": 6},
        {"method": "rage-k"},
        {"method": "dealt-k", "warm_up": 6},
        {"method": "powersgd", "matrix_rank": 1},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_stopped_and_resumed_is_never_stopped(options, tmp_path):
    config = dataclasses.replace(SMALL, clip_norm=1.0, **options)
    whole = execute(config, tmp_path / "whole")
    with pytest.raises(Interrupted, match="round 7 of 12"):
        execute(config, tmp_path / "parts", should_stop=_after(7))
    parts = execute(config, tmp_path / "parts", resume=True)
    assert parts["weights"] == whole["weights"]
    same = ("round", "accuracy", "sent_bytes", "residual_norm")
    assert [[p[n] for n in same] for p in parts["curve"]] == [[p[n] for n in same] for p in whole["curve"]]
    events = (tmp_path / "parts" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in events] == [4, 8, 12]
    assert execute(config, tmp_path / "parts", resume=True) == parts  # finished: read, not run again


def test_federated_with_buffers_and_dropout_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr("rtopk.studies.train.loop.load", lambda config: normed_task())
    config = Config(nodes=3, batch=10, rounds=6, setting="federated", density=0.3)
    whole = execute(config)
    with pytest.raises(Interrupted):
        execute(config, tmp_path, should_stop=_after(3))
    assert execute(config, tmp_path, resume=True)["weights"] == whole["weights"]


def _after(rounds):
    calls = iter(range(1, 1000))
    return lambda: next(calls) >= rounds


def test_resume_refuses_another_configuration_and_damage(tmp_path):
    with pytest.raises(Interrupted):
        execute(SMALL, tmp_path, should_stop=_after(2))
    with pytest.raises(ValueError, match=r"another configuration \(learning_rate: 0.05, now 0.5\)"):
        execute(dataclasses.replace(SMALL, learning_rate=0.5), tmp_path, resume=True)
    with pytest.raises(ValueError, match="holds a run already"):
        execute(SMALL, tmp_path)
    checkpoint = tmp_path / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    with pytest.raises(ValueError, match="not a checkpoint that can be read"):
        execute(SMALL, tmp_path, resume=True)


def test_record_is_complete():
    record = json.loads(json.dumps(execute(SMALL)))
    assert record["config"] == SMALL.to_dict()
    assert record["parameters"] == 26_122
    assert [point["round"] for point in record["curve"]] == [4, 8, 12]
    assert record["final"]["sent_bytes"] == pytest.approx(record["sent_bytes_per_round"] * 12)
    assert {"rtopk", "torch", "python", "processor", "threads"} <= set(record["environment"])


def test_keys_of_older_records_stay():
    """The key is that of the fields there were before; a later one counts where it is set."""
    older = {name: value for name, value in Config().to_dict().items() if name not in ADDED}
    text = json.dumps(older, sort_keys=True).encode()
    assert Config().key == hashlib.blake2b(text, digest_size=8).hexdigest()
    keys = {Config(method="threshold", threshold=limit).key for limit in (0.1, 0.2)}
    assert len(keys) == 2


def test_powersgd_counts_both_messages():
    run = Run(dataclasses.replace(SMALL, method="powersgd", matrix_rank=2))
    run.advance()
    # 64-128-128-10: (rows + columns) x rank of three matrices, and three biases, as fp32; two headers of 40.
    assert run.sent == 4 * (2 * (192 + 256 + 138) + 266) + 80


def test_shard_serves_every_example_once_an_epoch():
    shard = Examples(torch.arange(10), torch.arange(10), seed=0, node=1, batch=3)
    epochs = [[int(x) for step in range(3) for x in shard[3 * epoch + step][0]] for epoch in range(2)]
    assert all(len(set(epoch)) == 9 for epoch in epochs)
    assert epochs[0] != epochs[1]
    again = Examples(torch.arange(10), torch.arange(10), seed=0, node=1, batch=3)
    assert torch.equal(again[4][0], shard[4][0])  # any step, without the ones before


def test_validation_never_sees_the_test_set():
    test, validation = digits("test"), digits("validation")
    rows = {tuple(row.tolist()) for row in test.held_out[0]}
    assert len(rows) > 400
    for part in (*validation.train[0], *validation.held_out[0], *test.train[0]):
        assert tuple(part.tolist()) not in rows


@pytest.mark.parametrize(
    "options",
    [
        {"method": "best"},
        {"nodes": 0},
        {"density": 0.0},
        {"momentum": 1.0},
        {"learning_rate": 0.0},
        {"setting": "federated", "memory": "momentum-correction"},
        {"local_steps": 3},
        {"centre_rate": 2.0},
        {"setting": "federated", "centre_rate": 0.0},
        {"examples": -1},
        {"r_over_k": 0.5},
        {"r_over_k_end": -1.0},
        {"r_over_k_end": 2.0, "method": "top-k"},
        {"residual_decay": 0.0},
        {"residual_decay": 0.9, "memory": "none"},
        {"examples": 2000},
        {"method": "threshold"},
        {"threshold": 0.1},
        {"method": "powersgd"},
        {"method": "powersgd", "matrix_rank": 1, "memory": "momentum-correction"},
        {"matrix_rank": 1},
        {"task": "unknown"},
    ],
)
def test_configuration_is_checked(options):
    with pytest.raises(ValueError, match=r"must|federated"):
        Run(Config(**options))


def test_nodes_may_draw_alike():
    for alike in (False, True):
        run = Run(dataclasses.replace(SMALL, method="random-k", same_draws=alike, evaluate_every=1))
        run.advance()
        assert (run.overlap == 1.0) is alike


def test_nodes_that_send_nothing_have_no_overlap():
    run = Run(Config(method="threshold", threshold=1e6, rounds=1, nodes=2, evaluate_every=1))
    run.advance()
    assert math.isnan(run.overlap)


def test_selection_per_tensor_gives_each_its_share():
    config = dataclasses.replace(SMALL, method="top-k", per_tensor=True, density=0.02)
    run = Run(config)
    rule = run.nodes[0].sparsifier.rule
    sizes = [math.prod(shape) for shape in run.layout.shapes]
    ends = torch.tensor(sizes).cumsum(0)
    vector = torch.zeros(run.layout.size)
    vector[: sizes[0]] = torch.arange(
        1.0, sizes[0] + 1
    )  # over the whole vector, the first tensor would take all
    chosen = rule.select(vector, 500, torch.Generator())
    assert chosen.numel() == 500
    assert bool((chosen.diff() > 0).all())
    counts = torch.bincount(torch.bucketize(chosen, ends, right=True), minlength=len(sizes))
    for count, size in zip(counts.tolist(), sizes, strict=True):
        assert abs(count - 500 * size / run.layout.size) <= 1
    assert chosen[: counts[0]].tolist() == list(range(sizes[0] - int(counts[0]), sizes[0]))


def test_the_centre_may_follow_further():
    start, moved = [], []
    for rate in (1.0, 5.0):
        run = Run(
            dataclasses.replace(SMALL, setting="federated", local_steps=2, method="dense", centre_rate=rate)
        )
        start.append(run.vector())
        run.advance()
        moved.append(run.vector() - start[-1])
    assert torch.equal(*start)
    torch.testing.assert_close(5 * moved[0], moved[1])


def test_a_run_may_use_fewer_examples():
    run = Run(dataclasses.replace(SMALL, examples=100))
    assert sum(len(node.shard) for node in run.nodes) == 100
    with pytest.raises(ValueError, match="examples must be at most 1,348 for task digits, got 2,000"):
        Run(dataclasses.replace(SMALL, examples=2000))


def test_r_may_grow_and_fall():
    vector = torch.arange(10_000.0)
    assert Config(r_over_k=49.0, r_over_k_end=1.0, rounds=1).make_selector().considered(9, 99) == 99
    fallen = Config(r_over_k=49.0, r_over_k_end=1.0, rounds=2).make_selector()
    fallen.begin(1)
    assert fallen.considered(9, 99) == 9
    for first, last in ((1.0, 4.0), (4.0, 1.0)):
        rule = Config(r_over_k=first, r_over_k_end=last, rounds=11).make_selector()
        node = Sparsifier(rule, 0.01, rtopk.NoMemory(), seed=1)
        least, r = [], []  # the smallest entry sent, and r, in every round
        for step in range(11):
            least.append(float(node.codec.decode(node.compress(vector, step)).values.min()))
            r.append(rule.considered(100, 10_000))
        assert (r[0], r[5], r[-1]) == (100 * first, 200, 100 * last)  # by the same factor every round
        assert all(10_000 - count <= entry for count, entry in zip(r, least, strict=True))
        assert least[0 if first == 1.0 else -1] == 9_900  # r = k in that very round: top-k


@pytest.mark.parametrize("memory", ["error-feedback", "momentum-correction"])
def test_a_residual_may_decay(memory):
    config = Config(memory=memory, residual_decay=0.5, momentum=0.0)
    node = Sparsifier(rtopk.TopK(), 0.25, config.make_memory())
    vector = torch.tensor([8.0, 4.0, 2.0, 1.0])
    sent = [node.codec.decode(node.compress(vector, step)).to_dense() for step in range(3)]
    # 8 | 4 2 1 halves to 2 1 0.5; + 8 4 2 1 = 8 6 3 1.5: 8 again; 3 1.5 0.75 + 8 4 2 1 = 8 7 3.5 1.75
    assert [dense.argmax().item() for dense in sent] == [0, 0, 0]
    assert [float(dense.max()) for dense in sent] == [8.0, 8.0, 8.0]
    node.compress(torch.tensor([0.0, 0.0, 0.0, 1.0]), 3)  # 0 3.5 1.75 1.875: the second is sent
    fourth = node.codec.decode(node.compress(torch.zeros(4), 4)).to_dense()
    assert fourth.tolist() == [0.0, 0.0, 0.0, 0.9375]


@pytest.mark.parametrize(
    "option",
    [
        {"same_draws": True},
        {"per_tensor": True},
        {"centre_rate": 2.0},
        {"residual_decay": 0.9},
        {"r_over_k_end": 2.0},
    ],
)
def test_options_of_one_process_are_refused_elsewhere(option):
    config = Config(setting="federated", **option)
    with pytest.raises(ValueError, match=f"{next(iter(option))} is for runs whose nodes are in one process"):
        Federation(config=config)


def test_a_checkpoint_from_before_an_option_resumes():
    run = Run(SMALL)
    run.advance()
    state = run.state_dict()
    for name in ADDED:
        del state["config"][name]
    again = Run(SMALL)
    again.load_state_dict(state)
    assert torch.equal(again.vector(), run.vector())


@pytest.mark.parametrize("rounds", [55, 55 * 265])
def test_zarembas_schedule(rounds):
    """The rate stays for 14 of 55 epochs, then falls by 1.15 at the beginning of each."""
    config = Config(rounds=rounds, rate_schedule="zaremba", learning_rate=35.0)
    each = rounds // 55
    for epoch in range(55):
        for round_ in (epoch * each, (epoch + 1) * each - 1):
            assert config.rate(round_) == pytest.approx(35.0 / 1.15 ** max(0, epoch - 13), rel=1e-12)


def test_piecewise_and_cosine_schedules():
    piecewise = Config(rounds=100, rate_schedule="piecewise", learning_rate=1.0)
    assert [piecewise.rate(t) for t in (0, 49, 50, 74, 75, 99)] == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    cosine = Config(rounds=100, rate_schedule="cosine", learning_rate=1.0)
    assert [round(cosine.rate(t), 6) for t in (0, 50, 100)] == [1.0, 0.5, 0.0]


def test_a_line_that_was_cut_off_is_not_there_and_is_written_over(tmp_path):
    file = tmp_path / "results.jsonl"
    append(file, {"key": "one"})
    with file.open("a") as half:
        half.write('{"key": "two", "curve": [1, 2')
    assert read(file) == [{"key": "one"}]
    append(file, {"key": "three"})
    assert read(file) == [{"key": "one"}, {"key": "three"}]
    file.write_text('{"key": 1}\nnot a record\n')
    with pytest.raises(ValueError, match=r"results.jsonl line 2 is not a record.*delete that line"):
        read(file)


def test_digest_names_bits():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.arange(4.0)[::2]) == digest(torch.tensor([0.0, 2.0]))
