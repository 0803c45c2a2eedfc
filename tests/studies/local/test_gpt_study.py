"""The study of local steps: real ranks that repeat to the bit, books that balance, rates, and the page."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rtopk.studies.local import (
    METHODS,
    OURS,
    ROWS,
    SMOKE,
    TASKS,
    LocalRun,
    find,
    find_all,
    missing,
    page,
    ranks,
)
from rtopk.studies.train.records import read
from rtopk.tools.report.inputs import read as read_for_report
from studies.tasks.tiny_data import make_ptb, make_shakespeare

ROOT = Path(__file__).parents[3]
TINY = {"nodes": 2, "batch": 2, "steps": 6, "evaluate_every": 3, "local_steps": 3, "rate": 0.01}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    make_shakespeare(root, "".join(draw.choices("to be or nt\n", k=20_000)))
    words = [" ".join(draw.choices(["cat", "dog", "sat", "<unk>"], k=2_000)) + "\n" for _ in range(3)]
    make_ptb(root, *words)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("RTOPK_DATA", str(root))
        yield root


@pytest.mark.slow  # two processes start, which costs more than what they do
def test_real_ranks_repeat_to_the_bit_and_count_their_bytes(data, tmp_path):
    sparse = LocalRun(task="shakespeare", preset="sparseloco", outer_rate=1.0, **TINY)
    with ranks.LocalRanks(2) as pool:
        one, again = pool.run(sparse), pool.run(sparse)
        other = pool.run(dataclasses.replace(sparse, seed=3))
        ddp = pool.run(LocalRun(task="ptb-gpt", preset="ddp", **{**TINY, "local_steps": 1}))
        with pytest.raises(ValueError, match="nodes must be the number of ranks, 2, got 4"):
            pool.run(dataclasses.replace(sparse, nodes=4))
        with pytest.raises(RuntimeError, match=r"(?s)a rank failed in LocalRun.*density must be in \(0, 1\]"):
            pool.run(dataclasses.replace(sparse, density=2.0))
        with pytest.raises(RuntimeError, match="a rank has ended"):
            pool.run(sparse)
    for record in (one, again):
        assert [point["step"] for point in record["curve"]] == [3, 6]
        for point in (*record["curve"], record, record["final"]):
            point.pop("seconds", None)
    assert one == again
    assert one["weights"] != other["weights"]
    assert one["final"]["round"] == 2
    k = round(one["parameters"] / 64)
    assert one["entries"] == k
    assert one["published_bytes_per_round"] == -(-14 * k // 8) + 20
    assert 5 * k / 8 < one["sent_bytes_per_round"] < 13 * k / 8
    assert one["final"]["received_bytes"] == one["final"]["sent_bytes"]  # from one other rank
    assert ddp["final"]["sent_bytes"] == 6 * 4 * ddp["parameters"]
    assert "published_bytes_per_round" not in ddp
    file = tmp_path / "records.jsonl"  # the report takes them for what they are
    whole = [{**record, "seconds": 1.0} for record in (other, ddp)]
    file.write_text("".join(json.dumps(record) + "\n" for record in whole))
    assert len(read_for_report([file]).runs) == 2


@pytest.fixture
def alone(tmp_path):
    """A group of one rank, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("decay", [1.0, 0.95])
def test_the_books_of_a_run_balance(data, alone, monkeypatch, decay):
    """What was sent + what is kept = what came in, decayed or not; and the weights moved by what was sent."""
    made, put_in, sent, sizes = [], [], [], []

    def make(run, model):
        local = made_by(run, model)
        (part,) = local.fragments
        compress = part.sparsifier.compress

        def watched(update, step):
            put_in.append(update.clone())
            payload = compress(update, step)
            sizes.append(payload.numel())
            return payload

        part.sparsifier.compress = watched
        part.sparsifier.watch = lambda one: sent.append(one.to_dense())
        made.append((local, local.common.clone()))
        return local

    made_by = ranks.make
    monkeypatch.setattr(ranks, "make", make)
    run = LocalRun(task="shakespeare", preset="sparseloco", selector="rtop-k", r_over_k=2.0, values="4bit",
              decay=decay, outer_rate=1.0, **{**TINY, "nodes": 1})  # fmt: skip
    record = ranks.train(run)
    ((local, start),) = made
    assert len(sent) == 2
    kept = torch.zeros_like(start)
    for update, one in zip(put_in, sent, strict=True):
        kept = decay * kept + update - one
    assert torch.allclose(kept, local.fragments[0].sparsifier.memory.residual, atol=1e-6)
    assert torch.allclose(start - sum(sent), local.common, atol=1e-6)
    assert record["final"]["sent_bytes"] == sum(sizes)
    assert record["entries"] == int((sent[0] != 0).sum())


def test_a_run_that_diverges_is_a_record_and_others_repeat(data, alone):
    run = LocalRun(task="shakespeare", preset="diloco", outer_rate=0.7, **{**TINY, "nodes": 1, "rate": 1e30})
    record = ranks.train(run)
    assert record["diverged"]
    assert record["final"]["step"] == 3  # before the first exchange
    one, again = (ranks.train(dataclasses.replace(run, rate=0.01)) for _ in range(2))
    assert not one["diverged"]
    assert one["weights"] == again["weights"]


