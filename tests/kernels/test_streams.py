"""Streams, by the order of the calls: there is no card here, so a recording of torch.cuda stands in for it.

What this cannot show: that the order suffices on a card. The self-test compares bits there.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rtopk import compat
from rtopk.kernels import device, host
from rtopk.transport import AllGather, Swap

CARD = torch.device("cuda", 1)


class Stream:
    """A stream that writes down what is asked of it."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def wait_stream(self, other):
        self.calls.append(f"{self.name} waits for {other.name}")


class Away:
    """A tensor that claims to be on a card."""

    is_cpu, is_cuda = False, True

    def __init__(self, calls=None):
        self.calls = calls

    def detach(self):
        return self

    def record_stream(self, stream):
        self.calls.append(f"recorded on {stream.name}")


@pytest.fixture
def cuda(monkeypatch):
    """Record what is asked of torch.cuda; `now` is the name of the current stream."""
    calls = []
    calls_of = {"now": "main"}

    @contextmanager
    def within(stream):
        before, calls_of["now"] = calls_of["now"], stream.name
        calls.append(f"into {stream.name}")
        yield
        calls.append(f"out of {stream.name}")
        calls_of["now"] = before

    streams = {}
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: Stream(f"payloads of {index}", calls))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: streams.setdefault(calls_of["now"], Stream(calls_of["now"], calls)),
    )
    host._stream.cache_clear()
    yield calls, calls_of
    host._stream.cache_clear()


def test_payloads_have_a_stream_of_their_own_on_the_right_card(cuda):
    calls, _ = cuda
    with host.aside(CARD, torch.zeros(3)):  # from host memory: nothing to wait for
        calls.append("work")
    with host.aside(CARD, Away(calls)):
        calls.append("work")
    with host.aside(torch.device("cuda")):  # the current one
        pass
    assert calls == [
        *("into payloads of 1", "work", "out of payloads of 1"),
        *("payloads of 1 waits for main", "recorded on payloads of 1"),
        *("into payloads of 1", "work", "out of payloads of 1"),
        *("into payloads of 0", "out of payloads of 0"),
    ]
    with host.aside(torch.device("cpu"), torch.zeros(3)):
        assert len(calls) == 10


def test_work_of_several_streams_is_joined(cuda):
    """Autograd calls the hooks of a round in the streams of the forward pass."""
    calls, now = cuda
    streams = host.Streams()
    for name in ("a", "a", "b", "a", "c"):
        now["now"] = name
        streams.join(CARD)
    # "a" too, when it comes back: "b" may have made what it is about to write to.
    assert calls == ["b waits for a", "a waits for b", "c waits for a"]
    streams.join(torch.device("cpu"))
    assert len(calls) == 3


def test_a_collective_and_what_it_needs_are_in_that_stream(cuda, tmp_path, monkeypatch):
    """The copy up, the collective, and the wait for it with the copy down; payloads here travel in host memory."""
    calls, _ = cuda
    gather = compat.all_gather_single

    def recorded(name, function):
        def call(*arguments):
            calls.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr("rtopk.transport.aside", lambda device, *used: host.aside(CARD, *used))
    monkeypatch.setattr("rtopk.transport.send", recorded("send", host.send))
    monkeypatch.setattr("rtopk.transport.fetch", recorded("fetch", host.fetch))
    monkeypatch.setattr(compat, "all_gather_single", recorded("collective", gather))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        work = AllGather().start(torch.arange(5, dtype=torch.uint8))
        assert work.wait()[0].tolist() == [0, 1, 2, 3, 4]
    finally:
        dist.destroy_process_group()
    side = "payloads of 1"
    assert calls == [
        f"into {side}",
        "send",
        "collective",
        f"out of {side}",
        f"into {side}",
        "fetch",
        f"out of {side}",
    ]


def test_parts_are_copied_down_in_the_stream_that_made_them(cuda, tmp_path, monkeypatch):
    """The payloads' stream does not wait for that one, so a copy in it could come too early."""
    calls, now = cuda

    class Part(Away):
        def numel(self):
            return 5

        def cpu(self):
            calls.append(f"copied in {now['now']}")
            return torch.arange(5, dtype=torch.uint8)

    monkeypatch.setattr("rtopk.transport.aside", lambda device, *used: host.aside(CARD, *used))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert Swap(AllGather(), [Part()]).wait()[0].tolist() == [0, 1, 2, 3, 4]
    finally:
        dist.destroy_process_group()
    side = ["into payloads of 1", "out of payloads of 1"]
    assert calls == [*side, "copied in main", *side, *side]


class Copied(Away):
    """A tensor that writes down how it is copied; pinned, if that was asked for."""

    device, shape, dtype = CARD, (3,), torch.float32

    def __init__(self, calls, *, there=True, pinned=""):
        super().__init__(calls)
        self.is_cuda, self.is_cpu, self.pinned = there, not there, pinned

    def pin_memory(self):
        return Copied(self.calls, there=False, pinned="pinned ")

    def to(self, device, non_blocking=False):
        how = "queued" if non_blocking else "waited for"
        self.calls.append(f"{self.pinned}copy to {torch.device(device).type}, {how}")
        return self

    def copy_(self, other):
        self.calls.append(f"copy into {self.pinned}memory, waited for")
        return self


def test_copies_are_from_and_to_pinned_memory_and_the_last_one_down_waits(monkeypatch):
    """From other memory a copy is not asynchronous, whatever it is asked to be."""
    calls = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        torch, "empty", lambda *_, pin_memory, **__: Copied(calls, pinned="pinned " if pin_memory else "")
    )
    here = torch.ones(3)
    answers = host.fetch(Copied(calls), here, Copied(calls), Copied(calls))
    assert torch.equal(answers[1], here)
    assert calls == [*["copy to cpu, queued"] * 2, "copy into pinned memory, waited for"]
    calls.clear()
    host.send(Copied(calls, there=False), CARD)
    assert calls == ["pinned copy to cuda, queued"]
    calls.clear()
    host.send(Copied(calls), torch.device("cpu"))
    assert calls == ["copy into pinned memory, waited for"]


def test_futures_know_their_card(monkeypatch):
    """Else whoever waits for one does not wait in their stream."""
    monkeypatch.setattr(torch.futures, "Future", lambda devices: devices)
    assert host.promise(Copied([])) == [CARD]
    assert host.promise(torch.zeros(3)) is None


def test_programs_are_launched_on_the_card_of_their_tensors(monkeypatch):
    """Triton takes the current one, which need not be theirs."""
    calls = []

    @contextmanager
    def on(card):
        calls.append(f"on {card}")
        yield
        calls.append("back")

    def launch(*arguments, **options):
        calls.append("launch")

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(device, "_programs", lambda: SimpleNamespace(subtract={(2,): launch}))
    device._launch("subtract", Copied([]), 2, "vector")
    assert calls == [f"on {CARD}", "launch", "back"]
    device._launch("subtract", torch.zeros(3), 2, "vector")
    assert calls[3:] == ["launch"]


def test_a_cuda_graph_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="a step cannot be captured in a CUDA graph; capture forward"):
        host.fetch(Away())
