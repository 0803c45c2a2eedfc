"""One round of exchange: from DDP's buckets to messages, and back.

A round collects the gradients of all buckets and sends one message (scope "global", at the last bucket) or one
per bucket (scope "bucket", during backward). It ends at the last bucket: all ranks then know the same, and either
all take the step or all skip it. Earlier buckets return a pending Future that is completed there. Every collective
is issued in the hook's body, in the order of the buckets, which is the same on all ranks.

The size of a message follows from the density. While that may change, a header is exchanged at the first bucket,
and messages follow once all ranks are known to have the same density.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rtopk.codec import PayloadError
from rtopk.ddp import control
from rtopk.ddp.control import Control
from rtopk.ddp.group import Group, TensorNotFiniteError
from rtopk.ddp.outcome import give_up, hear, judge, raise_after_backward, skip
from rtopk.ddp.refusals import refuse_join
from rtopk.ddp.written import mean_in
from rtopk.transport import Exchange

if TYPE_CHECKING:
    from rtopk.ddp.state import State


@dataclass
class Message:
    """A message in flight: the payloads of some groups, one after the other."""

    groups: list[Group]
    sizes: list[int]  # bytes of each group's payload
    exchange: Exchange


@dataclass
class Round:
    """What has been collected and sent so far."""

    scale: float
    buckets: list[tuple["torch.futures.Future[Tensor]", Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # views of the buckets, by parameter
    opening: Exchange | None = None  # of the headers, before any message
    opened: bool = False
    messages: list[Message] = field(default_factory=list)
    selection_seconds: float = 0.0
    exchange_seconds: float = 0.0
    held: dict[str, Tensor] = field(default_factory=dict)  # means of an earlier round, in these gradients too
    failure: Exception | None = None  # of this rank, raised once the others know
    verdict: Exception | None = None  # an error that all ranks know before the first message; none is sent


def take(state: "State", bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":  # type: ignore[name-defined]
    """Collect a bucket's gradients, send what is ready, and end the round at the last bucket."""
    if bucket.index() == 0 or state.round is None:
        refuse_join(state.model)
        state.round = _begin(state)
    this = state.round
    buffer: Tensor = bucket.buffer()
    devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    this.buckets.append((future, buffer))
    views = _views(state, bucket.parameters(), buffer)
    this.gradients.update(views)
    for name, gradient in views.items():
        idle = state.used is not None and name not in state.used
        mean = mean_in(state.parameters[name], idle)
        if mean is not None:
            this.held[name] = mean
            gradient.sub_(mean)
        state.group_of[name].put(name, gradient)
    if state.options.scope == "bucket":
        _send(state, this, [state.group_of[name] for name in views])
    if bucket.is_last():
        state.round = None
        if state.options.scope == "global":
            _send(state, this, state.groups)
        _finish(state, this)
    return future


def _begin(state: "State") -> Round:
    this = Round(state.scale)
    plain = this.scale == 1.0 and state.used is None and state.options.clip_norm is None
    for group in state.groups:
        group.begin(plain)
    density, status = 0.0, control.FINE
    try:
        density = state.ask()
    except Exception as error:
        this.failure, status = error, control.FAILED
    if not state.settled:
        this.opening = state.transport.start(Control(state.step, status, 0, density, this.scale).pack())
    return this


def _open(state: "State", this: Round) -> None:
    """Wait for the headers, if any, and find out whether messages can follow."""
    if this.opened or this.opening is None:
        return
    this.opened = True
    waiting = time.perf_counter()
    headers = this.opening.wait()
    this.exchange_seconds += time.perf_counter() - waiting
    try:
        hear(state, this, headers)
        state.settled = state.step >= state.options.settled_from
    except Exception as error:
        this.verdict = error


