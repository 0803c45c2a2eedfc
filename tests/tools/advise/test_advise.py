"""The adviser: its arithmetic on a machine without costs, its choices, and its word against measurements."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rtopk.studies.bench import traffic
from rtopk.studies.bench.link import METHODS, LinkRow
from rtopk.tools.advise import Link, Machine, Workload, choose, predict, reference
from rtopk.tools.advise.advice import Scenario, compare, median_error, simulate
from rtopk.tools.advise.cost import HEADERS, _buckets, workload
from rtopk.tools.advise.device import on_device
from rtopk.tools.advise.machine import Line, fit

FREE = Machine(
    "costs nothing",
    {m: Line(0.0) for m in ("dense", "fp16", "powersgd-1", "powersgd-2", "topk-allgather", "rtopk")},
    {v: Line(0.0) for v in ("fp16", "4bit")},
    {v: Line(0.0) for v in ("fp16", "4bit")},
    byte_ns=0.0,
    message_ms=0.0,
)
SHAPES = ((1000, 1000), (1000,), (1000, 500))


def by_name(machine, work, link):
    return {p.label: p for p in predict(machine, work, link)}


def test_without_costs_only_the_wire_is_left():
    work = Workload(SHAPES, step_ms=0.0)
    found = by_name(FREE, work, Link(4, mbit=100.0))
    d = 1_501_000
    assert work.size == d
    assert found["dense"].step_ms == pytest.approx(1.5 * 4 * d * HEADERS * 8 / 100e6 * 1e3)
    assert found["fp16"].step_ms == pytest.approx(found["dense"].step_ms / 2)
    assert found["topk-allgather 1 %"].step_ms == pytest.approx(3 * 12 * 15_010 * HEADERS * 8 / 100e6 * 1e3)
    # PyTorch's powerSGD sends P and Q of both matrices, and the bias whole.
    assert found["powersgd-1"].payload_bytes == 4 * (2000 + 1000 + 1500)
    assert found["powersgd-2"].payload_bytes == 4 * (2 * 2000 + 1000 + 2 * 1500)


def test_our_payload_is_the_codecs_own():
    import torch

    from rtopk.codec import Codec
    from rtopk.replicas.control import SIZE
    from rtopk.sparse import SparseVector

    found = by_name(FREE, Workload(SHAPES, 0.0), Link(4, mbit=100.0))["rtopk 1 % fp16"]
    codec = Codec(values="fp16", fixed=True, dense_size=1000)
    indices = torch.cat([torch.arange(0, 1_500_000, 100), torch.arange(1_500_000, 1_501_000)])
    payload = codec.encode(SparseVector(indices, torch.ones(16_000), 1_501_000))
    assert found.payload_bytes == SIZE + payload.numel()
    assert found.received_bytes == 3 * found.payload_bytes


def test_dense_hides_behind_backward_and_ours_does_not():
    wire = by_name(FREE, Workload(SHAPES, 0.0), Link(4, 100.0))["dense"].step_ms
    found = by_name(FREE, Workload(SHAPES, 10 * wire), Link(4, 100.0))
    # Two buckets: the last third of backward's end cannot hide the last bucket.
    assert 10 * wire < found["dense"].step_ms < 10.8 * wire
    ours = found["rtopk 1 % fp16"]
    assert ours.step_ms == pytest.approx(10 * wire + ours.wire_ms)


def test_latency_counts_every_message():
    quick, slow = (by_name(FREE, Workload(SHAPES, 0.0), Link(5, 100.0, latency_ms=ms)) for ms in (0.0, 10.0))
    assert slow["rtopk 1 % fp16"].step_ms - quick["rtopk 1 % fp16"].step_ms == pytest.approx(40.0)
    assert slow["dense"].wire_ms - quick["dense"].wire_ms == pytest.approx(2 * 80.0)  # two buckets


def test_local_work_is_slower_on_shared_cores():
    machine = replace(FREE, select={**FREE.select, "rtopk": Line(1.0)})
    alone, shared = (
        by_name(machine, Workload(SHAPES, 0.0), Link(4, None, sharing=s))["rtopk 0.1 % 4bit"] for s in (1, 2)
    )
    assert alone.step_ms == pytest.approx(1.501)
    assert shared.step_ms == pytest.approx(2 * 1.501)


def test_buckets_hold_all_entries_in_the_order_of_backward():
    shares = _buckets([(1000, 1000), (100,), (4000, 4000), (10, 10)])
    assert sum(share for share, _ in shares) == pytest.approx(1.0)
    ready = [when for _, when in shares]
    assert ready == sorted(ready)
    assert ready[-1] == 1.0


def row(method, density, values, **parts):
    zero = dict.fromkeys(("select_ms", "codec_ms", "encode_ms", "average_ms", "exchange_ms"), 0.0)
    fixed = {"model": "m", "size": 10**6, "mbit": None, "nodes": 2, "off_ms": 5.0, "compute_ms": 0.0}
    times = {"step_ms": 5.0, "step_low_ms": 5.0, "step_high_ms": 5.0, "wire_bytes": 0.0}
    given = {**fixed, **times, **zero, "payload_bytes": 0, **parts}
    return LinkRow(method=method, density=density, values=values, **given)


def test_fit_finds_the_costs_that_rows_were_made_from():
    rows = [
        row("dense", None, None, step_ms=9.0, payload_bytes=4 * 10**6),
        row("fp16", None, None, step_ms=8.0, payload_bytes=2 * 10**6),
        row("powersgd-1", None, None, step_ms=8.0),
        row("powersgd-2", None, None, step_ms=10.0),
    ]
    for density in (0.01, 0.001):
        k = density * 10**6
        rows.append(row("topk-allgather", density, None, step_ms=5 + 20 + 5e-4 * k, payload_bytes=12 * k))
        for values in ("fp16", "4bit"):
            encode, average, select = 2e-4 * k, 1.0 + 2 * 3e-4 * k, 4.0 + 1e-4 * k
            parts = {"encode_ms": encode, "average_ms": average, "codec_ms": encode + average}
            step = 5 + select + encode + average + 2
            rows.append(row("rtopk", density, values, step_ms=step, exchange_ms=2.0, **parts))
    machine = fit(rows, 1e-3, "made up")
    assert machine.byte_ns == pytest.approx(1.0)  # 4 ms for 4 MB
    assert machine.select["fp16"].entry == pytest.approx(1.0)  # 3 ms, 2 of them for bytes
    assert machine.select["powersgd-2"].entry == pytest.approx(5.0)
    assert machine.select["topk-allgather"] == Line(pytest.approx(20.0), pytest.approx(500.0))
    assert machine.select["rtopk"] == Line(pytest.approx(4.0), pytest.approx(100.0))
    assert machine.encode["4bit"] == Line(pytest.approx(0.0, abs=1e-6), pytest.approx(200.0))
    assert machine.average["fp16"] == Line(pytest.approx(1.0), pytest.approx(300.0))
    assert machine.message_ms == 1.0
    assert Machine.from_json(json.loads(json.dumps(machine.as_json()))) == machine


def test_its_word_against_the_measurements():
    measured = json.loads((Path(__file__).parents[3] / "results" / "links.json").read_text())["rows"]
    compared = compare(reference(), measured, cores=2)
    assert len(compared) == len(measured) >= 30
    assert median_error(compared) <= 0.20
    half_as_fast = [replace(row, measured_ms=2 * row.measured_ms) for row in compared]
    assert median_error(half_as_fast) > 0.20  # the table could have said no


def test_dense_is_recommended_where_it_wins():
    machine = reference()
    work = workload("11.2M", 100.0)
    assert choose(predict(machine, work, Link(4, 100_000.0, 0.05))).choice.method == "dense"
    assert choose(predict(machine, work, Link(4, None))).choice.method == "dense"
    slow = choose(predict(machine, work, Link(4, 10.0, 0.1)))
    assert slow.choice.method == "rtopk-allreduce"  # a rank receives half of the bytes
    assert slow.choice.density == 0.001
    assert slow.line.endswith('exchange="all-reduce")')


def test_what_sends_more_is_preferred_where_it_is_nearly_as_fast():
    advice = choose(predict(FREE, Workload(SHAPES, 10_000.0), Link(2, 1.0)))
    fastest = min(predict(FREE, Workload(SHAPES, 10_000.0), Link(2, 1.0)), key=lambda p: p.step_ms)
    assert advice.choice.step_ms <= 1.05 * fastest.step_ms
    assert advice.choice.density == 0.01


def test_all_gather_loses_to_dense_when_nodes_are_many():
    scenario = Scenario("made up", 10_000_000, 0.0, 0.0)
    points = {p.nodes: p for p in simulate(FREE, [scenario], nodes=(2, 16, 256, 4096), mbits=(100.0,))}
    crossing = (
        8 * 10_000_000 / next(p.payload_bytes for p in points[2].predictions if p.label == "rtopk 1 % fp16")
    )
    for nodes, point in points.items():
        found = {p.label: p.received_bytes for p in point.predictions}
        assert (found["rtopk 1 % fp16"] > found["dense"]) == (nodes > crossing)


@pytest.mark.parametrize(
    ("model", "size"), [("11200000", 11.2e6), ("11.2M", 11.2e6), ("7B", 7e9), ("512k", 512e3)]
)
def test_models_by_size(model, size):
    assert workload(model, 1.0).size == pytest.approx(size, rel=0.02)


def test_models_by_factory():
    work = workload("rtopk.studies.tasks.models:ResNet", 1.0)
    assert work.size == 11_173_962
    assert work.dense_size == 9_610


@pytest.mark.parametrize("model", ["many", "", "10", "nowhere:model", "math:nothing", "builtins:list"])
def test_wrong_models_are_refused(model):
    with pytest.raises(ValueError, match=r"model|import|Module"):
        workload(model, 1.0)


def test_wrong_links_are_refused():
    with pytest.raises(ValueError, match="got 1"):
        Link(1, 100.0)
    with pytest.raises(ValueError, match="got 0"):
        Link(2, 0.0)
    with pytest.raises(ValueError, match="got -1"):
        Link(2, 1.0, -1.0)


def test_every_method_is_predicted():
    keys = [(p.method, p.density, p.values) for p in predict(FREE, Workload(SHAPES, 1.0), Link(2, 1.0))]
    assert keys == list(METHODS)


def test_the_command_prints_one_json_object(rtopk):
    ended = rtopk("advise", "--model", "11.2M", "--nodes", "4", "--mbit", "100", "--step-ms", "500", "--json")
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["recommended"]["method"] == "rtopk"
    density, values = said["recommended"]["density"], said["recommended"]["values"]
    assert said["recommended"]["line"] == f'rtopk.ddp.register(model, density={density:g}, values="{values}")'
    assert {m["method"] for m in said["methods"]} == {method for method, _, _ in METHODS}


def test_the_command_ends_with_the_line_to_paste(rtopk):
    slow = rtopk("advise", "--model", "11.2M", "--nodes", "4", "--mbit", "100", "--step-ms", "500")
    assert "rtopk.ddp.register(model, density=" in slow.stdout.splitlines()[-1]
    fast = rtopk("advise", "--model", "11.2M", "--nodes", "4", "--mbit", "100000", "--step-ms", "500")
    assert fast.stdout.rstrip().endswith("use dense")


def test_the_command_says_what_is_missing(rtopk):
    ended = rtopk("advise")
    assert ended.returncode == 2
    assert "--mbit, or --probe" in ended.stderr


def test_the_parts_of_a_card_are_predicted_and_say_so(rtopk):
    """Slow links: the local part shrinks. Fast links: NCCL is not Gloo, and dense wins."""
    arguments = ("advise", "--model", "11.2M", "--nodes", "4", "--step-ms", "100")
    told = json.loads(rtopk(*arguments, "--mbit", "100", "--device", "a100", "--json").stdout)
    assert told["machine"].endswith("with a100 (2.0 TB/s): predicted, not run on a GPU")
    methods = {(m["method"], m["density"], m["values"]): m for m in told["methods"]}
    assert ("topk-allgather", 0.01, None) not in methods  # no model of torch.topk
    here = json.loads(rtopk(*arguments, "--mbit", "100", "--json").stdout)
    for method in here["methods"]:
        found = methods.get((method["method"], method["density"], method["values"]))
        assert found is None or found["local_ms"] <= method["local_ms"]
        assert found is None or found["payload_bytes"] == method["payload_bytes"]
    assert "use dense" in rtopk(*arguments, "--mbit", "100000", "--device", "h100").stdout
    assert on_device(reference(), "cpu") == reference()
    wrong = rtopk(*arguments, "--mbit", "100", "--device", "tpu")
    assert wrong.returncode != 0
    assert "device must be one of cpu, cuda, a100, h100, got 'tpu'" in wrong.stderr


def test_a_card_takes_what_the_traffic_model_says():
    """With the default r = 2 k, and averaging aside, selection is the hook's row of `rtopk bench traffic`."""
    size, k = 66_000_000, 66_000
    stages = traffic.STEPS["the hook, fp32 gradient"][:-1]
    expected = sum(s.bytes(size, 0.001, 2.0) / 2e12 + s.launches * traffic.LAUNCH for s in stages)
    assert on_device(reference(), "a100").select["rtopk"].seconds(size, k) == pytest.approx(expected)
