"""The books of one fragment: what this replica sent, what it keeps, and which rounds count.

torchft may take a round back (`should_commit()` is False), and replicas may disagree: the others committed a round
that failed here. So a round that was sent stays in doubt until it is known whether it was applied. Every message
carries a random token. A replica keeps the tokens of the rounds that it applied, and gives them to a replica that
heals from it: a round in doubt whose token is among them counts as sent, any other is taken back. So nothing is
applied twice, and nothing is lost but what a killed replica had not sent yet.
"""

import logging
import secrets
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.futures import Future
from torchft.manager import Manager

from rtopk import defaults
from rtopk.aggregate import Mean, RunningMean
from rtopk.codec import Codec
from rtopk.kernels.host import fetch, send
from rtopk.layout import DenseRule, Layout, one_dimensional
from rtopk.memory import ErrorFeedback, Memory, restore, snapshot_of
from rtopk.schedule import Schedule, as_schedule
from rtopk.select import Selector, as_rule
from rtopk.sparsifier import Sparsifier
from rtopk.state_file import byte_tensor

log = logging.getLogger("rtopk")
# token, or 0 if this replica sends nothing; step; hash of the weights that the round starts from
HEADER = struct.Struct("<QQQ")
KEPT = 64  # rounds whose tokens are kept


@dataclass(frozen=True)
class Compression:
    """How the pseudo-gradient of a fragment is sent; the options of `DiLoCo`."""

    density: float | Schedule = 0.01
    selector: Selector | str | None = None
    memory: Callable[[], Memory] = ErrorFeedback
    values: str = "fp32"
    mean: Mean | None = None
    dense: DenseRule = one_dimensional
    seed: int = 0

    def __post_init__(self) -> None:
        as_schedule(self.density)
        Codec(self.values)
        if not callable(self.memory):
            raise ValueError(
                f"memory must be a class or a function that makes one, such as ErrorFeedback, got {self.memory!r}"
            )
        RunningMean(0, self.mean or "nodes")  # refuses an unknown mean
        rule = as_rule(self.rule())
        if rule.needs_all_nodes or rule.keeps_state or not rule.sends_k:
            raise ValueError(
                f"{rule.label} needs the same nodes in every round, a state, or messages of other sizes; replicas "
                "come and go, so use TopK or RTopK(r_over_k=...)"
            )

    def rule(self) -> Selector:
        """Return which entries to send; for any number of replicas."""
        return defaults.selector(2, self.memory(), self.selector)


@dataclass(frozen=True)
class Doubt:
    """A round that was sent, and is not known to be applied."""

    token: int
    step: int
    before: Mapping[str, Tensor]  # what the memory held


