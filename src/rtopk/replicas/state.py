"""What an engine keeps between steps on one rank: residuals, counters, statistics.

Everything is keyed by parameter, never by bucket: DDP rebuilds its buckets after the first step, and a new
process starts with the initial ones again.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from rtopk import defaults
from rtopk.layout import Layout
from rtopk.replicas import checkpoint, momentum
from rtopk.replicas.gradients import Written, refuse_momentum, watch
from rtopk.replicas.group import Group
from rtopk.replicas.options import Options, compare
from rtopk.replicas.rounds import Round
from rtopk.schedule import check_density
from rtopk.seed import derive
from rtopk.select import Selector
from rtopk.sparsifier import Sparsifier
from rtopk.transport import AllGather

S = TypeVar("S", bound="State")


@dataclass(frozen=True)
class Stats:
    """What one round cost, measured on the messages and clocks of this rank."""

    step: int
    bytes_sent: int  # this rank's messages: control header, payload and padding
    bytes_received: int  # those of the other ranks
    density: float  # of the entries that compete, as scheduled
    entries: int  # sent, including those that are always sent
    residual_norm: float
    selection_seconds: float  # memory, selection and encoding
    exchange_seconds: float  # waiting for the others' messages after backward was done
    averaging_seconds: float  # decoding and averaging
    skipped: int  # rounds so far that all ranks skipped


class Writer(Protocol):
    """The part of torch.utils.tensorboard.SummaryWriter that is needed."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record one number."""


