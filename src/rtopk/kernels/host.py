"""Between host memory and a device: one wait for any number of tensors, and none on the way back.

Whatever the host needs to know of a device's work goes through `fetch`, so what a step waits for can be counted.
Work that must know something halfway is a generator: it asks (`ask`), and goes on when it is told. `answer` runs
several, and waits once for all that they have asked for. Tensors in host memory are there already: nobody asks.

Gradients are worked on in the current stream of the device. Payloads have a stream of their own (`aside`): they
come from host memory and end there, so they do not wait for the gradients' work, nor that for them.
"""

import functools
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Asking = Generator[Sequence[Tensor], list[Tensor], T]  # asks for tensors, gets them in host memory, returns


def fetch(*tensors: Tensor) -> list[Tensor]:
    """Return tensors of one device in host memory; those that are there already as they are.

    Copies of one stream finish in order, so only the last one waits. All go to pinned memory: torch takes it for
    those that do not wait, while the device is still at work.
    """
    here = [tensor.detach() for tensor in tensors]
    away = [place for place, tensor in enumerate(here) if not tensor.is_cpu]
    if away and here[away[0]].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the host must know what was selected, so a step cannot be captured in a CUDA graph; capture forward "
            "and backward under model.no_sync(), or train without graphs"
        )
    for place in away[:-1]:
        here[place] = begin_fetch(here[place])
    for place in away[-1:]:
        last = here[place]
        here[place] = torch.empty(last.shape, dtype=last.dtype, pin_memory=last.is_cuda).copy_(last)
    return here


def ask(*tensors: Tensor) -> Asking[list[Tensor]]:
    """Return tensors in host memory, with the next wait: `here = yield from ask(...)`."""
    if all(tensor.is_cpu for tensor in tensors):
        return fetch(*tensors)
    return (yield tensors)


def answer(askers: Sequence[Asking[T]]) -> list[T]:
    """Run work that asks, and return the results; what all of it asks for at a time is one wait.

    Each runs until it asks, then all go on, in the order given. An error of one ends the others where they are.
    """
    results: list[Any] = [None] * len(askers)
    asked: list[tuple[int, Sequence[Tensor]]] = []
    try:
        for place, asker in enumerate(askers):
            try:
                asked.append((place, next(asker)))
            except StopIteration as end:
                results[place] = end.value
        while asked:
            before, asked = asked, []
            told = iter(fetch(*chain.from_iterable(tensors for _, tensors in before)))
            for place, tensors in before:
                try:
                    asked.append((place, askers[place].send(list(islice(told, len(tensors))))))
                except StopIteration as end:
                    results[place] = end.value
    except BaseException:
        for asker in askers:  # they hold memory of the device
            asker.close()
        raise
    return results


def begin_fetch(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, to be read only after the next `fetch` in the same stream."""
    return tensor.detach().to("cpu", non_blocking=True)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, without waiting for what that device is doing.

    From pinned memory, because a copy from other memory may wait for the stream. Torch keeps the pinned memory
    until the copy is done. On the way to host memory it waits: whoever reads there does not ask if it is done.
    """
    if device.type == "cpu" and not tensor.is_cpu:
        return fetch(tensor)[0]
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@contextmanager
def aside(device: torch.device, *used: Tensor) -> Iterator[None]:
    """Work in the payloads' stream of a device, within a block; on the CPU there are no streams.

    `used` are tensors from elsewhere that the block reads: the stream waits for what the current one is still doing
    to them, and their memory is not given to others before the stream is done with it.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(torch.cuda.current_device() if device.index is None else device.index)
    for tensor in used:
        if tensor.is_cuda:
            stream.wait_stream(torch.cuda.current_stream(device))
            tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def promise(tensor: Tensor) -> "torch.futures.Future[Tensor]":
    """Return a Future of a tensor: whoever waits for one on a card waits in their stream."""
    devices: list[int | str | torch.device] | None = [tensor.device] if tensor.is_cuda else None
    return torch.futures.Future(devices=devices)


class Streams:
    """The streams that a round's work was queued in: autograd calls hooks in those of the forward pass."""

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None

    def join(self, device: torch.device) -> None:
        """Let the current stream wait for the one before, which has waited in its turn: all work is in order.

        A stream that comes back waits too. It may write to memory that another has set to zero in between.
        """
        if device.type == "cuda":
            current = torch.cuda.current_stream(device)
            if self._last is not None and self._last != current:
                current.wait_stream(self._last)
            self._last = current
