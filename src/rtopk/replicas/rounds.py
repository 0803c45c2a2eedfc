"""One round of exchange: from the gradients of a backward pass to messages, and back.

An engine puts gradients into a round as they become ready, and says when to send: one message at the end of
backward (scope "global") or one for each bucket during it (scope "bucket"). Messages are sent in the same order on
all ranks. When the round ends, all ranks know the same: either all take the step, all skip it, or all raise.

The size of a message follows from the density. While that may change, a header is exchanged when the round begins,
and messages follow once all ranks are known to have the same density.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rtopk.codec import PayloadError
from rtopk.exchange import Message, arrive, send
from rtopk.kernels.host import Streams, answer
from rtopk.replicas import control
from rtopk.replicas.control import Control, GradientNotFinite
from rtopk.replicas.group import Group, TensorNotFiniteError
from rtopk.transport import InFlight

if TYPE_CHECKING:
    from rtopk.replicas.state import State

log = logging.getLogger("rtopk")


@dataclass
class Sent:
    """A message in flight: the payloads of some groups."""

    groups: list[Group]
    names: list[str]  # tensors of which a flag says whether they took part
    message: Message


class Round:
    """What has been collected and sent so far."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.scale = state.scale
        self.clip_norm = state.options.clip_norm  # an engine for shards sets this shard's part of it
        self.opening: InFlight | None = None  # of the headers, before any message
        self.messages: list[Sent] = []
        self.held: dict[str, Tensor] = {}  # means of an earlier round, in these gradients too
        self.used: set[str] = set()  # tensors that took part on any rank, once it is over, if the engine asks
        self.failure: Exception | None = None  # of this rank, raised once the others know
        self.verdict: Exception | None = (
            None  # an error that all ranks know before the first message; none is sent
        )
        self.selection_seconds = self.exchange_seconds = 0.0
        self.device, self.streams = state.device, Streams()
        self.streams.join(self.device)
        plain = self.scale == 1.0 and state.options.clip_norm is None
        density, status = 0.0, control.FINE
        try:
            for group in state.groups:
                group.begin(plain)
            density = state.ask()
            for group in state.groups:
                group.expect(state.step)
        except Exception as error:
            self.failure, status = error, control.FAILED
        if not state.settled:
            self.opening = state.transport.start(Control(state.step, status, 0, density, self.scale).pack())

    def put(self, name: str, gradient: Tensor | None, held: Tensor | None = None) -> None:
        """Take the gradient of a tensor, None if it took no part; it must not change until it is sent.

        `held` is the mean of an earlier round that the gradient of the parameter still holds, besides this one.
        """
        if held is not None:
            self.held[name] = held
        self.streams.join(self.device)
        if gradient is not None:
            with self.telling():
                self.state.group_of[name].put(name, gradient)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks of an error within the block, out of memory for one: they wait for a message."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error

    def send(self, groups: list[Group], idle: set[str]) -> None:
        """Send the payloads of some groups in one message; `idle` tensors took no part in this backward."""
        self._open()
        if self.verdict is not None:
            return
        self.streams.join(self.device)
        started, state = time.perf_counter(), self.state
        holds = any(name in self.held for group in groups for name in group.bounds)
        status, culprit, weights = control.HOLDS if holds else control.FINE, 0, 0
        try:
            if self.failure is not None:
                raise self.failure
            if state.verifies and not self.messages:
                weights = control.hash_weights(state.tensors.values())
            clip_norm = self.clip_norm
            payloads = answer([group.stages(state.step, self.scale, idle, clip_norm) for group in groups])
        except Exception as error:
            # Whatever the error, the other ranks wait for a message of this size: report it there.
            payloads = [group.blank(state.step) for group in groups]
            if isinstance(error, TensorNotFiniteError):
                status, culprit = control.NOT_FINITE, state.layout.names.index(error.name)
            else:
                status, self.failure = control.FAILED, error
        header = Control(state.step, status, culprit, state.density(state.step), self.scale, weights).pack()
        tells = state.tells_use or state.may_be_idle
        names = [name for group in groups for name in group.layout.names] if tells else []
        used = torch.tensor([name not in idle for name in names], dtype=torch.uint8)
        made = time.perf_counter()
        self.selection_seconds += made - started
        message = send([group.exchange for group in groups], header, used, payloads, state.step)
        self.exchange_seconds += time.perf_counter() - made
        self.messages.append(Sent(groups, names, message))

    def _open(self) -> None:
        """Wait for the headers, if any, and find out whether messages can follow."""
        if self.opening is None or self.messages or self.verdict is not None:
            return
        waiting = time.perf_counter()
        headers = self.opening.wait()
        self.exchange_seconds += time.perf_counter() - waiting
        try:
            self._read_headers(headers)
            self.state.settled = self.state.step >= self.state.options.settled_from
        except Exception as error:
            self.verdict = error

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        """Wait for the messages and write the mean into the gradients; or make them NaN, and skip or raise."""
        started, state = time.perf_counter(), self.state
        self.streams.join(self.device)
        plain = self.failure is None and self.verdict is None and not self.held
        sparse = {group: plain and group.is_sparse(state.step) for group in state.groups}
        try:
            for group in state.groups:
                if sparse[group]:
                    group.clear(gradients)  # while messages are in flight
            waiting = time.perf_counter()
            arrive([sent.message for sent in self.messages])
            headers = [sent.message.headers() for sent in self.messages]  # [message][rank]
            waited = time.perf_counter() - waiting
        except Exception:
            for group in state.groups:
                group.rollback()
            raise
        refusal, error = "", None
        try:
            refusal = self._judge(headers)
        except Exception as found:
            error = found
        refusal, error = state.settle(refusal, error)
        try:
            if error is not None:
                raise error
            if refusal:
                self._skip(refusal, gradients)
            else:
                self._average(sparse, gradients)
        except Exception as found:
            self._give_up(gradients)
            raise_after_backward(found)
        else:
            waited += sum(sent.message.waited for sent in self.messages)
            self._measure(waited, time.perf_counter() - started - waited)

    def _read_headers(self, messages: list[Tensor]) -> list[Control]:
        """Return the ranks' headers; raise if one has failed or they are not at the same point."""
        if self.failure is not None:
            raise self.failure
        controls = [Control.unpack(message) for message in messages]
        for rank, said in enumerate(controls):
            if said.status == control.FAILED:
                raise RuntimeError(f"rank {rank} failed to compress in step {self.state.step}; see its error")
        control.agree(controls)
        return controls

    def _judge(self, headers: list[list[Tensor]]) -> str:
        """Return why this round must be skipped, or an empty string; raise if the ranks cannot continue."""
        if self.verdict is not None:
            raise self.verdict
        return "; ".join(
            f"the gradient of {self.state.layout.names[said.tensor]} is not finite on rank {rank}"
            for messages in headers
            for rank, said in enumerate(self._read_headers(messages))
            if said.status == control.NOT_FINITE
        )

    def _average(self, sparse: Mapping[Group, bool], gradients: Mapping[str, Tensor]) -> None:
        state = self.state
        for sent in self.messages:
            took_part = torch.stack(sent.message.flags()).any(0).tolist()
            used = {name for name, here in zip(sent.names, took_part, strict=True) if here}
            idle = set(sent.names) - used
            self.used |= used
            for group in sent.groups:
                group.keep_idle(idle)
            sent.message.reduce(
                [[group.bounds[n] for n in group.bounds if n in idle] for group in sent.groups]
            )
        for sent in self.messages:
            try:
                means = sent.message.means([sparse[group] for group in sent.groups])
            except PayloadError as error:
                raise PayloadError(f"step {state.step}, on rank {state.rank}: {error}") from error
            for group, mean in zip(sent.groups, means, strict=True):
                group.write(mean, self.scale, gradients, self.held)
        for group in state.groups:
            group.commit()
        state.written.note(state.parameters.values(), skipped=False)
        state.step += 1
        state.skipping, state.skips_in_a_row = False, 0

    def _skip(self, refusal: str, gradients: Mapping[str, Tensor]) -> None:
        """Undo the round on this rank, as all others do; raise if the options say so."""
        state, most = self.state, self.state.options.max_skips
        state.refusal = f"step {state.step}: {refusal}"
        if state.options.on_nonfinite == "raise":
            raise GradientNotFinite(f"{state.refusal}; nothing was changed on any rank")
        state.skips_in_a_row += 1
        if state.skips_in_a_row >= most:
            raise GradientNotFinite(
                f"{state.refusal}; {state.skips_in_a_row} rounds in a row could not be used, and max_skips is "
                f"{most}; nothing was changed on any rank"
            )
        self._give_up(gradients)
        state.skipped += 1
        log.log(state.level, "all ranks skip this step. %s", state.refusal)

    def _give_up(self, gradients: Mapping[str, Tensor]) -> None:
        """Restore this rank to before the round; its gradients become NaN, as in plain DDP."""
        for group in self.state.groups:
            group.rollback()
            group.put_back(self.held, self.scale)
        for gradient in gradients.values():
            gradient.fill_(float("nan"))  # GradScaler expects it
        self.state.written.note(self.state.parameters.values(), skipped=True)
        self.state.skipping = True

    def _measure(self, waited: float, averaging: float) -> None:
        opening = 0 if self.opening is None else self.opening.size
        others = self.state.world_size - 1
        self.state.measure(
            bytes_sent=sum(sent.message.sent for sent in self.messages) + opening,
            bytes_received=sum(sent.message.received for sent in self.messages) + others * opening,
            selection_seconds=self.selection_seconds,
            exchange_seconds=self.exchange_seconds + waited,
            averaging_seconds=averaging,
        )


def raise_after_backward(error: Exception) -> None:
    """Raise an error after this backward is over: raised in a hook, it would leave DDP broken."""
    engine = torch.autograd.Variable._execution_engine

    def fail() -> None:
        raise error

    # DDP queues the end of backward when the hook returns; what a callback queues runs after that.
    engine.queue_callback(lambda: engine.queue_callback(fail))