class State:
    """The residuals of one rank, its counters, and the rounds; `register` makes it."""

    may_be_idle = False  # tensors may take no part in a backward pass
    tells_use = False  # ranks tell which did, so that all have gradients for the same ones
    shard = ""  # which part of the model this rank holds, if not all of it

    def __init__(self, parameters: Mapping[str, Tensor], options: Options, transport: AllGather) -> None:
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.transport = transport
        self.transports = [transport]  # together they connect all ranks of the job
        self.rank, self.world_size = transport.rank, transport.nodes
        self.options = options = self._with_momentum(options)
        self.step = 0  # rounds that were taken
        self.epoch = 0
        self.skipped = 0  # rounds that were skipped
        self.skipping = False  # the last round was skipped or raised: its gradients are NaN
        self.refusal = ""  # which rank and parameter, and why
        self._scale = 1.0
        self.parameters = dict(parameters)
        self.layout = Layout.of(self.tensors.items(), options.dense)
        self.device = next(iter(self.tensors.values())).device
        self.groups = self._make_groups()
        self.group_of = {name: group for group in self.groups for name in group.layout.names}
        self.corrects_momentum = any(
            getattr(group.sparsifier.memory, "carries_momentum", False) for group in self.groups
        )
        self.written = Written()
        weakref.finalize(self, self.written.stop)
        self.round: Round | None = None  # in progress
        self._asked: tuple[int, float] | None = None  # a step and its density, from the schedule
        self._flushed = -1  # the step that sends everything
        self.settled = options.settled_from == 0  # all ranks know that the density no longer changes
        self.skips_in_a_row = 0
        self.measured: dict[str, Any] = {}  # of the last round
        self._writer: tuple[Writer, int] | None = None

    def _with_momentum(self, options: Options) -> Options:
        """Return options with a memory; it has the momentum of the optimizer if it takes that over."""
        options = replace(options, optimizer=momentum.innermost(options.optimizer))
        memory, found = options.memory, None
        if options.optimizer is not None and memory in (None, "momentum-correction"):
            asked = memory is not None
            found = momentum.memory_for(options.optimizer, self.owns, asked, self.level)
        if memory is None:
            memory = defaults.memory(momentum_can_move=found is not None)
        self.takes_over = found is not None and memory == "momentum-correction"
        return replace(options, memory=found if self.takes_over else memory)

    def return_momentum(self) -> None:
        """Give the optimizer back the momentum that moved into the memory, to go on without rtopk."""
        if self.options.optimizer is not None:
            momentum.hand_back(self.options.optimizer, self.level)
        self.takes_over = False

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The parameters as they lie on this rank."""
        return self.parameters

    @property
    def seed(self) -> int:
        """The seed of the draws."""
        return self.options.seed

    def _make_groups(self) -> list[Group]:
        dtype = torch.float32  # of residuals: at least this
        for tensor in self.tensors.values():
            dtype = torch.promote_types(dtype, tensor.dtype)
        layouts = [(self.seed, self.layout)]
        if self.options.scope == "bucket":
            # One selection per tensor, however the engine groups them into buckets.
            layouts = [
                (derive(self.seed, name), Layout.of([(name, tensor)], self.options.dense))
                for name, tensor in self.tensors.items()
            ]
        return [self._make_group(seed, layout, dtype) for seed, layout in layouts]

    def _make_group(self, seed: int, layout: Layout, dtype: torch.dtype) -> Group:
        options, memory = self.options, self.options.make_memory()
        exchange = options.make_exchange(self.transport, layout, seed, memory, self.density)
        selector = cast(Selector, options.selector)
        sparsifier = Sparsifier(
            selector, self.density, memory, exchange.codec, seed, node=self.rank, layout=layout
        )
        return Group(layout, sparsifier, exchange, dtype, self.device)

    def density(self, step: int) -> float:
        """Return the density of a step: 1 in the dense phase and in a flush, else as scheduled."""
        if self._asked is not None and self._asked[0] == step:
            return self._asked[1]
        if step < self.options.dense_steps or step == self._flushed:
            return 1.0
        if self.options.counts == "epochs":
            return self.options.schedule(self.epoch)
        return self.options.schedule(step - self.options.dense_steps)

    def ask(self) -> float:
        """Return the density of the round that begins; a schedule is called once a round."""
        self._asked = None
        self._asked = self.step, check_density(self.density(self.step))
        return self._asked[1]

    def flush(self) -> None:
        """Let the next round send everything, residual included; call it on all ranks, before backward.

        Use it before the last step: what is in the residual then would never reach the model.
        """
        self._flushed, self._asked = self.step, None
        self.settled = False  # the ranks compare their densities before they send

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the schedule, on all ranks; needed only with counts='epochs'."""
        self.epoch, self._asked = epoch, None

    def set_scale(self, scale: float) -> None:
        """Set the loss scale from now on, if `register` was given no `scaler`."""
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"scale must be positive and finite, got {scale}")
        self._scale = scale

    @property
    def scale(self) -> float:
        """The current loss scale."""
        scaler = self.options.scaler
        return self._scale if scaler is None else float(scaler.get_scale())

    @property
    def level(self) -> int:
        """The level at which this rank logs what all ranks know: one of them tells."""
        return logging.WARNING if self.rank == 0 else logging.DEBUG

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this state handles a parameter."""
        return id(parameter) in self.names

    def __deepcopy__(self, memo: dict[int, Any]) -> "State":
        """Return itself: a copy of a model, as for weight averaging, exchanges nothing and needs no copy."""
        return self

    @property
    def verifies(self) -> bool:
        """Whether the ranks compare their weights in this step."""
        every = self.options.verify_every
        return every > 0 and self.step % every == 0

    def settle(self, refusal: str, error: Exception | None) -> tuple[str, Exception | None]:
        """Return what all ranks that hold this model do: skip the round for a reason, or raise an error."""
        return refusal, error

    def end_round(self) -> None:
        """Forget a round that is over or was interrupted."""
        self.round = None

    # -- what it cost

    def measure(self, **measured: float) -> None:
        """Record what a round cost, and pass it to the writer."""
        step = self.step if self.skipping else self.step - 1
        self.measured = {
            "step": step,
            "density": self.density(step),
            "entries": sum(group.sparsifier.entries(group.layout.size, step) for group in self.groups),
            "skipped": self.skipped,
            **measured,
        }
        if self._writer is not None and step % self._writer[1] == 0:
            stats = asdict(self.stats)
            for name in stats.keys() - {"step"}:
                self._writer[0].add_scalar(f"rtopk/{name}", float(stats[name]), step)

    @property
    def stats(self) -> Stats:
        """What the last round cost; reading it takes a pass over the residual."""
        if not self.measured:
            raise RuntimeError("there are no statistics before the first backward pass with exchange")
        return Stats(**self.measured, residual_norm=self.residual_norm())

    def residual_norm(self) -> float:
        """Return the norm of this rank's residual; 0 without a memory."""
        kept = [group.sparsifier.memory.state_dict().get("residual") for group in self.groups]
        norms = [torch.linalg.vector_norm(residual) for residual in kept if residual is not None]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def log_to(self, writer: Writer, every: int = 1) -> None:
        """Write the statistics of every `every`-th step to a TensorBoard writer."""
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._writer = (writer, every)

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: tensors by parameter name, and numbers.

        After an interrupted round (an error or Ctrl-C in backward) it is the state before that round.
        """
        memory: dict[str, dict[str, Tensor]] = {}
        for group in self.groups:
            for kind, tensors in group.state().items():
                memory.setdefault(kind, {}).update(tensors)
        return {
            "format": checkpoint.FORMAT,
            "rank": self.rank,
            "world_size": self.world_size,
            "fingerprint": f"{self.layout.fingerprint:016x}",
            "seed": self.options.seed,
            "step": self.step,
            "epoch": self.epoch,
            "memory": memory,
            **({"shard": self.shard} if self.shard else {}),
        }

    def fit(self, state: Mapping[str, Any]) -> list[dict[str, Tensor]]:
        """Return the groups' memories from a state, fully checked; changes nothing."""
        checkpoint.fits(state, self)
        memory = state["memory"]
        return [
            group.fit(
                {kind: {n: by[n] for n in group.layout.names if n in by} for kind, by in memory.items()}
            )
            for group in self.groups
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this rank's state; one that does not fit is refused and changes nothing."""
        flat = self.fit(state)
        for group, memory in zip(self.groups, flat, strict=True):
            group.load(memory)
        self.step, self.epoch = int(state["step"]), int(state["epoch"])
        self.skipping, self.skips_in_a_row, self._asked, self._flushed = False, 0, None, -1
        self.settled = self.options.settled_from == 0
        self.end_round()

    def save(self, directory: str | Path) -> Path:
        """Write this rank's file into a directory; call it on every rank."""
        return checkpoint.save(self.state_dict(), Path(directory))

    def load(self, directory: str | Path) -> None:
        """Continue from a directory, written by any number of ranks; call it on every rank."""
        checkpoint.load(self, Path(directory))

    def sharded(self) -> "checkpoint.Sharded":
        """Return this state for torch.distributed.checkpoint, with keys of its own for every rank."""
        return checkpoint.Sharded(self)


def make_alike(everyone: AllGather, make: Callable[[], S]) -> S:
    """Make a state on all ranks of the job, or raise on all: options are checked and compared.

    `make` gets everything that may be wrong on one rank only. The parameters must be alike among the ranks that
    exchange gradients.
    """
    refusal: Exception | None = None
    description: dict[str, str] = {}
    try:
        state = make()
        if state.options.optimizer is not None and state.corrects_momentum and not state.takes_over:
            refuse_momentum(state.options.optimizer, state)
        description = state.options.describe()
        own = {"parameters": f"layout {state.layout.fingerprint:016x} {state.shard}"}
        if state.transport is everyone:
            description |= own
    except Exception as error:
        refusal = error
    compare(everyone, description, refusal)
    for transport in state.transports:
        if transport is not everyone:
            try:
                compare(transport, own if transport is state.transport else {}, refusal)
            except Exception as error:
                refusal = error
    if refusal is not None:
        raise refusal
    if state.takes_over and state.options.optimizer is not None:
        momentum.take_over(state.options.optimizer, state.owns, state.level)
    watch(state)
    return state
