"""The link benchmark: real ranks, the bytes that each method owes, and rivals that average correctly."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rtopk.seed import generator
from rtopk.studies.bench import StandIn, hosts, link_methods
from rtopk.studies.bench.link import METHODS, Cell, LinkPlan, measure
from rtopk.studies.bench.link_report import cells as sorted_cells
from rtopk.studies.bench.link_report import draw_measured, due_bytes, markdown
from rtopk.studies.bench.ranks import RankFailedError, Ranks

SIZE = 256 * 512 + 512 + 512 * 128 + 128 + 128 * 10 + 10  # of the model "small"
FEW = (
    ("dense", None, None),
    ("fp16", None, None),
    ("powersgd-1", None, None),
    ("topk-allgather", 0.01, None),
    ("rtopk", 0.01, "fp16"),
)
KEYS = {
    "model", "mbit", "nodes", "method", "density", "values", "step_ms", "compute_ms", "select_ms",
    "exchange_ms", "wire_bytes", "payload_bytes",
}  # fmt: skip


LOOPBACK = hosts.unavailable_reason() is not None


@pytest.fixture(scope="module")
def rows():
    plan = LinkPlan(
        ("small",), (None,), (2,), rounds=1, steps=3, compute_ms=3.0, loopback=LOOPBACK, methods=FEW
    )
    (cell,) = measure(plan)
    return {row.method: row for row in cell}


def test_payloads_are_what_each_method_owes(rows):
    assert rows["dense"].payload_bytes == 4 * SIZE
    assert rows["fp16"].payload_bytes == 2 * SIZE
    low_rank = 256 + 512 + 512 + 128 + 128 + 10 + 512 + 128 + 10  # P and Q of three matrices, biases whole
    assert rows["powersgd-1"].payload_bytes == 4 * low_rank
    assert rows["topk-allgather"].payload_bytes == pytest.approx(12 * SIZE / 100, abs=24)
    sparse = (SIZE - 650) / 100
    # An entry takes 16 bits of value and at least log2(1 / density) = 6.6 of position; 650 are biases.
    assert 2 * 650 + sparse * 22.6 / 8 < rows["rtopk"].payload_bytes < 2 * 650 + sparse * 25 / 8 + 200


@pytest.mark.skipif(LOOPBACK, reason=f"lo carries everybody's traffic, and: {hosts.unavailable_reason()}")
def test_interface_bytes_are_payload_times_fan_out(rows):
    for method in ("dense", "fp16", "topk-allgather", "rtopk"):  # powerSGD's are many and small
        over = rows[method].wire_bytes - due_bytes(rows[method])
        # Of payloads this small, the fixed part (Gloo's own headers, acknowledgements) is more than 5 %.
        assert 0 <= over < 0.05 * due_bytes(rows[method]) + 4_000, method


@pytest.mark.slow
def test_what_is_done_is_not_repeated(rows):
    plan = LinkPlan(("small",), (None,), (2,), rounds=1, steps=1, compute_ms=1.0, loopback=True, methods=FEW)
    done = list(rows.values())
    assert list(measure(plan, done=done)) == []
    (cell,) = measure(plan, done=done[1:])
    assert [row.method for row in cell] == [done[0].method]


def test_times_are_split(rows):
    for row in rows.values():
        assert row.step_ms >= 3.0  # the computation that was waited for
        assert row.step_low_ms <= row.step_ms <= row.step_high_ms
        assert row.cpu_ms > 0
    ours = rows["rtopk"]
    assert 0 < ours.select_ms + ours.codec_ms + ours.exchange_ms < ours.step_ms
    assert "rtopk 1 % fp16" in markdown(list(rows.values()))


def test_a_picture_needs_cells(rows, tmp_path):
    picture = tmp_path / "links.png"
    draw_measured(list(rows.values()), 2, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="with 5 nodes"):
        draw_measured(list(rows.values()), 5, picture)


def test_tables_are_in_the_usual_order(rows):
    mixed = [replace(row, mbit=rate) for rate in (10.0, None, 100.0) for row in reversed(rows.values())]
    cells = sorted_cells(mixed)
    assert [cell[0].mbit for cell in cells] == [None, 100.0, 10.0]
    assert [row.method for row in cells[0]] == [method for method, _, _ in FEW]


def test_a_rank_that_dies_ends_the_run():
    with Ranks(2, None) as ranks:
        ranks._ranks[1].send_signal(signal.SIGKILL)
        with pytest.raises(RankFailedError, match=r"rank [01] has ended"):
            ranks.order("barriers")


def test_slow_methods_are_taken_once():
    cell = Cell("m", 11_200_000, 10.0, 4, 0.0)
    assert cell.seconds("dense", None) == pytest.approx(53.76)
    assert cell.seconds("topk-allgather", 0.01) == pytest.approx(3.2256)
    assert cell.seconds("rtopk", 0.01) == 0.0


KEYED = [*METHODS, ("topk-allgather", 1.0, None)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One rank: what it averages must be its own gradient. What each method found, by its key.

    In a process that is never torn down: torch's PowerSGD completes futures on Gloo's threads, and destroying the
    group beside them has crashed a pytest worker.
    """
    found = tmp_path_factory.mktemp("alone") / "found.json"
    subprocess.run([sys.executable, __file__, str(found)], check=True, timeout=300)
    return json.loads(found.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYED, ids=str)