class Books:
    """The memory of one fragment, and the rounds that it took part in."""

    def __init__(self, manager: Manager, how: Compression, number: int) -> None:
        self.manager, self.how, self.number = manager, how, number
        self.layout: Layout | None = None
        self.receipts: deque[list[int]] = deque(maxlen=KEPT)  # [step, token, ...] of rounds that were applied
        self.healed = False  # since the last round: the weights are a copy of another replica's
        self.loaded = False  # from a checkpoint, and no round has been applied since
        self.finite = True  # the last update
        self.weights = 0  # a hash of those that the round starts from
        self.bytes_sent = 0
        self._doubt: Doubt | None = None
        self._arrived: list[int] = []
        self._sparsifier: Sparsifier | None = None
        self._state: Mapping[str, Tensor] | None = None  # of the memory, until the layout is known

    def lay_out(self, tensors: Mapping[str, Tensor]) -> Layout:
        """Return the layout of the fragment; made from its first pseudo-gradients, which are shards on FSDP."""
        if self.layout is None:
            self.layout = Layout.of(tensors.items(), self.how.dense)
        return self.layout

    @property
    def sparsifier(self) -> Sparsifier:
        """From pseudo-gradient to payload."""
        if self._sparsifier is None:
            self._sparsifier = self.made(self._state)
        assert self._sparsifier is not None  # the layout is known where it is used
        return self._sparsifier

    def made(self, state: Mapping[str, Tensor] | None) -> Sparsifier | None:
        """Make a sparsifier that continues with a memory's state; None while the layout is unknown."""
        layout, how = self.layout, self.how
        if layout is None:
            return None
        codec = Codec(how.values, fingerprint=layout.fingerprint, fixed=True, dense_size=layout.dense_size)
        made = Sparsifier(how.rule(), how.density, how.memory(), codec, how.seed + self.number, layout=layout)
        for name, tensor in (state or {}).items():
            if tensor.numel() != layout.size:
                raise ValueError(
                    f"{name} of fragment {self.number} must have {layout.size} entries, got {tensor.numel()}: the "
                    "state is of another model, or of another number of fragments"
                )
        if state is not None:
            made.memory.load_state_dict(state)
        return made

    def allreduce(self, update: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Replace the update by the replicas' mean, times what the manager divides by. Called by `ProcessGroup`."""
        message = send(self._message(update), update.device)
        arrived = [torch.empty_like(message) for _ in range(group.size())]
        participants = self.manager.num_participants()
        work = group.allgather([arrived], [message], AllgatherOptions())
        self.bytes_sent += message.numel()

        def add_up(done: "Future[Any]") -> list[Tensor]:
            done.value()  # raises what went wrong
            update.copy_(self._mean(list(fetch(torch.stack(arrived))[0].unbind())).mul_(participants))
            return [update]

        return After(work, add_up)

    def _message(self, update: Tensor) -> Tensor:
        """Return token, step and payload of this replica; add the update to its memory."""
        self.settle(applied=False)  # had it been applied elsewhere, this replica would have healed
        node, step, token = self.sparsifier, self.manager.current_step(), 0
        rank = self.manager.participating_rank()
        payload = node.codec.blank(update.numel(), node.entries(update.numel(), step))
        if self.manager.is_participating() and not self.healed:
            node.node, self.finite = rank or 0, True
            before = snapshot_of(node.memory)
            try:
                payload = node.compress(update, step)
            except ValueError as error:  # not finite; the others go on without it
                restore(node.memory, before)  # on a device selection is what finds it
                self.finite = False
                log.warning("step %d, fragment %d: this replica sends nothing: %s", step, self.number, error)
            else:
                token = secrets.randbits(63) + 1
                self._doubt = Doubt(token, step, before)
        self.healed = False
        head = byte_tensor(HEADER.pack(token, step, self.weights))
        return torch.cat([head, payload])

    def _mean(self, messages: Sequence[Tensor]) -> Tensor:
        heads = [HEADER.unpack(bytes(message[: HEADER.size].tolist())) for message in messages]
        if len({head[1:] for head in heads}) > 1:
            error = RuntimeError(
                f"replicas do not start from the same point; their steps are {[step for _, step, _ in heads]}. If "
                "these are equal, their weights are not: two quorums have trained apart. Let min_replicas of the "
                "lighthouse be more than half of the replicas, and restart the smaller part"
            )
            log.error("%s", error)
            raise error
        node = self.sparsifier
        size = cast(Layout, self.layout).size
        running = RunningMean(size, self.how.mean or defaults.mean(node.memory))
        for (token, *_), message in zip(heads, messages, strict=True):
            if token:
                running.add(node.codec.decode(message[HEADER.size :], size=size))
        if not running.nodes:
            raise RuntimeError(f"step {heads[0][1]}: no replica has an update to send")
        self._arrived = [token for token, *_ in heads if token]
        return running.result()

    def end(self, committed: bool) -> None:
        """Note whether this replica applied the round; if not, it stays in doubt."""
        if committed:
            self.receipts.append([self.manager.current_step() - 1, *self._arrived])
            self._doubt, self.loaded = None, False
        self._arrived = []

    def heal(self, receipts: Sequence[Sequence[int]]) -> None:
        """Take over another replica's receipts together with its weights, and settle what is in doubt here."""
        if self._doubt is not None:
            tokens = {token for _, *tokens in receipts for token in tokens}
            forgotten = bool(receipts) and self._doubt.step < min(step for step, *_ in receipts)
            self.settle(applied=forgotten or self._doubt.token in tokens)
        if self.loaded:  # later rounds of this replica may have been applied, from this very residual
            log.warning(
                "fragment %d: the others are ahead of this checkpoint, so its residual is dropped",
                self.number,
            )
            self._sparsifier = self._state = None
        self.receipts = deque(map(list, receipts), maxlen=KEPT)
        self.healed, self.loaded = True, False

    def settle(self, applied: bool) -> None:
        """End the doubt: the round counts as sent, or is taken back."""
        if self._doubt is not None and not applied:
            restore(self.sparsifier.memory, self._doubt.before)
        self._doubt = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory, without the round in doubt."""
        if self._doubt is not None:
            return {name: tensor.clone() for name, tensor in self._doubt.before.items()}
        if self._sparsifier is None:
            return dict(self._state or {})
        return self._sparsifier.memory.state_dict()

    def load(self, state: Mapping[str, Tensor], made: Sparsifier | None) -> None:
        """Continue with a memory of this replica, and the sparsifier that was made of it."""
        self._state, self._sparsifier, self._doubt, self.loaded = dict(state), made, None, True


class After(dist._Work):  # type: ignore[name-defined,misc]
    """Work that is done when something has been done with its result."""

    def __init__(self, work: dist.Work, then: "Callable[[Future[Any]], Any]") -> None:
        super().__init__()
        self._work, self._future = work, work.get_future().then(then)

    def wait(self, timeout: Any = None) -> bool:
        """Wait for both."""
        self._work.wait(*([] if timeout is None else [timeout]))
        self._future.wait()
        return True

    def get_future(self) -> "Future[Any]":
        """Return the future of what was done."""
        return self._future
