"""Local SGD on torch.distributed: every rank trains on its own for H steps, then the ranks synchronise.

Each rank sends a payload of common - own weights, all average what they decoded in rank order, and the outer
optimizer steps from the common weights (see `outer`). A model may be cut into fragments that synchronise in turn,
and a payload may travel while training goes on. `PRESETS` has the published algorithms by name, and one of
ours. The federated experiments run on `CommonWeights` too, with all nodes in one process.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rtopk import defaults
from rtopk.aggregate import Mean, RunningMean
from rtopk.exchange import ExchangeName, OwnerDensity, Vector, make_exchange
from rtopk.layout import DenseRule, nothing, one_dimensional
from rtopk.local.fragments import CommonWeights, Fragment, codec_of, cut
from rtopk.local.outer import Outer, by_name
from rtopk.memory import ErrorFeedback, Memory
from rtopk.schedule import Schedule, as_schedule
from rtopk.select import Chunked, Selector, as_rule
from rtopk.sparsifier import Sparsifier
from rtopk.state_file import byte_tensor, digest_bits
from rtopk.transport import AllGather, InProcess, Transport

__all__ = ["PRESETS", "CommonWeights", "LocalSGD"]

PRESETS: dict[str, dict[str, Any]] = {
    # Douillard et al., 2023: everything is sent, Nesterov at the centre.
    "diloco": {"density": 1.0, "outer": "nesterov"},
    # Douillard et al., 2025: fragments in turn, 4 bits a value, applied later and mixed with what was learnt since.
    "streaming": {
        "density": 1.0, "outer": "nesterov", "values": "4bit", "fragments": 4, "delay": 1, "mix": 0.5,
    },
    # Sarfi et al., 2025: 64 of every 4,096 entries, 2 bits a value, a decayed residual instead of outer momentum.
    "sparseloco": {
        "density": 64 / 4096, "outer": "sparseloco", "values": "2bit", "selector": Chunked(4096), "dense": nothing,
    },
    # Ours (docs/gpt.md): half as many, the largest of all, 4 bits a value: 46 % of SparseLoCo's bytes.
    "compact": {"density": 1 / 128, "outer": "sparseloco", "values": "4bit", "dense": nothing},
}  # fmt: skip


class UnevenGather(AllGather):
    """One node per process; payloads differ in size, so sizes go first. They are decoded in host memory."""

    def exchange(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Send the payload of this process, return those of all ranks in rank order."""
        (payload,) = payloads
        return [whole.cpu() for whole in self.exchange_uneven(payload)]

    def swap(self, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Send part j to rank j; return what this rank got, in rank order."""
        return [[part.cpu() for part in got] for got in super().swap(parts)]


class LocalSGD:
    """Count local steps and synchronise the ranks every `local_steps`; call `step()` after the optimizer's.

    All ranks must start from the same weights; that is checked. Without an initialised process group the
    world is one rank. The mean is over all ranks, and without a memory over those that sent an entry.

    fragments: cut the model into so many parts, each synchronised every `local_steps`, one after the other.
    delay: apply a mean so many local steps after its payload was sent; it travels while training goes on. What a
        rank learns meanwhile is dropped then, but for `mix`, as in Streaming DiLoCo.
    mix: how much of its own weights a rank keeps when a mean is applied, in [0, 1).
    """

    def __init__(
        self,
        model: nn.Module,
        local_steps: int,
        density: float | Schedule = 0.01,
        *,
        selector: Selector | str | None = None,
        outer: str | Outer = "sgd",
        memory: Memory | Callable[[], Memory] | None = None,
        values: str = "fp32",
        mean: Mean | None = None,
        exchange: ExchangeName = "all-gather",
        owner_density: OwnerDensity | None = None,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        dense: DenseRule = one_dimensional,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        several = distributed and dist.get_world_size(group) > 1
        gather = UnevenGather(group, next(model.parameters()).device) if several else None
        self.transport: Transport = gather or InProcess(1)
        self.world, self.rank = self.transport.nodes, self.transport.local[0]
        kind = defaults.exchange(self.world, exchange)
        owner_density = defaults.owner_density(self.world, exchange, owner_density)
        _check(local_steps, fragments, delay, mix, kind, memory)
        self.model, self.local_steps, self.delay, self.mix = model, local_steps, delay, mix
        pair = by_name(outer)
        schedule = as_schedule(density)
        self.fragments: list[Fragment] = []
        for number, layout in enumerate(cut(model, fragments, dense)):
            own = memory() if callable(memory) else memory or (pair.memory or ErrorFeedback)()
            self.mean: Mean = mean or defaults.mean(own)
            chosen = defaults.selector(self.world, own, selector)
            _check_parts(chosen, self.world, delay, self.mean)
            part = make_exchange(
                kind,
                self.transport,
                Vector(
                    layout.size,
                    layout.dense_size,
                    self.mean,
                    None,
                    getattr(own, "keeps", True),
                    seed + number,
                ),
                codec_of(layout, values, fixed=delay > 0),
                schedule,
                owner_density,
            )
            sparsifier = Sparsifier(
                chosen,
                schedule,
                own,
                part.codec,
                seed + number,
                node=self.rank,
                layout=layout,
            )
            self.fragments.append(Fragment(model, layout, pair.outer, sparsifier, part))
        self.steps = 0
        if gather is not None:
            self._check_common(gather)

    @classmethod
    def preset(cls, name: str, model: nn.Module, local_steps: int, **changes: Any) -> "LocalSGD":
        """Make an algorithm by its name in `PRESETS`; options that are given replace its own."""
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        return cls(model, local_steps, **{**PRESETS[name], **changes})

    @property
    def round(self) -> int:
        """Return how often the whole model has been synchronised."""
        return self.fragments[-1].round

    @property
    def common(self) -> Tensor:
        """Return the weights that all ranks share, as one vector, one fragment after the other."""
        return torch.cat([fragment.common for fragment in self.fragments])

    @property
    def sent(self) -> int:
        """Return the bytes of payload that this rank has sent."""
        return sum(fragment.sent for fragment in self.fragments)

    def step(self) -> bool:
        """Count a local step; send and apply what is due, and say whether anything was applied."""
        self.steps += 1
        applied = False
        for number, fragment in enumerate(self.fragments):
            after = self.steps - (number + 1) * self.local_steps // len(self.fragments)
            if (after + self.delay) % self.local_steps == 0 and not fragment.in_flight:
                fragment.send(overlap=self.delay > 0)
            if after % self.local_steps == 0 and fragment.in_flight:
                fragment.apply(self.mix)
                applied = True
        return applied

    def synchronise(self) -> None:
        """Apply what is on its way, or else send and apply, now; all ranks must do so at the same step."""
        for fragment in self.fragments:
            if not fragment.in_flight:
                fragment.send(overlap=False)
            fragment.apply(0.0)

    def _check_common(self, gather: AllGather) -> None:
        own = digest_bits(*(fragment.common for fragment in self.fragments))
        names = gather.start(byte_tensor(own)).wait()
        different = sum(not torch.equal(other, names[0]) for other in names)
        if different:
            raise ValueError(
                f"{different} of {self.world} ranks start from other weights than rank 0: "
                "broadcast the model first"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state between two steps: tensors and plain values only."""
        parts = [fragment.state_dict() for fragment in self.fragments]
        return {"steps": self.steps, "world": self.world, "fragments": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this rank."""
        parts = state.get("fragments", [state])  # versions before 0.2 had one, not in a list
        if len(parts) != len(self.fragments):
            raise ValueError(f"state is of {len(parts)} fragments, this has {len(self.fragments)}")
        if "steps" not in state:
            raise ValueError("state lacks 'steps': it is not one of LocalSGD, or is incomplete")
        if state.get("world", self.world) != self.world:
            raise ValueError(
                f"state is of {state['world']} ranks, this job has {self.world}, and every rank keeps its own "
                "residual; resume with as many ranks"
            )
        for fragment, part in zip(self.fragments, parts, strict=True):
            fragment.check(part)
        before = self.state_dict()["fragments"]
        try:
            for fragment, part in zip(self.fragments, parts, strict=True):
                fragment.load_state_dict(part)
        except Exception:
            for fragment, part in zip(self.fragments, before, strict=True):
                fragment.load_state_dict(part)
            raise
        self.steps = state["steps"]


def _check(local_steps: int, fragments: int, delay: int, mix: float, exchange: str, memory: object) -> None:
    for name, value in (("local_steps", local_steps), ("fragments", fragments), ("delay", delay)):
        if not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
    if local_steps < 1:
        raise ValueError(f"local_steps must be at least 1, got {local_steps}")
    if fragments > local_steps:
        raise ValueError(f"fragments must be at most local_steps, {local_steps}, got {fragments}")
    if not 0 <= delay < local_steps:
        raise ValueError(f"delay must be in [0, local_steps), got {delay} with local_steps {local_steps}")
    if not 0.0 <= mix < 1.0:
        raise ValueError(f"mix must be in [0, 1), got {mix}")
    if delay and exchange != "all-gather":
        raise ValueError(
            f"delay must be 0 with exchange='all-reduce', whose owners answer in the round, got {delay}"
        )
    if isinstance(memory, str):
        raise ValueError(f"memory must be a memory, or a class or function that makes one, got {memory!r}")
    if fragments > 1 and memory is not None and not callable(memory):
        raise ValueError(
            "every fragment needs a memory of its own: give a class or a function that makes one"
        )


def _check_parts(selector: Selector, nodes: int, delay: int, mean: Mean) -> None:
    rule = as_rule(selector)
    rule.require(nodes)
    if delay and not rule.sends_k:
        raise ValueError(
            f"delay must be 0 with {rule.label}, whose payloads differ in size between ranks, got {delay}"
        )
    RunningMean(0, mean)  # refuses an unknown mean
