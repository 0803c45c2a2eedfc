"""A client's state survives restarts, and damage is noticed."""

import multiprocessing

import pytest
import torch

from rtopk.flower.store import FileStore
from rtopk.state_file import StateError


def state(value=1.0):
    return {"vector": torch.full((100,), value), "round": 3, "pending": None}


def test_round_trip_and_names(tmp_path):
    store = FileStore(tmp_path, "hospital/7 ü", 0xABC)
    assert store.load() is None
    store.save(state(2.0))
    store.save(state(3.0))
    again = FileStore(tmp_path, "hospital/7 ü", 0xABC).load()
    assert torch.equal(again["vector"], torch.full((100,), 3.0))
    assert again["round"] == 3
    assert FileStore(tmp_path, "hospital/8", 0xABC).load() is None
    assert FileStore(tmp_path, "hospital/7 ü", 0xABD).load() is None  # another model
    assert [path.suffix for path in tmp_path.iterdir()] == [".state"]  # no drafts left


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "foreign"])
def test_damage_is_noticed(tmp_path, damage):
    store = FileStore(tmp_path, "a", 1)
    store.save(state())
    data = bytearray(store.path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    data = {"flip": data, "truncate": data[:-1], "empty": b"", "foreign": b"x" * 200}[damage]
    store.path.write_bytes(data)
    with pytest.raises(StateError, match=r"client-.*(damaged|too few|not a state)"):
        store.load()


def test_a_crash_in_the_middle_leaves_the_old_state(tmp_path, monkeypatch):
    store = FileStore(tmp_path, "a", 1)
    store.save(state(1.0))

    def crash(number):
        raise OSError("no space left")

    monkeypatch.setattr("rtopk.state_file.os.fsync", crash)
    with pytest.raises(OSError, match="no space"):
        store.save(state(2.0))
    assert float(store.load()["vector"][0]) == 1.0
    assert len(list(tmp_path.iterdir())) == 1


def _hold(path, ready, let_go):
    with FileStore(path, "a", 1).locked():
        ready.set()
        let_go.wait(30)


def test_two_processes_cannot_share_a_client(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, let_go = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(tmp_path, ready, let_go))
    process.start()
    assert ready.wait(30)
    store = FileStore(tmp_path, "a", 1)
    with pytest.raises(StateError, match="must not share an id"), store.locked(seconds=0.1):
        pass
    let_go.set()
    process.join()
    with store.locked(seconds=5):
        pass
