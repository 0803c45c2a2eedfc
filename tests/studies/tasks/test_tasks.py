"""The tasks of the paper: what nodes are served, what models are made, how text is split and states carried."""

import dataclasses

import pytest
import torch
from tiny_data import make_cifar, make_folder, make_ptb, make_shakespeare, make_text
from torch import nn

from rtopk.seed import generator
from rtopk.studies import tasks
from rtopk.studies.config import Config
from rtopk.studies.tasks import images, load
from rtopk.studies.tasks.datasets import Corpus, DataError
from rtopk.studies.tasks.models import Gpt, LanguageModel, ResNet, parameter_count, small_convnet
from rtopk.studies.tasks.objectives import Carrying, Prediction, Streams
from rtopk.studies.train.execute import Interrupted, execute
from rtopk.studies.train.loop import Run, seeded


def text_task(batch=2, words=12, tokens=400):
    drawn = torch.randint(0, words, (tokens,), generator=generator("text"))
    text = Corpus(drawn, drawn[:100], drawn[100:200], words, torch.arange(0, tokens, 10))
    model = lambda: Carrying(LanguageModel(words, 8, 2, dropout=0.2, init=0.1), 2, 8, batch)  # noqa: E731
    return Prediction(text, text.test, model, unroll=5, streams=3)


TEXT = Config(nodes=3, batch=2, rounds=8, split="contiguous", density=0.2, momentum=0.0, learning_rate=1.0)


def test_streams_serve_the_text_in_order():
    shard = Streams(torch.arange(23), batch=2, unroll=5, node=0)  # two streams of 11
    inputs, targets, fresh = shard[0]
    assert inputs.T.tolist() == [[0, 1, 2, 3, 4], [11, 12, 13, 14, 15]]
    assert torch.equal(targets, inputs + 1)
    assert fresh
    inputs, _, fresh = shard[1]
    assert inputs.T.tolist() == [[5, 6, 7, 8, 9], [16, 17, 18, 19, 20]]
    assert not fresh
    assert shard.steps_per_epoch == 2
    assert shard[2][2]  # the next epoch begins
    with pytest.raises(ValueError, match="node 1 has 10 tokens, too few for 2 streams of 5"):
        Streams(torch.arange(10), batch=2, unroll=5, node=1)


def test_text_is_split_into_contiguous_parts_or_dealt_by_lines():
    task = text_task()
    parts = task.shards(TEXT)
    assert [len(part) for part in parts] == [134, 133, 133]
    assert torch.equal(parts[1].inputs[:, 0], task.corpus.train[134 : 134 + 66])
    dealt = task.shards(dataclasses.replace(TEXT, split="iid"))
    assert sum(len(part) for part in dealt) == 400
    assert all(len(part) % 10 == 0 for part in dealt)  # whole lines
    assert not torch.equal(dealt[0].inputs[:66, 0], parts[0].inputs[:66, 0])
    with pytest.raises(ValueError, match="split must be contiguous or iid"):
        task.shards(dataclasses.replace(TEXT, split="dirichlet"))


def test_the_state_is_carried_from_batch_to_batch_and_forgotten_at_the_beginning():
    """Window by window, with the state carried, is the whole text at once."""
    lstm = LanguageModel(12, 8, 2, dropout=0.0, init=0.5)
    model = Carrying(lstm, 2, 8, batch=3)
    tokens = torch.randint(0, 12, (10, 3), generator=generator("tokens"))
    whole, _ = lstm(tokens)
    parts = torch.cat([model(tokens[:5], True), model(tokens[5:], False)])
    assert torch.allclose(parts, whole, atol=1e-6)
    assert not torch.allclose(model(tokens[5:], True), whole[5:], atol=1e-3)
    model.eval()
    before = model.hidden.clone()
    parts = torch.cat([model(tokens[:5], True), model(tokens[5:], False)])
    assert torch.allclose(parts, whole, atol=1e-6)
    assert torch.equal(model.hidden, before)  # evaluation has its own


def test_each_node_carries_its_own_state():
    run = Run(TEXT, text_task())
    run.advance()
    states = [node.buffers["hidden"] for node in run.nodes]
    assert not torch.equal(states[0], states[1])
    assert all(float(state.abs().max()) > 0 for state in states)
    # What node 1 starts its second batch with is what its own first batch left.
    with seeded(0, "weights"):
        twin = run.task.make_model()
    twin.train()
    with seeded(TEXT.seed, "forward", 1, 0):
        twin(run.nodes[1].shard[0][0], True)
    assert torch.allclose(twin.hidden, states[1], atol=1e-6)


@pytest.mark.parametrize("setting", ["distributed", "federated"])
def test_a_run_with_carried_state_resumes_to_the_bit(setting, tmp_path, monkeypatch):
    monkeypatch.setattr("rtopk.studies.train.loop.load", lambda config: text_task())
    config = dataclasses.replace(TEXT, setting=setting, local_steps=3 if setting == "federated" else 0)
    whole = execute(config)
    calls = iter(range(1, 100))
    with pytest.raises(Interrupted):
        execute(config, tmp_path, should_stop=lambda: next(calls) >= 4)
    assert execute(config, tmp_path, resume=True)["weights"] == whole["weights"]