def _views(state: "State", parameters: Iterable[Tensor], buffer: Tensor) -> dict[str, Tensor]:
    """Split a bucket by parameter; each lies in it in the memory order of the parameter, if that has no gaps."""
    views, offset = {}, buffer.storage_offset()
    for parameter in parameters:
        shape, stride = parameter.shape, parameter.stride()
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if extent != parameter.numel():  # a slice of something larger: DDP lays it out plainly
            stride = torch.empty(shape, device="meta").stride()
        views[state.names[id(parameter)]] = buffer.as_strided(shape, stride, offset)
        offset += parameter.numel()
    return views


def _send(state: "State", this: Round, groups: list[Group]) -> None:
    _open(state, this)
    if this.verdict is not None:
        return
    started = time.perf_counter()
    idle = set() if state.used is None else set(state.parameters) - state.used
    holds = any(name in this.held for group in groups for name in group.bounds)
    status, culprit = control.HOLDS if holds else control.FINE, 0
    try:
        payloads = [group.compress(state.step, this.scale, idle, state.options.clip_norm) for group in groups]
    except Exception as error:
        # Whatever the error, the other ranks wait for a message of this size: report it there.
        payloads = [group.blank(state.step) for group in groups]
        if isinstance(error, TensorNotFiniteError):
            status, culprit = control.NOT_FINITE, state.layout.names.index(error.name)
        else:
            status, this.failure = control.FAILED, error
    weights = 0
    every = state.options.verify_every
    if every and state.step % every == 0 and not this.messages:
        weights = control.hash_weights(state.parameters.values())
    header = Control(state.step, status, culprit, state.density(state.step), this.scale, weights).pack()
    message = torch.cat([header.to(payloads[0].device), *payloads])
    this.selection_seconds += time.perf_counter() - started
    sizes = [payload.numel() for payload in payloads]
    this.messages.append(Message(groups, sizes, state.transport.start(message)))


def _finish(state: "State", this: Round) -> None:
    started = time.perf_counter()
    plain = this.failure is None and this.verdict is None and not this.held
    sparse = {g: plain and g.is_sparse(state.step, state.world_size) for g in state.groups}
    try:
        for group in state.groups:
            if sparse[group]:
                group.clear(this.gradients)  # while messages are in flight
        waiting = time.perf_counter()
        arrived = [message.exchange.wait() for message in this.messages]  # [message][rank]
        waited = time.perf_counter() - waiting
    except Exception:
        for group in state.groups:
            group.rollback()
        raise
    try:
        refusal = judge(state, this, arrived)
        if refusal:
            skip(state, this, refusal)
        else:
            _average(state, this, arrived, sparse)
    except Exception as error:
        give_up(state, this)
        raise_after_backward(error)
    else:
        _measure(state, this, waited, time.perf_counter() - started - waited)
    if state.used is not None:
        state.used.clear()
    for future, buffer in this.buckets:
        future.set_result(buffer)


def _measure(state: "State", this: Round, waited: float, averaging: float) -> None:
    exchanges = [message.exchange for message in this.messages]
    exchanges += [this.opening] if this.opening is not None else []
    sent = sum(exchange.size for exchange in exchanges)
    state.measure(
        bytes_sent=sent,
        bytes_received=sum(exchange.arrived.numel() for exchange in exchanges) - sent,
        selection_seconds=this.selection_seconds,
        exchange_seconds=this.exchange_seconds + waited,
        averaging_seconds=averaging,
    )


def _average(state: "State", this: Round, arrived: list[list[Tensor]], sparse: Mapping[Group, bool]) -> None:
    for message, ranks in zip(this.messages, arrived, strict=True):
        begin = control.SIZE
        for group, size in zip(message.groups, message.sizes, strict=True):
            payloads = [payload[begin : begin + size] for payload in ranks]
            begin += size
            try:
                mean = group.mean(payloads, sparse[group], state.options.mean, state.options.weights)
            except PayloadError as error:
                raise PayloadError(f"step {state.step}, on rank {state.rank}: {error}") from error
            group.write(mean, this.scale, this.gradients, this.held)
    for group in state.groups:
        group.commit()
    state.written.note(state.parameters.values(), skipped=False)
    state.step += 1
    state.skipping = False
    state.skips_in_a_row = 0
