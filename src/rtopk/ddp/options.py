"""The options of `register`, checked, and the one exchange at registration that compares them between ranks.

Ranks that disagree about density, codec or seed would exchange messages of different sizes or meanings. Every
rank sends a description of its options, or the reason why it refuses them, in one message of fixed size. So all
ranks stop together, and all say what differs.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rtopk import defaults
from rtopk.aggregate import Mean, check_weights
from rtopk.codec import Codec
from rtopk.ddp.control import by_rank
from rtopk.layout import DenseRule
from rtopk.memory import ErrorFeedback, Memory, MomentumCorrection, NoMemory
from rtopk.schedule import Constant, Schedule, WarmUp, as_schedule, check_density
from rtopk.select import Selector, as_rule
from rtopk.transport import AllGather

Scope = Literal["global", "bucket"]
OnNonFinite = Literal["skip", "raise"]
Counts = Literal["steps", "epochs"]
MEMORIES: dict[str, Callable[[], Memory]] = {
    "error-feedback": ErrorFeedback,
    "momentum-correction": MomentumCorrection,
    "none": NoMemory,
}
BYTES = 8192  # of the description that is exchanged
SHOWN = 200  # characters of one value in it; longer ones are cut and carry a hash
# Where schedules are compared at registration. Other differences show in the step where they occur.
ASKED = (*range(10), 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


@dataclass(frozen=True)
class Options:
    """The options of one registration; `register` describes them."""

    density: Schedule
    selector: Selector
    make_memory: Callable[[], Memory]
    values: str
    rounding: Literal["nearest", "stochastic"]
    mean: Mean
    weights: tuple[float, ...] | None
    clip_norm: float | None
    scope: Scope
    dense: DenseRule
    dense_steps: int
    counts: Counts
    seed: int
    verify_every: int
    on_nonfinite: OnNonFinite
    max_skips: int

    @classmethod
    def check(
        cls,
        nodes: int,
        density: float | Schedule,
        selector: Selector | None,
        memory: str | Callable[[], Memory],
        **others: Any,
    ) -> "Options":
        """Fill in the defaults that depend on nodes and memory; raise ValueError for what makes no sense."""
        if isinstance(memory, str):
            if memory not in MEMORIES:
                raise ValueError(
                    f"memory must be one of {tuple(MEMORIES)} or a function that makes one, got {memory!r}"
                )
            make = MEMORIES[memory]
        else:
            make = memory
        made = make()
        others["mean"] = defaults.mean(made) if others["mean"] is None else others["mean"]
        for name, allowed in (
            ("mean", Mean),
            ("scope", Scope),
            ("on_nonfinite", OnNonFinite),
            ("counts", Counts),
        ):
            if others[name] not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, got {others[name]!r}")
        for name, least in (("dense_steps", 0), ("verify_every", 0), ("max_skips", 1)):
            if others[name] < least:
                raise ValueError(f"{name} must be at least {least}, got {others[name]}")
        refuse_selector(selector, nodes)
        clip_norm, weights = others["clip_norm"], others["weights"]
        if clip_norm is not None and not 0.0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm must be positive and finite, or None, got {clip_norm}")
        if weights is not None and len(weights) != nodes:
            raise ValueError(f"{nodes} ranks need as many weights, got {len(weights)}")
        if weights is not None:
            check_weights(weights)
        own_clip = getattr(made, "clip_norm", None)
        if others["scope"] == "bucket" and (clip_norm is not None or own_clip is not None):
            raise ValueError(
                "clip_norm bounds the norm of the whole gradient, which scope='bucket' never sees; "
                "use scope='global' or clip the averaged gradient yourself"
            )
        options = cls(
            as_schedule(density), defaults.selector(nodes) if selector is None else selector, make, **others
        )
        options.codec()  # refuses unknown values
        return options

    def codec(self, fingerprint: int = 0, dense_size: int = 0) -> Codec:
        """Make the codec; the size of its payloads follows from d and k alone."""
        return Codec(self.values, self.rounding, fingerprint, fixed=True, dense_size=dense_size)

    @property
    def settled_from(self) -> float:
        """The step from which the density is constant; infinite if only the schedule knows."""
        if isinstance(self.density, Constant):
            return self.dense_steps
        if isinstance(self.density, WarmUp) and self.counts == "steps":
            return self.dense_steps + self.density.steps
        return math.inf

    def describe(self) -> dict[str, str]:
        """Describe every option that the ranks must share, as text."""
        return {
            "density": _densities(self.density),
            "constant density": f"from step {self.settled_from}",
            "selector": _text(self.selector),
            "memory": _by_numbers(self.make_memory()),
            "values": f"{self.values}, {self.rounding}",
            "mean": self.mean,
            "weights": str(self.weights),
            "clip_norm": str(self.clip_norm),
            "scope": self.scope,
            "dense_steps": str(self.dense_steps),
            "counts": self.counts,
            "seed": str(self.seed),
            "verify_every": str(self.verify_every),
            "on_nonfinite": self.on_nonfinite,
            "max_skips": str(self.max_skips),
        }


def refuse_selector(selector: Selector | None, nodes: int) -> None:
    """Raise ValueError for a rule that the hook does not support."""
    if selector is None:
        return
    rule = as_rule(selector)
    rule.require(nodes)
    if not rule.sends_k:
        raise ValueError(f"{rule.label} sends another number of entries on every rank, and ranks exchange messages "
                         "of one size; use TopK, RTopK or Dealt")  # fmt: skip
    if rule.keeps_state:
        raise ValueError(f"{rule.label} keeps a state, which the hook neither saves nor takes back when ranks skip "
                         "a step; use RTopK or Dealt")  # fmt: skip


def compare(transport: AllGather, description: dict[str, str] | None, refusal: Exception | None) -> None:
    """Exchange descriptions, or refusals; raise the same error on all ranks unless all agree."""
    own: dict[str, str] = {} if description is None else description
    if refusal is not None:
        own = {"refusal": str(refusal)}
    everyone = [_unpack(message) for message in transport.exchange([_pack(own)])]
    refusals = [f"rank {rank}: {said['refusal']}" for rank, said in enumerate(everyone) if "refusal" in said]
    if (
        refusal is not None
        and len(refusals) == transport.nodes
        and len({r.split(": ", 1)[1] for r in refusals}) == 1
    ):
        raise refusal  # all ranks made the same mistake: the plain error says it best
    if refusals:
        raise ValueError(
            f"rtopk was refused on {len(refusals)} of {transport.nodes} ranks. {'; '.join(refusals)}"
        )
    names = list(dict.fromkeys(name for said in everyone for name in said))
    differing = [
        f"{name} is {by_rank([said.get(name, 'missing') for said in everyone])}"
        for name in names
        if len({said.get(name) for said in everyone}) > 1
    ]
    if differing:
        raise ValueError(
            f"rtopk must be registered with the same options on all ranks: {'. '.join(differing)}"
        )


def _densities(schedule: Schedule) -> str:
    """Describe a schedule by its densities: it may be any function, and may end with the job."""
    said = {0: check_density(schedule(0))}
    for step in ASKED[1:]:
        try:
            said[step] = schedule(step)
        except Exception:
            break
    if len(set(said.values())) == 1:
        return repr(said[0])
    shown = {step: f"{said[step]:.6g}" for step in (0, 1, 10, 100, 1_000, 10_000) if step in said}
    digest = hashlib.blake2b(repr(said).encode(), digest_size=4).hexdigest()
    return f"{shown} by step (hash of {len(said)}: {digest})"


def _by_numbers(value: object) -> str:
    numbers = {
        n: v for n, v in getattr(value, "__dict__", {}).items() if isinstance(v, bool | int | float | str)
    }
    return f"{type(value).__name__} {numbers}"


def _text(value: object) -> str:
    if type(value).__repr__ is object.__repr__:
        return _by_numbers(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # addresses differ between processes


def _pack(description: dict[str, str]) -> Tensor:
    cut = {}
    for name, value in description.items():
        digest = hashlib.blake2b(value.encode(), digest_size=4).hexdigest()
        cut[name] = value if len(value) <= SHOWN else f"{value[:SHOWN]}... (hash {digest})"
    raw = json.dumps(cut).encode()
    if len(raw) > BYTES:  # cannot happen with fewer than 30 values of 200 ASCII characters
        raise ValueError(f"the options take {len(raw)} bytes as text, at most {BYTES} are exchanged")
    return torch.frombuffer(bytearray(raw.ljust(BYTES)), dtype=torch.uint8)


def _unpack(message: Tensor) -> dict[str, str]:
    said: dict[str, str] = json.loads(bytes(message.tolist()))
    return said
