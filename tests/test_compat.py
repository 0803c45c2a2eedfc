"""What differs between versions of torch, with the versions that are not installed played, and how programs end."""

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rtopk.fsdp
from rtopk import compat


def test_versions_are_compared_as_numbers(monkeypatch):
    for text, found in (("2.6.0+cu124", (2, 6)), ("2.15.0a0+git1", (2, 15))):
        monkeypatch.setattr(torch, "__version__", text)
        assert compat.version() == found
    compat.require_torch((2, 13), "this")  # 2.15 is newer than 2.13, and "2.15" < "2.2" as text


def test_fsdp_refuses_an_older_torch_and_names_the_one_it_needs(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(RuntimeError, match=r"rtopk.fsdp needs torch 2.\d+ or newer, found 2.6.0"):
        rtopk.fsdp.register(nn.Linear(1, 1), None)


@pytest.mark.parametrize("name", ["all_gather_single", "all_gather_into_tensor"])
def test_the_gather_goes_by_either_name(name, monkeypatch):
    for known in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.delattr(dist, known, raising=False)
    monkeypatch.setattr(
        dist, name, lambda out, own, group, async_op: (out, own, group, async_op), raising=False
    )
    assert compat.all_gather_single("out", "own", "group") == ("out", "own", "group", True)


LATE = """
import time
import torch
import torch.distributed as dist
import rtopk.transport

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
held = dist.group.WORLD  # as a DDP model holds it, so that its threads outlive it

def linger(done):  # in Gloo's thread, when nobody waits for it any more
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass
    return done.value()

future = rtopk.compat.all_gather_single(torch.empty(4), torch.zeros(4)).get_future()
future.then(linger)
future.wait()
dist.destroy_process_group()
print("all done", flush=True)
"""


def test_a_program_may_end_while_gloo_lets_go_of_its_tensors():
    """Without `let_gloo_finish` it ends with SIGABRT after "all done"."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "all done\n"), done.stderr[-2000:]


@pytest.mark.parametrize(
    ("states", "looks"),
    [
        ([set()], 1),  # no Gloo
        ([{"S"}, {"S"}, {"S"}], 3),
        ([{"S"}, {"S"}, {"R", "S"}, {"D"}, {"S"}, {"S"}, {"S"}], 7),
        ([{"R"}, set()], 2),  # joined meanwhile
    ],
)
def test_the_end_waits_until_gloo_is_idle(states, looks, monkeypatch):
    left = list(states)
    monkeypatch.setattr(compat, "_gloo_states", lambda: left.pop(0))
    compat.let_gloo_finish()
    assert len(states) - len(left) == looks


def test_the_end_does_not_wait_forever(monkeypatch):
    monkeypatch.setattr(compat, "_gloo_states", lambda: {"R"})
    monkeypatch.setattr(compat, "PATIENCE", 0.05)
    begin = time.monotonic()
    compat.let_gloo_finish()
    assert 0.05 <= time.monotonic() - begin < 5


def test_states_are_those_of_gloos_threads_alone(tmp_path, monkeypatch):
    for number, text in enumerate(
        (f"7 ({compat.GLOO}) S 1 2", "8 (a) R (b) D 1 2", f"9 ({compat.GLOO}) R 1")
    ):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "stat").write_text(text)
    monkeypatch.setattr(compat, "TASKS", tmp_path)
    assert compat._gloo_states() == {"S", "R"}
    monkeypatch.setattr(compat, "TASKS", tmp_path / "not linux")
    assert compat._gloo_states() == set()
