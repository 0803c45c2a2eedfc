"""The options of `register`: one dataclass is their signature, help text, check and description.

Ranks that disagree about density, codec or seed would exchange messages of different sizes or meanings. So at
registration every rank sends a description of its options, or the reason why it refuses them, in one message of
fixed size. All ranks stop together, and all say what differs.
"""

import functools
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, get_args, overload

import torch
from torch import Tensor, nn

from rtopk import defaults
from rtopk.aggregate import Mean, check_weights
from rtopk.codec import Codec
from rtopk.exchange import Exchange, ExchangeName, OwnerDensity, Vector, check_exchange, make_exchange
from rtopk.layout import DenseRule, Layout, nothing, one_dimensional
from rtopk.memory import MEMORIES, Memory
from rtopk.replicas.control import by_rank
from rtopk.schedule import Constant, Schedule, WarmUp, as_schedule, check_density
from rtopk.select import Selector, as_rule
from rtopk.state_file import byte_tensor
from rtopk.transport import AllGather

P = ParamSpec("P")
A = TypeVar("A")
B = TypeVar("B")
R = TypeVar("R")
Scope = Literal["global", "bucket"]
OnNonFinite = Literal["skip", "raise"]
Counts = Literal["steps", "epochs"]
CHOICES = {
    "mean": Mean,
    "exchange": ExchangeName,
    "scope": Scope,
    "on_nonfinite": OnNonFinite,
    "counts": Counts,
}
LEAST = {"dense_steps": 0, "verify_every": 0, "max_skips": 1}
INTEGERS = (*LEAST, "seed")
USED = {"optimizer": "param_groups", "scaler": "get_scale", "dense": "__call__"}  # of an object that is given
OWN = {"dense", "scaler", "optimizer", "attach"}  # may differ between ranks; `dense` shows in the layout
PRESETS: dict[str, dict[str, Any]] = {
    # The paper's Algorithm 1 as printed: k of the n k largest of the whole gradient, the mean over the nodes.
    "paper": {"selector": "rtop-k", "memory": "error-feedback", "mean": "nodes", "dense": nothing},
    # Lin et al., 2018: the largest of each tensor with two dimensions or more, momentum at the nodes, masked.
    "dgc": {"selector": "top-k", "memory": "momentum-correction", "mean": "nodes", "scope": "bucket"},
}
BYTES = 8192  # of the description that is exchanged
SHOWN = 200  # characters of one value in it; longer ones are cut and carry a hash
# Where schedules are compared at registration. Other differences show in the step where they occur.
ASKED = (*range(10), 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that is needed."""

    def get_scale(self) -> float:
        """Return the current loss scale."""


@dataclass(frozen=True)
class Options:
    """How replicas exchange gradients.

    density: share of the entries to send, in addition to the dense ones, or a schedule such as rtopk.warm_up.
    preset: a published algorithm, which sets selector, memory, mean, dense and scope: "paper" (rTop-k, Algorithm 1)
        or "dgc" (Deep Gradient Compression; its warm-up is a schedule of `density`).
    selector: which entries to send: a rule, or its name ("top-k", "rtop-k", ...). Default: the k largest; without
        a memory k drawn from the 2 k largest, RTopK(r_over_k=2). The paper's is RTopK(nodes=world size); with
        Dealt(world size) no two ranks send the same entry.
    memory: "error-feedback", "momentum-correction", "none", or a function that returns a memory. Momentum
        correction takes over the momentum of an `optimizer` that is given. Default: momentum correction if an
        optimizer with momentum (SGD, Adam, AdamW) is given, else error feedback.
    values: how values are sent: unchanged as "fp32", or rounded to "fp16", "bf16", "int8", "4bit", "2bit".
    rounding: "nearest" or "stochastic"; the rounding error stays in the residual.
    mean: "nodes" divides by the world size, "received" by the number of ranks that sent the entry. Default:
        "nodes", or "received" without a memory.
    weights: the ranks' weights in the mean, for instance their numbers of examples; equal by default.
    exchange: "all-gather": every rank receives all payloads, (n - 1) k entries. "all-reduce": every rank averages
        its share of the entries and passes on the largest, so that a rank receives about 2 k entries at any n.
        "auto": all-reduce from 8 ranks on.
    owner_density: with "all-reduce", the part of all entries that is passed on: `density` by default, or "all",
        which passes on everything that was sent.
    clip_norm: clip each rank's gradient (of a sharded model: each replica's) to this norm before it is added to the
        memory, as DGC does.
    scope: "global" selects over the whole model, with one collective at the end of backward; "bucket" selects
        within each tensor and sends each bucket during backward.
    dense: which tensors are always sent in full; one-dimensional ones (biases, norms) by default.
    dense_steps: send everything for this many steps first; the schedule starts after them.
    counts: what the schedule counts: "steps", or "epochs" as set by state.set_epoch.
    seed: the seed of all draws; each rank and step derives its own.
    verify_every: compare a hash of the weights between ranks every so many steps; 0 is never.
    on_nonfinite: if a rank's gradient has NaN or Inf, "skip" the step on all ranks or "raise" on all.
    max_skips: raise after this many skipped rounds in a row.
    scaler: the GradScaler of the loop, if it has one.
    optimizer: the optimizer of the model; its momentum moves into the memory, see `memory`.
    attach: register the hook with the model; False leaves that to a framework.
    """

    density: float | Schedule = 0.001
    _: KW_ONLY
    preset: str | None = None
    selector: Selector | str | None = None
    memory: str | Callable[[], Memory] | None = None
    values: str = "fp32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    mean: Mean | None = None
    weights: Sequence[float] | None = None
    exchange: ExchangeName = "all-gather"
    owner_density: OwnerDensity | None = None
    clip_norm: float | None = None
    scope: Scope = "global"
    dense: DenseRule = one_dimensional
    dense_steps: int = 0
    counts: Counts = "steps"
    seed: int = 0
    verify_every: int = 0
    on_nonfinite: OnNonFinite = "skip"
    max_skips: int = 50
    scaler: Scaler | None = None
    optimizer: torch.optim.Optimizer | None = None
    attach: bool = True

    def resolved(self, nodes: int) -> "Options":
        """Fill in the defaults that depend on others; raise ValueError for what makes no sense."""
        if self.preset is not None:
            return replace(self, preset=None, **self._as_published()).resolved(nodes)
        known = self.memory in MEMORIES if isinstance(self.memory, str) else callable(self.memory)
        if self.memory is not None and not known:
            raise ValueError(f"memory must be one of {tuple(MEMORIES)} or a function that makes one, "
                             f"got {self.memory!r}")  # fmt: skip
        memory = self.make_memory()
        found = replace(
            self,
            density=as_schedule(self.density),
            selector=_rule(self.selector, nodes, memory),
            mean=defaults.mean(memory) if self.mean is None else self.mean,
            weights=None if self.weights is None else tuple(map(float, self.weights)),
            exchange=defaults.exchange(nodes, self.exchange),
            owner_density=defaults.owner_density(nodes, self.exchange, self.owner_density),
        )
        for name, allowed in CHOICES.items():
            if getattr(found, name) not in get_args(allowed):
                raise ValueError(f"{name} must be one of {get_args(allowed)}, got {getattr(found, name)!r}")
        for name in INTEGERS:
            if isinstance(given := getattr(found, name), bool) or not hasattr(given, "__index__"):
                raise ValueError(f"{name} must be an integer, got {given!r}")
        for name, least in LEAST.items():
            if getattr(found, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(found, name)}")
        for name, part in USED.items():
            if (given := getattr(self, name)) is not None and not hasattr(given, part):
                raise ValueError(f"{name} must be an object with {part}, got {given!r}")
        check_exchange(found.exchange, found.owner_density)
        if self.clip_norm is not None and (
            isinstance(self.clip_norm, str) or not 0.0 < self.clip_norm < math.inf
        ):
            raise ValueError(f"clip_norm must be positive and finite, or None, got {self.clip_norm!r}")
        if found.weights is not None:
            if len(found.weights) != nodes:
                raise ValueError(f"{nodes} ranks need as many weights, got {len(found.weights)}")
            check_weights(found.weights)
        clips = self.clip_norm is not None or getattr(memory, "clip_norm", None) is not None
        if self.scope == "bucket" and clips:
            raise ValueError(
                "clip_norm bounds the norm of the whole gradient, which scope='bucket' never sees; "
                "use scope='global' or clip the averaged gradient yourself"
            )
        found.codec()  # refuses unknown values
        return found

    def _as_published(self) -> dict[str, Any]:
        """Return the options of the preset; raise ValueError if one was given another value."""
        if self.preset not in PRESETS:
            raise ValueError(f"preset must be one of {tuple(PRESETS)}, got {self.preset!r}")
        own = PRESETS[self.preset]
        usual = {field.name: field.default for field in fields(self)}
        for name, value in own.items():
            given = getattr(self, name)
            if given not in (usual[name], value):
                raise ValueError(
                    f"preset {self.preset!r} has {name}={value!r}, got {given!r}: leave out one of the two"
                )
        return own

    def make_memory(self) -> Memory:
        """Make the memory of one vector."""
        memory = defaults.memory(momentum_can_move=False) if self.memory is None else self.memory
        return (MEMORIES[memory] if isinstance(memory, str) else memory)()

    def codec(self, fingerprint: int = 0, dense_size: int = 0) -> Codec:
        """Make the codec; the size of its payloads follows from d and k alone."""
        return Codec(self.values, self.rounding, fingerprint, fixed=True, dense_size=dense_size)

    def make_exchange(
        self, transport: AllGather, layout: Layout, seed: int, memory: Memory, density: Schedule
    ) -> Exchange:
        """Make the exchange of one vector."""
        vector = Vector(
            layout.size,
            layout.dense_size,
            cast(Mean, self.mean),
            self.weights,
            getattr(memory, "keeps", True),
            seed,
        )
        codec = self.codec(layout.fingerprint, layout.dense_size)
        return make_exchange(self.exchange, transport, vector, codec, density, self.owner_density)

    @property
    def schedule(self) -> Schedule:
        """The density of each step or epoch."""
        return as_schedule(self.density)

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
        told = {field.name: str(getattr(self, field.name)) for field in fields(self) if field.name not in OWN}
        return {
            **told,
            "density": _densities(self.schedule),
            **(
                {"owner_density": _densities(found, "owner_density")}
                if callable(found := self.owner_density)
                else {}
            ),
            "constant density": f"from step {self.settled_from}",
            "selector": _text(self.selector),
            "memory": _by_numbers(self.make_memory()),
        }


class _Adopt(Protocol[P]):
    @overload
    def __call__(self, register: Callable[[A, Options], R], /) -> Callable[Concatenate[A, P], R]: ...
    @overload
    def __call__(self, register: Callable[[A, B, Options], R], /) -> Callable[Concatenate[A, B, P], R]: ...


def takes(options: Callable[P, Options]) -> _Adopt[P]:
    """Let a function whose last parameter is `Options` take its fields instead; they join signature and help."""

    def adopt(register: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(register)
        first = list(own.parameters.values())[:-1]
        signature = own.replace(parameters=[*first, *inspect.signature(options).parameters.values()])

        @functools.wraps(register)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{register.__name__}() {error}") from None
            return register(*(bound.pop(parameter.name) for parameter in first), Options(**bound))

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = f"{register.__doc__}\n{(options.__doc__ or '').partition(chr(10))[2]}"
        return call

    return cast(_Adopt[P], adopt)


def _rule(selector: Selector | str | None, nodes: int, memory: Memory) -> Selector:
    """Return the rule to use; raise ValueError for one that exchanges of a fixed size do not support."""
    selector = defaults.selector(nodes, memory, selector)
    rule = as_rule(selector)
    rule.require(nodes)
    if not rule.sends_k:
        raise ValueError(f"{rule.label} sends another number of entries on every rank, and ranks exchange messages "
                         "of one size; use TopK, RTopK or Dealt")  # fmt: skip
    if rule.keeps_state:
        raise ValueError(f"{rule.label} keeps a state, which the hook neither saves nor takes back when ranks skip "
                         "a step; use RTopK or Dealt")  # fmt: skip
    return selector


def compare(transport: AllGather, description: dict[str, str], refusal: Exception | None) -> None:
    """Exchange descriptions, or refusals; raise the same error on all ranks unless all agree."""
    own = description if refusal is None else {"refusal": str(refusal)}
    everyone: list[dict[str, str]] = [
        json.loads(bytes(message.tolist())) for message in transport.exchange([_pack(own)])
    ]
    refusals = {rank: said["refusal"] for rank, said in enumerate(everyone) if "refusal" in said}
    if refusal is not None and len(refusals) == transport.nodes and len(set(refusals.values())) == 1:
        raise refusal  # all ranks made the same mistake: the plain error says it best
    if refusals:
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in refusals.items())
        raise ValueError(f"rtopk was refused on {len(refusals)} of {transport.nodes} ranks. {reasons}")
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


def _densities(schedule: Schedule, name: str = "density") -> str:
    """Describe a schedule by its densities: it may be any function, and may end with the job."""
    said = {0: check_density(schedule(0), name)}
    for step in ASKED[1:]:
        try:
            said[step] = schedule(step)
        except Exception:
            break
    if len(set(said.values())) == 1:
        return repr(said[0])
    shown = {step: f"{said[step]:.6g}" for step in (0, 1, 10, 100, 1_000, 10_000) if step in said}
    return f"{shown} by step (hash of {len(said)}: {_hash(repr(said))})"


def _by_numbers(value: object) -> str:
    numbers = {
        n: v
        for n, v in getattr(value, "__dict__", {}).items()
        if isinstance(v, bool | int | float | str) and not n.startswith("_")  # those change from step to step
    }
    return f"{type(value).__name__} {numbers}"


def _text(value: object) -> str:
    if type(value).__repr__ is object.__repr__:
        return _by_numbers(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # addresses differ between processes


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def _pack(description: dict[str, str]) -> Tensor:
    cut = {
        name: value if len(value) <= SHOWN else f"{value[:SHOWN]}... (hash {_hash(value)})"
        for name, value in description.items()
    }
    raw = json.dumps(cut).encode()
    if len(raw) > BYTES:  # cannot happen with fewer than 30 values of 200 ASCII characters
        raise ValueError(f"the options take {len(raw)} bytes as text, at most {BYTES} are exchanged")
    return byte_tensor(raw.ljust(BYTES))


def refuse_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the gradients of these parameters cannot be exchanged."""
    if not parameters:
        raise ValueError("the model has no trainable parameters; thaw them before you register")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ValueError(
                f"{name} is {parameter.dtype}; only real floating-point parameters are supported"
            )
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device; give it memory and weights (to_empty, load) first"
            )
        if parameter.is_sparse or not parameter.numel():
            raise ValueError(f"{name} is sparse or empty; only dense parameters with entries are supported")
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise ValueError(
            f"parameters lie on {sorted(map(str, devices))}; one device per process is supported"
        )
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise ValueError(
                f"{name} makes sparse gradients; create it with sparse=False: few entries are sent anyway"
            )


def plain_name(name: str) -> str:
    """Return the name of a parameter in the plain model, so that a state does not depend on wrappers.

    >>> plain_name("_orig_mod.blocks.0._checkpoint_wrapped_module.weight")
    'blocks.0.weight'
    """
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