def test_perplexity_of_a_model_that_knows_nothing_is_the_number_of_words():
    task = text_task(words=12)
    model = task.make_model()
    for weight in model.parameters():
        nn.init.zeros_(weight)
    model.eval()
    with torch.no_grad():
        scores = task.evaluate(model)
    assert scores["perplexity"] == pytest.approx(12.0, rel=1e-5)


def test_a_run_that_diverges_is_a_record():
    config = Config(nodes=2, batch=8, rounds=6, method="dense", evaluate_every=6)
    record = execute(dataclasses.replace(config, learning_rate=1e30))
    assert record["diverged"]
    assert record["final"]["round"] < 6
    assert record["final"]["accuracy"] < 40
    assert not execute(config)["diverged"]


def test_models_have_the_papers_sizes():
    assert parameter_count(tasks.resnet18()) == 11_173_962  # the CIFAR form
    assert parameter_count(ResNet((3, 4, 6, 3), 64, 1000, large_images=True)) == 21_797_672  # torchvision's
    # 10,000 x 1500 embedding (tied), two LSTM layers of 4 x 1500 x (1500 + 1500 + 2), 10,000 output biases.
    assert parameter_count(LanguageModel(10_000)) == 15_000_000 + 2 * 4 * 1500 * 3002 + 10_000
    assert parameter_count(small_convnet()) == 85_642
    assert parameter_count(tasks.narrow_resnet()) == 78_042


def test_gpt_looks_only_back():
    with seeded("gpt"):
        model = Gpt(11, width=16, layers=2, heads=2, context=12)
    tokens = torch.randint(0, 11, (12, 3), generator=generator("gpt"))
    changed = tokens.clone()
    changed[7:] = (changed[7:] + 1) % 11
    one, other = model(tokens), model(changed)
    assert torch.equal(one[:7], other[:7])
    assert not torch.allclose(one[7:], other[7:])
    assert one.shape == (12, 3, 11)


def test_crop_and_flip_moves_pixels_and_repeats():
    pictures = torch.arange(1, 8 * 3 * 6 * 6 + 1).view(8, 3, 6, 6).to(torch.int32)
    augment = images.crop_and_flip(2)
    one = augment(pictures, generator("crop"))
    assert torch.equal(one, augment(pictures, generator("crop")))
    assert not torch.equal(one, augment(pictures, generator("another")))
    for before, after in zip(pictures, one, strict=True):  # each result is a window of the padded picture
        padded = nn.functional.pad(before, (2, 2, 2, 2))
        windows = [padded[:, y : y + 6, x : x + 6] for y in range(5) for x in range(5)]
        assert any(torch.equal(after, w) or torch.equal(after, w.flip(2)) for w in windows)
    flips = augment(pictures[:1].expand(400, -1, -1, -1), generator("many"))
    rising = flips[:, 0, 3, 3] > flips[:, 0, 3, 2]
    assert 150 < int(rising.sum()) < 250  # half, within five standard deviations: false alarm in 2 million


def test_halved_is_the_mean_of_four():
    pictures = torch.tensor([[[[0, 4], [8, 20]]]], dtype=torch.uint8).expand(1, 3, 2, 2)
    assert images.halved(pictures).flatten().tolist() == [8, 8, 8]


def test_cifar_task_keeps_validation_out_of_training(tmp_path, monkeypatch):
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    make_cifar(tmp_path, per_batch=20)
    tasks.cifar10.cache_clear()
    try:
        test = load(Config(task="cifar10-small"))
        validation = load(Config(task="cifar10-small", part="validation"))
    finally:
        tasks.cifar10.cache_clear()
    assert (len(test.train[1]), len(test.held_out[1])) == (100, 20)
    assert (len(validation.train[1]), len(validation.held_out[1])) == (90, 10)
    rows = {image.numpy().tobytes() for image in validation.train[0]}
    assert not any(image.numpy().tobytes() in rows for image in validation.held_out[0])
    everything = {image.numpy().tobytes() for image in test.train[0]}
    assert all(image.numpy().tobytes() in everything for image in validation.held_out[0])
    inputs, _ = test.shards(Config(task="cifar10-small", batch=4))[0][0]
    assert inputs.shape == (4, 3, 16, 16)
    assert inputs.dtype == torch.float32


def test_imagenet_task_reads_files_as_they_are_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    entries = [("RGB", (90, 70)), ("L", (64, 80)), ("RGB", (50, 50))]
    for part in ("train", "val"):
        make_folder(tmp_path / "imagenet" / part, {"n01": entries, "n02": entries})
    tasks.imagenet.cache_clear()
    try:
        task = load(Config(task="imagenet"))
    finally:
        tasks.imagenet.cache_clear()
    shard = task.shards(Config(task="imagenet", nodes=2, batch=2))[1]
    inputs, _ = shard[0]
    assert inputs.shape == (2, 3, 224, 224)
    again, _ = shard[0]
    assert torch.equal(inputs, again)  # the same step, the same crops
    other = shard[shard.steps_per_epoch][0]
    assert not torch.equal(inputs, other)
    assert task.view(task.held_out[0][:2]).shape == (2, 3, 224, 224)