def test_rivals_keep_what_they_do_not_send(alone, key):
    method, density, _ = key
    found = alone[str(key)]
    assert found["payload"] > 0 or method == "rtopk-allreduce"  # of which it is what arrives: nothing here
    if method in ("dense", "fp16") or density == 1.0:
        assert found["close"]
        return
    # Error feedback: what is not sent is sent later, so the sum cannot stray further than what is held back.
    if density is not None:
        assert found["same sign"] > 0.99
    assert found["astray"] <= found["all"]


def _alone(path):
    store = dist.FileStore(f"{path}.store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    Path(path).write_text(json.dumps({str(key): _sum_of_steps(*key) for key in KEYED}))
    os._exit(0)


def _sum_of_steps(method, density, values):
    """Add up what a method averages of one gradient, again and again."""
    model = nn.Linear(64, 32)
    ddp = DistributedDataParallel(model)
    current = [link_methods.Off()]
    ddp.register_comm_hook(current, _dispatch)
    batch = torch.randn(8, 64, generator=generator("link bench"))
    (ddp(batch) ** 2).sum().backward()  # DDP rebuilds its buckets after this
    wanted = model.weight.grad.clone()
    model.zero_grad()
    current[0] = link_methods.make(method, ddp, density, values)
    total = torch.zeros_like(wanted)
    steps = 1 if density in (None, 1.0) else min(round(1.5 / density), 150)
    payload = float("inf")
    for _ in range(steps):
        (ddp(batch) ** 2).sum().backward()
        total += model.weight.grad
        model.zero_grad()
        payload = min(payload, current[0].finish().payload)
    alike = torch.sign(total).eq(torch.sign(wanted))[total != 0]
    return {
        "payload": payload,
        "close": torch.allclose(total, wanted, rtol=2e-3, atol=1e-3),
        "same sign": float(alike.float().mean()),
        "astray": float((total - steps * wanted).norm()),
        "all": float(steps * wanted.norm()),
    }


def _dispatch(current: list, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return current[0].hook(bucket)


def test_the_stand_in_gives_real_gradients_and_takes_the_time_it_is_told():
    import time

    stand_in = StandIn("small", rank=0)
    assert stand_in.size == SIZE
    stand_in.seconds = 0.06
    started = time.perf_counter()
    stand_in(torch.zeros(1, requires_grad=True)).backward()
    assert time.perf_counter() - started >= 0.06
    gradients = [p.grad for p in stand_in.parameters()]
    assert all(g.abs().sum() > 0 for g in gradients)
    assert stand_in.measure() > 0


@pytest.mark.slow
@pytest.mark.skipif(LOOPBACK, reason=f"no hosts here: {hosts.unavailable_reason()}")
def test_on_shaped_links_dense_takes_what_the_link_takes():
    command = [sys.executable, "-m", "rtopk", "bench", "link", "--model", "small", "--mbit", "20"]
    ended = subprocess.run(
        [*command, "--rounds", "1", "--steps", "2", "--json"], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)["rows"]
    assert [(r["method"], r["density"], r["values"]) for r in found] == list(METHODS)
    assert set(found[0]) >= KEYS
    dense = found[0]
    ideal = 1e3 * 1.5 * 4 * SIZE * 8 / 20e6  # 475 ms; without a limit it would take about 10
    assert 0.9 * ideal < dense["step_ms"] < 2 * ideal
    ours = next(r for r in found if r["method"] == "rtopk" and r["density"] == 0.001)
    assert ours["step_ms"] < dense["step_ms"] / 3
    assert not [line for line in _namespaces() if line.startswith(f"rtopk-{os.getpid()}-")]


def _namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(LOOPBACK, reason=f"sites need hosts, and: {hosts.unavailable_reason()}")
def test_sites_of_a_sharded_model_exchange_only_what_crosses_the_link():
    """Two sites of two ranks: native HSDP sends the gradient between them once, ours a hundredth."""
    few = (("hsdp", None, None), ("rtopk", 0.01, "fp16"))
    plan = LinkPlan(("small",), (None,), (2,), rounds=1, steps=3, compute_ms=3.0, methods=few, engine="fsdp")
    ((native, ours),) = measure(plan)
    assert (native.method, ours.method, ours.per_host) == ("hsdp", "rtopk", 2)
    assert native.payload_bytes == pytest.approx(4 * SIZE / 2, abs=16)  # a rank's shard
    assert ours.payload_bytes < native.payload_bytes / 40
    for row in (native, ours):
        assert (
            due_bytes(row) < row.wire_bytes < 1.15 * due_bytes(row) + 20_000
        )  # headers, acknowledgements, status
    assert "2 sites of 2 ranks" in markdown([native, ours])


@pytest.mark.slow
def test_outer_steps_under_torchft():
    """torchft's own DiLoCo and ours, each under a lighthouse of its own."""
    pytest.importorskip("torchft")
    few = (("diloco", None, None), ("rtopk", 0.01, "4bit"))
    plan = LinkPlan(
        ("small",),
        rounds=1,
        steps=2,
        compute_ms=3.0,
        methods=few,
        nodes=(2,),
        loopback=True,
        engine="torchft",
    )
    ((theirs, ours),) = measure(plan)
    assert theirs.payload_bytes == 4 * theirs.size
    assert ours.payload_bytes < theirs.payload_bytes / 100
    assert min(theirs.step_ms, ours.step_ms) >= 3.0


if __name__ == "__main__":
    _alone(sys.argv[1])
