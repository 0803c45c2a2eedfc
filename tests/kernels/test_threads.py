"""Work shared between threads: results in order, errors to the caller, one thread where torch has one."""

import threading

import pytest
import torch

from rtopk.kernels import threads


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "_trials", {})  # nothing has shown yet that one would be faster
    yield
    torch.set_num_threads(before)


def starved(region, data, wanted, flags):
    """A libgomp that gives one thread, as it does within another parallel region."""
    region(data)


WAYS = {
    "pool": threads._in_pool,
    "starved": lambda tasks: threads._in_region(starved, tasks),
    "as here": threads.together,
}


@pytest.mark.parametrize("way", WAYS)
def test_results_are_in_order_and_all_tasks_run(way):
    assert WAYS[way]([lambda i=i: i * i for i in range(7)]) == [i * i for i in range(7)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_a_task_reaches_the_caller(way, bad):
    def task(i):
        if i == bad:
            raise KeyError("of the task")

    with pytest.raises(KeyError, match="of the task"):
        WAYS[way]([lambda i=i: task(i) for i in range(2)])
    assert WAYS[way]([lambda: 1, lambda: 2]) == [1, 2]  # and the next call works


def test_two_tasks_run_at_the_same_time():
    meet = threading.Barrier(2)
    assert sorted(threads.together([lambda: meet.wait(30), lambda: meet.wait(30)])) == [0, 1]


def test_one_thread_of_torch_is_one_thread_here():
    torch.set_num_threads(1)
    assert set(threads.together([threading.get_ident] * 3)) == {threading.get_ident()}


def test_little_work_stays_in_this_thread():
    assert set(threads.together([threading.get_ident] * 3, size=100)) == {threading.get_ident()}


def in_threads(elapsed, steps=10_000):
    """How often work whose tasks take one second goes to threads, if they take so long in turn."""
    trial, tried = threads._Trial(), 0
    for _ in range(steps):
        if trial.left:
            trial.left -= 1
        else:
            trial.judge(elapsed[tried % len(elapsed)], 1.0)
            tried += 1
    return tried / steps


def test_work_that_loses_with_threads_goes_back_to_one():
    assert in_threads([3.0]) < 0.002
    assert in_threads([0.95]) < 0.002  # both use the memory: a thread alone takes less than both together
    assert in_threads([3.0, 3.0, 3.0, 0.5]) < 0.01  # now and then they win: less than they lose


def test_a_thread_put_aside_once_does_not_end_it():
    assert in_threads([0.5] * 9 + [1.4]) == 1.0
    assert 0.1 < in_threads([0.5] * 90 + [9.0]) < 1.0  # a loss larger than what they saved does, for a while