def test_the_sample_is_a_task_of_its_own(tmp_path, monkeypatch):
    """One image a class is no ImageNet: it must not stand in for it unseen."""
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    make_folder(tmp_path / "imagenet-sample", {"n01": [("RGB", (90, 70))], "n02": [("L", (64, 80))]})
    tasks.imagenet.cache_clear()
    try:
        with pytest.raises(DataError, match="holds no imagenet;"):
            load(Config(task="imagenet"))
        assert len(load(Config(task="imagenet-sample")).train[1]) == 2
    finally:
        tasks.imagenet.cache_clear()


def test_classes_of_training_and_validation_must_agree(tmp_path, monkeypatch):
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    entries = [("RGB", (20, 20))]
    make_folder(tmp_path / "tiny-imagenet-20" / "train", {"n01": entries, "n02": entries})
    make_folder(tmp_path / "tiny-imagenet-20" / "val", {"n02": entries})
    tasks.tiny_imagenet.cache_clear()
    with pytest.raises(DataError, match="must have the same classes, got 'n01' in one only"):
        load(Config(task="imagenet-small"))


def test_shakespeare_is_read_by_characters_and_learnt(tmp_path, monkeypatch):
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    make_shakespeare(tmp_path, "to be or not to be\n" * 800)
    tasks._shakespeare.cache_clear()
    try:
        config = Config(task="shakespeare", split="contiguous", nodes=2, batch=4, rounds=30, method="dense")
        run = Run(dataclasses.replace(config, learning_rate=0.1))
        text = run.task.corpus
        assert text.words == len(set("to be or not to be\n"))
        assert [len(text.train), len(text.validation), len(text.test)] == [12160, 1520, 1520]
        start = run.evaluate()["perplexity"]
        for _ in range(30):
            run.advance()
        assert run.evaluate()["perplexity"] < 0.8 * start
    finally:
        tasks._shakespeare.cache_clear()


@pytest.mark.parametrize("task", ["cifar10-narrow", "imagenet-narrow"])
def test_the_narrow_siblings_train(task, tmp_path, monkeypatch):
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    make_cifar(tmp_path, per_batch=10)
    for part in ("train", "val"):
        make_folder(
            tmp_path / "tiny-imagenet-20" / part, {f"n{i}": [("RGB", (64, 64))] * 8 for i in range(3)}
        )
    for cached in (tasks.cifar10, tasks.tiny_imagenet):
        cached.cache_clear()
    try:
        run = Run(Config(task=task, nodes=2, batch=2, rounds=2))
        run.advance()
        assert run.evaluate()["loss"] > 0
        assert run.sent > 0
    finally:
        for cached in (tasks.cifar10, tasks.tiny_imagenet):
            cached.cache_clear()


def test_zarembas_large_model(tmp_path, monkeypatch):
    """Weights uniform in [-0.04, 0.04], 65 % dropout at three places, unroll 35."""
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    make_ptb(tmp_path, make_text(30, 3000), make_text(30, 3000), make_text(30, 3000))
    tasks._ptb.cache_clear()
    try:
        task = load(Config(task="ptb", split="contiguous", batch=2))
    finally:
        tasks._ptb.cache_clear()
    model = task.make_model().model
    for weight in model.parameters():
        assert float(weight.detach().abs().max()) <= 0.04
    assert float(model.lstm.weight_hh_l1.detach().std()) == pytest.approx(0.08 / 12**0.5, rel=0.01)
    assert (model.dropout.p, model.lstm.dropout, task.unroll) == (0.65, 0.65, 35)
    assert model.lstm.input_size == model.lstm.hidden_size == 1500


def test_ptb_small_learns(tmp_path, monkeypatch):
    """Some rounds on a made-up text of uneven words lower the perplexity well below that of the start."""
    monkeypatch.setenv("RTOPK_DATA", str(tmp_path))
    make_ptb(tmp_path, make_text(60, 4000), make_text(60, 400, 1), make_text(60, 400, 2))
    tasks._ptb.cache_clear()
    config = Config(
        task="ptb-small", split="contiguous", batch=4, rounds=25, momentum=0.0, clip_norm=0.25,
        learning_rate=9.0, method="dense", nodes=2, evaluate_every=5,
    )  # fmt: skip
    try:
        run = Run(config)
        start = run.evaluate()["perplexity"]
        for _ in range(25):
            run.advance()
        end = run.evaluate()["perplexity"]
    finally:
        tasks._ptb.cache_clear()
    assert start > 20  # words, all alike
    assert end < 15  # the words' frequencies alone give about 10