def record_of(run, loss):
    final = {"loss": loss, "round": 5, "sent_bytes": 500.0}
    return {"key": run.key, "metric": "loss", "higher_is_better": False, "final": final,
            "config": dataclasses.asdict(run), "sent_bytes_per_round": 100.0}  # fmt: skip


def test_rates_first_then_seed_by_seed():
    """A made-up task whose loss is known: the search finds its rates, and results come in the order of seeds."""
    records, order = [], []

    def loss(run):
        return (run.rate - 0.02) ** 2 * 1e4 + (run.outer_rate - 0.5) ** 2 + 0.01 * run.seed

    while wanted := list(missing(find_all("shakespeare", ROWS, records), 2)):
        order += [run for _, run in wanted]
        records += [record_of(run, loss(run)) for _, run in wanted]
    found = find_all("shakespeare", ROWS, records)
    assert len({run.key for run in order}) == len(order)
    assert all(len(one.records) == 2 for one in found)
    # From 0.003, 0.006, 0.012 beyond the edge to 0.024 and 0.048; from 1 down to 0.5, in steps of the root of 2.
    assert {one.final.rate for one in found} == {0.024}
    assert [one.final.outer_rate for one in found if one.row.label == "SparseLoCo"] == [0.5, 0.5]
    assert not any(one.inner.at_edge for one in found)
    tests = [run for run in order if run.part == "test"]
    assert [run.seed for run in tests] == [0] * len(ROWS) + [1] * len(ROWS)
    assert order.index(tests[0]) == len(order) - len(tests)  # all tuning comes first
    assert {run.seed for run in order[: -len(tests)]} == {1000}
    # Without one record, its run is what is missing; results end before the gap.
    less = [record for record in records if record["key"] != tests[0].key]
    first = find("shakespeare", ROWS[0], {record["key"]: record for record in less})
    assert first.records == ()
    assert [run.key for _, run in missing([first], 2)] == [run.key for run in (tests[0], tests[len(ROWS)])]


def test_rows_are_what_they_are_called():
    assert len({(row.label, row.run.local_steps) for row in ROWS}) == len(ROWS)
    assert len({row.run.key for row in ROWS}) == len(ROWS)
    assert set(OURS) < set(METHODS)


@pytest.mark.slow  # forty short runs
def test_the_command_goes_on_where_it_stopped(data, tmp_path, rtopk):
    file = tmp_path / "study-gpt-shakespeare-smoke.jsonl"
    command = ("gpt", "--smoke", "--results", tmp_path)
    assert rtopk(*command, "--seeds", 1).returncode == 0
    whole = file.read_text()
    assert rtopk(*command, "--seeds", 1).returncode == 0
    assert file.read_text() == whole
    done = rtopk(*command, "--seeds", 2)
    assert done.returncode == 0
    assert file.read_text().startswith(whole)
    assert len(read(file)) == whole.count("\n") + len(SMOKE)
    assert "the same runs, our codec" in done.stdout
    assert (tmp_path / "study-gpt-shakespeare-smoke.png").stat().st_size > 10_000
    found = find_all("shakespeare", SMOKE, read(file))
    assert [len(one.records) for one in found] == [2] * len(SMOKE)


def test_nothing_recorded_is_an_error(tmp_path, rtopk):
    done = rtopk("gpt", "--recorded", "--results", tmp_path)
    assert done.returncode == 1
    assert "holds no result of shakespeare yet" in done.stderr
    assert rtopk("gpt", "--task", "digits").returncode == 2


@pytest.mark.parametrize(
    "task", [t for t in TASKS if (ROOT / f"results/study-gpt-{t.removesuffix('-gpt')}.jsonl").exists()]
)
def test_the_page_says_what_the_records_say(task, tmp_path, rtopk):
    copy, drawn = tmp_path / "gpt.md", tmp_path / "picture.png"
    copy.write_text((ROOT / "docs/gpt.md").read_text())
    done = rtopk(
        "gpt",
        "--task",
        task,
        "--recorded",
        "--results",
        ROOT / "results",
        "--write",
        copy,
        "--picture",
        drawn,
    )
    assert done.returncode == 0, done.stderr
    assert copy.read_text() == (ROOT / "docs/gpt.md").read_text()
    assert drawn.stat().st_size > 10_000


def test_differences_are_paired():
    run = ROWS[3].run
    one, other = (
        page.LocalResult(
            ROWS[3],
            None,
            None,
            None,
            tuple(record_of(dataclasses.replace(run, seed=seed), loss) for seed, loss in enumerate(losses)),
        )
        for losses in ((1.0, 2.0, 3.0, 9.0), (0.9, 1.8, 2.7))
    )
    apart, half = page.difference(one, other)
    assert apart == pytest.approx(0.2)
    assert half == pytest.approx(4.302653 * 0.1 / 3**0.5, rel=1e-4)
