"""What the hook keeps between steps on one rank: residuals, counters, statistics.

Everything is keyed by parameter, never by bucket: DDP rebuilds its buckets after the first step, and a new
process starts with the initial ones again.
"""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rtopk.ddp import checkpoint
from rtopk.ddp.group import Group
from rtopk.ddp.options import Options
from rtopk.ddp.refusals import joint_dtype, trainable
from rtopk.ddp.rounds import Round
from rtopk.ddp.stats import Stats, Writer, write
from rtopk.ddp.written import Written
from rtopk.layout import Layout
from rtopk.schedule import check_density
from rtopk.seed import derive
from rtopk.sparsifier import Sparsifier
from rtopk.transport import AllGather


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that is needed."""

    def get_scale(self) -> float:
        """Return the current loss scale."""


class State:
    """The residuals of one rank, its counters, and the rounds; `register` makes it."""

    def __init__(
        self, model: DistributedDataParallel, options: Options, transport: AllGather, scaler: Scaler | None
    ) -> None:
        self.options = options
        self.transport = transport
        self.rank, self.world_size = transport.rank, transport.nodes
        self.step = 0  # rounds that were taken
        self.epoch = 0
        self.skipped = 0  # rounds that were skipped
        self.skipping = False  # the last round was skipped or raised: its gradients are NaN
        self.refusal = ""  # which rank and parameter, and why
        self.scaler = scaler
        self._scale = 1.0
        # Weak: DDP owns this state in C++, where the garbage collector cannot see a cycle.
        self._model = weakref.ref(model)
        self.parameters = trainable(model)
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.layout = Layout.of(self.parameters.items(), options.dense)
        self.groups = self._make_groups()
        self.group_of = {name: group for group in self.groups for name in group.layout.names}
        self.corrects_momentum = any(
            getattr(group.sparsifier.memory, "carries_momentum", False) for group in self.groups
        )
        self.used: set[str] | None = None  # parameters that took part, if DDP allows unused ones
        if model.find_unused_parameters or model.static_graph:
            self._watch_use()
        self.written = Written(self.parameters)
        weakref.finalize(self, self.written.stop)
        self.round: Round | None = None  # in progress
        self._asked: tuple[int, float] | None = None  # a step and its density, from the schedule
        self.settled = options.settled_from == 0  # all ranks know that the density no longer changes
        self.skips_in_a_row = 0
        self.measured: dict[str, Any] = {}  # of the last round
        self._writer: tuple[Writer, int] | None = None

    def _make_groups(self) -> list[Group]:
        dtype = joint_dtype(self.parameters)
        device = next(iter(self.parameters.values())).device
        layouts = [(self.options.seed, self.layout)]
        if self.options.scope == "bucket":
            # One selection per tensor, however DDP groups them into buckets.
            layouts = [
                (derive(self.options.seed, name), Layout.of([(name, tensor)], self.options.dense))
                for name, tensor in self.parameters.items()
            ]
        return [
            Group(
                layout,
                Sparsifier(
                    self.options.selector,
                    self.density,
                    self.options.make_memory(),
                    self.options.codec(layout.fingerprint, layout.dense_size),
                    seed,
                    node=self.rank,
                    layout=layout,
                ),
                dtype,
                device,
            )
            for seed, layout in layouts
        ]

    def _watch_use(self) -> None:
        used: set[str] = set()
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name: used.add(name)
            )
        self.used = used

    def density(self, step: int) -> float:
        """Return the density of a step: 1 in the dense phase, then as scheduled."""
        if self._asked is not None and self._asked[0] == step:
            return self._asked[1]
        if step < self.options.dense_steps:
            return 1.0
        if self.options.counts == "epochs":
            return self.options.density(self.epoch)
        return self.options.density(step - self.options.dense_steps)

    def ask(self) -> float:
        """Return the density of the round that begins; a schedule is called once a round."""
        self._asked = None
        self._asked = self.step, check_density(self.density(self.step))
        return self._asked[1]

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
        return self._scale if self.scaler is None else float(self.scaler.get_scale())

    @property
    def model(self) -> DistributedDataParallel:
        """The DDP model, as long as something else keeps it alive."""
        model = self._model()
        if model is None:
            raise RuntimeError(
                "the DDP model of this state is gone; keep it: model = DistributedDataParallel(...)"
            )
        return model

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this state handles a parameter."""
        return id(parameter) in self.names

    def __deepcopy__(self, memo: dict[int, Any]) -> "State":
        """Return itself: a copy of a DDP model, as for weight averaging, exchanges nothing and needs no copy."""
        return self

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
            write(self._writer[0], self.stats)

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
            group.commit()  # an interrupted round is over
            group.sparsifier.memory.load_state_dict(memory)
        self.step, self.epoch = int(state["step"]), int(state["epoch"])
        self.skipping, self.skips_in_a_row, self.round, self._asked = False, 0, None, None
        self.settled = self.options.settled_from == 0
        if self.used is not None:
            self.used.clear()

    def save(self, directory: str | Path) -> Path:
        """Write this rank's file into a directory; call it on every rank."""
        return checkpoint.save(self.state_dict(), Path(directory))

    def load(self, directory: str | Path) -> None:
        """Continue from a directory, written by any number of ranks; call it on every rank."""
        checkpoint.load(self, Path(directory))

    def sharded(self) -> "checkpoint.Sharded":
        """Return this state for torch.distributed.checkpoint, with keys of its own for every rank."""
        return checkpoint.Sharded(self)
