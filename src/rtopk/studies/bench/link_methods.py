"""The methods that `rtopk bench link` compares, each as a DDP communication hook.

Ours is the hook that users register. Rivals are PyTorch's own hooks as they come, and a top-k all-gather as
in GRACE and DGC (`torch.topk`, fp32 values, int64 indices, with error feedback).
"""

import time
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import rtopk.ddp
import rtopk.replicas.state
from rtopk.codec import Codec
from rtopk.compat import all_gather_single
from rtopk.exchange import ExchangeName
from rtopk.layout import Layout
from rtopk.select import RTopK
from rtopk.sparsifier import Sparsifier, entries_sent

Future = torch.futures.Future[torch.Tensor]
Bucket = Any  # torch.distributed.GradBucket, which has no types


@dataclass
class Parts:
    """Where a step's time went, as far as the method can tell, and the bytes that this rank put in."""

    select: float = 0.0  # seconds
    encode: float = 0.0
    average: float = 0.0  # decoding and averaging
    exchange: float | None = None  # None: what is left of the step
    payload: int = 0


class Measured(Protocol):
    """Something that can say what a step cost."""

    def finish(self) -> Parts:
        """Say what the step cost; not part of its time."""


class Method(Measured, Protocol):
    """One way to average gradients under DDP."""

    def hook(self, bucket: Bucket) -> Future:
        """Average a bucket over the ranks."""


class Off:
    """Communication switched off: every rank keeps its own gradients."""

    def hook(self, bucket: Bucket) -> Future:
        """Return the bucket as it is."""
        future: Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def finish(self) -> Parts:
        """Say that nothing was sent."""
        return Parts()


class AllReduce:
    """PyTorch's dense all-reduce, or its fp16 form."""

    def __init__(self, half: bool) -> None:
        self._half = half
        self._payload = 0

    def hook(self, bucket: Bucket) -> Future:
        """Start the all-reduce of a bucket."""
        self._payload += bucket.buffer().numel() * (2 if self._half else 4)
        if self._half:
            return default_hooks.fp16_compress_hook(None, bucket)  # type: ignore[arg-type]
        return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]

    def finish(self) -> Parts:
        """Say what was sent."""
        payload, self._payload = self._payload, 0
        return Parts(payload=payload)


class PowerSGD:
    """PyTorch's powerSGD_hook, past its dense first steps."""

    def __init__(self, rank: int) -> None:
        self._state: Any = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
        self._state.iter = 2

    def hook(self, bucket: Bucket) -> Future:
        """Run PyTorch's hook to its end.

        It issues collectives in callbacks, whose order differs between ranks once two buckets are under way;
        on Gloo that ends the job ("Received data size doesn't match expected size").
        """
        future = powerSGD_hook.powerSGD_hook(self._state, bucket)
        future.wait()
        return future

    def finish(self) -> Parts:
        """Say what was sent."""
        entries = self._state.total_numel_after_compression
        self._state.total_numel_after_compression = 0
        return Parts(payload=4 * entries)


class TopKAllGather:
    """`torch.topk` of each bucket with error feedback; fp32 values and int64 indices to everybody."""

    def __init__(self, density: float) -> None:
        self._density = density
        self._residuals: dict[int, Tensor] = {}
        self._select = 0.0
        self._payload = 0

    def hook(self, bucket: Bucket) -> Future:
        """Select, and start to send; the mean is put together when all has arrived."""
        started = time.perf_counter()
        buffer = bucket.buffer()
        total = self._residuals.get(bucket.index())
        total = buffer.clone() if total is None else total.add_(buffer)
        indices = torch.topk(total.abs(), entries_sent(total.numel(), self._density)).indices
        values = total[indices]
        total[indices] = 0.0
        self._residuals[bucket.index()] = total
        self._select += time.perf_counter() - started
        self._payload += values.numel() * values.element_size() + indices.numel() * indices.element_size()
        n = dist.get_world_size()
        all_values = values.new_empty(n * values.numel())
        all_indices = indices.new_empty(n * indices.numel())
        first = all_gather_single(all_values, values)
        second = all_gather_single(all_indices, indices)

        def mean(done: Any) -> Tensor:
            first.wait()
            average: Tensor = buffer.zero_().index_add_(0, all_indices, all_values).div_(n)
            return average

        future: Future = second.get_future().then(mean)
        return future

    def finish(self) -> Parts:
        """Say what was sent."""
        parts = Parts(select=self._select, payload=self._payload)
        self._select, self._payload = 0.0, 0
        return parts


class OurHook:
    """Ours, as `register` makes it. With an all-reduce, the payload is what a rank receives."""

    def __init__(self, state: rtopk.replicas.state.State) -> None:
        self._state = state
        self._reduces = state.options.exchange == "all-reduce"
        self._encode = 0.0
        for group in self._state.groups:
            self._time_encoding(group.sparsifier.codec)

    def _time_encoding(self, codec: Any) -> None:
        encode = codec.encode_with_decoded

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return encode(*args)
            finally:
                self._encode += time.perf_counter() - started

        codec.encode_with_decoded = timed

    def hook(self, bucket: Bucket) -> Future:
        """Run our hook."""
        return rtopk.ddp.hook(cast(rtopk.ddp.State, self._state), bucket)

    def finish(self) -> Parts:
        """Say what was sent, and when."""
        stats = self._state.stats
        encode, self._encode = self._encode, 0.0
        return Parts(
            select=stats.selection_seconds - encode,
            encode=encode,
            average=stats.averaging_seconds,
            exchange=stats.exchange_seconds,
            payload=stats.bytes_received if self._reduces else stats.bytes_sent,
        )


def compile_loops() -> None:
    """Let numba compile what our method needs, unless an earlier run has left it on disk."""
    for values in ("fp16", "4bit"):
        codec = Codec(values=values, fixed=True, dense_size=10)
        node = Sparsifier(RTopK(nodes=2), 0.01, codec=codec, layout=Layout(("w", "b"), ((9990,), (10,)), 10))
        for step in range(3):
            payload = node.compress(torch.linspace(-1, 1, 10_000), step)
            codec.decode(payload, size=10_000)


OURS: dict[str, ExchangeName] = {"rtopk": "all-gather", "rtopk-allreduce": "all-reduce"}


def make(name: str, model: DistributedDataParallel, density: float | None, values: str | None) -> Method:
    """Make a method by its name in the report."""
    if name == "off":
        return Off()
    if name in ("dense", "fp16"):
        return AllReduce(half=name == "fp16")
    if name in ("powersgd-1", "powersgd-2"):
        return PowerSGD(int(name[-1]))
    if density is None:
        raise ValueError(f"{name} needs a density")
    if name == "topk-allgather":
        return TopKAllGather(density)
    if name in OURS and values is not None:
        state = rtopk.ddp.register(model, density=density, values=values, exchange=OURS[name], attach=False)
        return OurHook(state)
    raise ValueError(f"unknown method {name!r}")
