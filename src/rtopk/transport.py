"""Carry payloads between nodes: all of them to every node (exchange), or to each node its own part (swap)."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rtopk import compat
from rtopk.kernels.host import aside, fetch, send


class Transport(Protocol):
    """Carry payloads between nodes."""

    nodes: int  # all of them
    local: range  # those of this process

    def exchange(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Send the payloads of the local nodes, return those of all nodes in node order."""

    def swap(self, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Send part j of every local node to node j; return what each local node got, in node order."""


class InProcess:
    """All nodes live in this process."""

    def __init__(self, nodes: int) -> None:
        if nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {nodes}")
        self.nodes = nodes
        self.local = range(nodes)

    def exchange(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Return the payloads, one a node."""
        if len(payloads) != self.nodes:
            raise ValueError(f"expected one payload from each of {self.nodes} nodes, got {len(payloads)}")
        return list(payloads)

    def swap(self, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Return for each node the parts that all nodes have for it."""
        return [list(column) for column in zip(*parts, strict=True)]


class AllGather:
    """One node per process of torch.distributed; the payloads of a round have the same size on all ranks.

    One collective per exchange, of a size that every rank knows: Gloo refuses uneven sizes. Payloads travel on
    `device`, that of the parameters, or through host memory if its backend is Gloo or MPI.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.nodes = dist.get_world_size(group)
        self.local = range(self.rank, self.rank + 1)
        self.device = carrier(dist.get_backend_config(group), device or torch.device("cpu"))

    def start(self, payload: Tensor) -> "InFlight":
        """Start to send this process's payload and to receive those of all ranks."""
        with aside(self.device, payload):
            payload = send(payload, self.device).contiguous()
            arrived = torch.empty(self.nodes * payload.numel(), dtype=payload.dtype, device=self.device)
            work = compat.all_gather_single(arrived, payload, self.group)
        return InFlight(work, payload, arrived.view(self.nodes, -1))

    def exchange(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Send the payload of this process, return those of all ranks in rank order."""
        if len(payloads) != 1:
            raise ValueError(f"expected the one payload of rank {self.rank}, got {len(payloads)}")
        return self.start(payloads[0]).wait()

    def exchange_uneven(self, payload: Tensor) -> list[Tensor]:
        """Exchange payloads whose sizes differ: sizes first, then all at the size of the longest."""
        padded, sizes = self._padded(payload)
        return [whole[:size] for whole, size in zip(self.start(padded).wait(), sizes, strict=True)]

    def swap(self, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Send part j to rank j; return what this rank got, in rank order."""
        if len(parts) != 1:
            raise ValueError(f"expected the parts of rank {self.rank} alone, got {len(parts)} lists")
        return [Swap(self, parts[0]).wait()]

    def gather(self, payload: Tensor) -> list[Tensor] | None:
        """Bring payloads whose sizes differ to rank 0, in host memory; None on the others."""
        padded, sizes = self._padded(payload)
        arrived = [torch.empty_like(padded) for _ in sizes] if self.rank == 0 else None
        dist.gather(padded, arrived, group=self.group, group_dst=0)
        return arrived and [whole[:size].cpu() for whole, size in zip(arrived, sizes, strict=True)]

    def _padded(self, payload: Tensor) -> tuple[Tensor, list[int]]:
        """Return the payload at the size of the longest, where it travels, and the sizes of all ranks'."""
        word = torch.tensor([payload.numel()]).view(torch.uint8)
        sizes = [int(message.cpu().view(torch.int64)) for message in self.start(word).wait()]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: payload.numel()] = payload.to(self.device)
        return padded, sizes


def carrier(backends: str, device: torch.device) -> torch.device:
    """Return the device on which a group with these backends carries the payloads of a device.

    >>> carrier("cpu:gloo,cuda:nccl", torch.device("cuda", 1)), carrier("cpu:gloo,cuda:gloo", torch.device("cuda"))
    (device(type='cuda', index=1), device(type='cpu'))
    """
    by_device = dict(pair.split(":") for pair in backends.split(","))
    backend = by_device.get(device.type)
    if backend in ("gloo", "mpi") or (backend is None and "cpu" in by_device):
        return torch.device("cpu")
    if backend is None:
        raise ValueError(
            f"the process group has no backend for {device.type} (it has {backends}); "
            "pass the device of the parameters, or add a backend to init_process_group"
        )
    return device


class InFlight:
    """A collective in flight; keeps its buffers alive."""

    def __init__(self, work: dist.Work, payload: Tensor, arrived: Tensor) -> None:
        self.work = work
        self.size = payload.numel()  # bytes
        self.payload: Tensor | None = payload
        self.arrived = arrived  # (n, bytes)
        self.here: Tensor | None = None  # the same, once somebody has waited

    def wait(self) -> list[Tensor]:
        """Wait, then return the payloads of all ranks in rank order, in host memory."""
        if self.here is None:
            wait_for([self])
        assert self.here is not None
        return list(self.here.unbind())


def wait_for(flights: Sequence[InFlight]) -> None:
    """Wait for collectives on one device, in their order. On NCCL the host waits here, once for all of them."""
    if not flights:
        return
    with aside(flights[0].arrived.device):
        for flight in flights:
            flight.work.wait()
            flight.payload = None  # it is among those that have arrived
        for flight, here in zip(flights, fetch(*(flight.arrived for flight in flights)), strict=True):
            flight.here = here


class Swap:
    """Parts of any sizes on their way to their ranks. Sizes and a note to every rank go ahead of them.

    If `go` is false for the notes of all ranks, the parts are not sent. Every rank receives the same notes, so all
    ranks decide alike.
    """

    def __init__(
        self,
        transport: AllGather,
        parts: Sequence[Tensor],
        note: Tensor | None = None,
        go: Callable[[list[Tensor]], bool] = lambda notes: True,
    ) -> None:
        self._group, rank = transport.group, transport.rank
        sizes = torch.tensor([part.numel() for part in parts])  # (n,)
        words = sizes.view(torch.uint8).view(len(parts), -1)  # (n, 8)
        if note is not None:
            words = torch.cat([words, note.cpu().expand(len(parts), -1)], dim=1)
        with aside(transport.device):
            words = send(words.contiguous(), transport.device)
            arrived = torch.empty_like(words)
            dist.all_to_all_single(arrived, words, group=self._group)
            arrived = fetch(arrived)[0]
        self.notes = list(arrived[:, 8:].unbind())
        self.sent = self.received = (len(parts) - 1) * words.shape[1]  # bytes, to and from other ranks
        self._expected = arrived[:, :8].contiguous().view(torch.int64).flatten().tolist()
        self._work: dist.Work | None = None
        if go(self.notes):
            own = sizes.tolist()
            message = torch.cat([part.cpu() for part in parts])  # in the stream that made them
            with aside(transport.device):
                self._message = send(message, transport.device)
                self._arrived = self._message.new_empty(sum(self._expected))
                self._work = dist.all_to_all_single(
                    self._arrived, self._message, self._expected, own, group=self._group, async_op=True
                )
            self.sent += sum(own) - own[rank]
            self.received += sum(self._expected) - self._expected[rank]

    def wait(self) -> list[Tensor]:
        """Wait, then return this rank's parts in rank order."""
        if self._work is None:
            raise RuntimeError("the parts were not sent: the ranks' notes say so")
        with aside(self._arrived.device):
            self._work.wait()
            return list(torch.split(fetch(self._arrived)[0], self._expected))
