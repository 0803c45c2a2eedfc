"""A configuration: all that decides a run, as plain values; and the command line that repeats it.

Every record and checkpoint holds one."""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from rtopk import defaults
from rtopk.aggregate import Mean
from rtopk.codec import Codec
from rtopk.exchange import ExchangeName, OwnerDensity, check_exchange
from rtopk.layout import Layout, nothing, one_dimensional
from rtopk.memory import DecayedErrorFeedback, ErrorFeedback, Memory, MomentumCorrection, NoMemory
from rtopk.schedule import Schedule, check_density, constant, warm_up
from rtopk.select import METHODS as RULES
from rtopk.select import Rule
from rtopk.studies.variants import DecayedMomentumCorrection, MovingR, PerTensor

Setting = Literal["distributed", "federated"]
MemoryName = Literal["error-feedback", "momentum-correction", "none"]
OwnerRule = Literal["top-k", "rtop-k", "intersection"]
OptimizerName = Literal["sgd", "adamw"]
RateSchedule = Literal["constant", "cosine", "piecewise", "zaremba"]
Split = Literal["iid", "contiguous", "dirichlet", "class"]
Part = Literal["test", "validation"]


# "dense" is top-k of everything, and powersgd sends matrices instead of entries; all others are rules.
def methods() -> tuple[str, ...]:
    """Name every method, rules from elsewhere among them."""
    return ("dense", *RULES, "powersgd")


def add_rule(place: str) -> str:
    """Import a rule from FILE:CLASS, here and in the processes that this one starts; return its method's name."""
    file, _, name = place.rpartition(":")
    path = Path(file).resolve()
    if path.suffix != ".py":
        raise ValueError(f"a rule must be FILE.py:CLASS, got {place!r}")
    if not path.is_file():
        raise ValueError(f"a rule must be FILE.py:CLASS, and there is no file {file!r}")
    spec = importlib.util.spec_from_file_location(f"rtopk_rule_{path.stem}", path)
    assert spec is not None  # a file of Python has one
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    ours = {method: rule for method, rule in RULES.items() if rule.__module__.startswith("rtopk.")}
    spec.loader.exec_module(module)
    taken = {method for method, rule in ours.items() if RULES[method] is not rule}
    RULES.update(ours)
    if taken := taken | {"dense", "powersgd"}.intersection(RULES):
        for method in taken - ours.keys():
            del RULES[method]
        raise ValueError(
            f"{file} names a rule {', '.join(sorted(taken))}, as rtopk does; choose another name"
        )
    rule = getattr(module, name, None)
    if not (isinstance(rule, type) and issubclass(rule, Rule) and rule.method):
        raise ValueError(f'{place} must be a rule with a name: class {name}(rtopk.Rule, method="...")')
    known = os.environ.get(ADDED_RULES, "").split("\n")
    os.environ[ADDED_RULES] = "\n".join(filter(None, dict.fromkeys([*known, f"{path}:{name}"])))
    return rule.method


ADDED_RULES = "RTOPK_RULES"  # the variable that tells workers, a rule a line
for _place in filter(None, os.environ.get(ADDED_RULES, "").split("\n")):
    add_rule(_place)


# Fields that were added later are in a run's key only where they are set, so that older records keep theirs.
ADDED = {
    "threshold": 0.0, "matrix_rank": 0, "exchange": "all-gather", "owner_density": 0.0, "flush": False,
    "optimizer": "sgd", "owner_rule": "top-k", "same_draws": False, "per_tensor": False, "centre_rate": 1.0,
    "examples": 0, "residual_decay": 1.0, "r_over_k_end": 0.0,
}  # fmt: skip


def option(default: Any, text: str) -> Any:
    """Make a field that is an option of the command line too, with its help text."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Config:
    """Describe one run. Rounds, batches and densities are per node and round."""

    task: str = option("digits", "What to learn, e.g. digits, cifar10-small, ptb-small.")
    method: str = option("rtop-k", f"One of {', '.join(methods())}.")
    setting: Setting = option("distributed", "distributed (a round per batch) or federated.")
    seed: int = option(0, "The same seed repeats a run to the bit.")
    nodes: int = option(5, "Number of nodes.")
    rounds: int = option(1000, "Number of exchanges.")
    batch: int = option(32, "Examples per node and step.")
    local_steps: int = option(0, "Federated: steps a round; 0 is an epoch.")

    density: float = option(0.01, "Part of the entries that is sent: k / d.")
    dense_biases: bool = option(False, "Send 1-D tensors whole.")
    r_over_k: float = option(0.0, "rTop-k: r / k; 0 is the number of nodes.")
    r_over_k_end: float = option(
        0.0, "rTop-k: r / k in the last round, reached geometrically; 0 is r_over_k."
    )
    same_draws: bool = option(False, "All nodes draw alike.")
    per_tensor: bool = option(False, "Select within each tensor, its share of k.")
    threshold: float = option(0.0, "threshold: least magnitude that is sent.")
    matrix_rank: int = option(0, "powersgd: columns of each factor.")
    values: str = option("fp32", "fp32, fp16, bf16, int8, 4bit or 2bit.")
    memory: MemoryName = option("error-feedback", "error-feedback, momentum-correction or none.")
    masking: bool = option(True, "Momentum correction: forget velocity sent.")
    residual_decay: float = option(1.0, "What a residual is multiplied by in every round.")
    mean: Mean = option("nodes", "Average over all nodes, or over the received.")
    weighted: bool = option(False, "Weigh nodes by their examples.")
    exchange: ExchangeName = option("all-gather", "all-gather, all-reduce or auto.")
    owner_density: float = option(0.0, "all-reduce: part that owners pass on; 0 is density, 1 is all.")
    owner_rule: OwnerRule = option(
        "top-k",
        "all-reduce: what owners pass on: their largest, draws of the 2 k largest, or the largest of this round, "
        "where nodes keep the rest themselves (Ok-Topk).",
    )
    warm_up: int = option(0, "Rounds in which the density falls.")
    warm_up_start: float = option(0.25, "Density at the first round.")
    flush: bool = option(False, "Send everything, residual included, in the last round.")

    learning_rate: float = option(0.02, "At the start.")
    rate_schedule: RateSchedule = option("cosine", "constant, cosine, piecewise or zaremba.")
    optimizer: OptimizerName = option("sgd", "Distributed: sgd or adamw, at the centre.")
    momentum: float = option(0.9, "At the centre, unless corrected at nodes; AdamW's first beta.")
    weight_decay: float = option(0.0, "Where the optimizer is.")
    clip_norm: float = option(0.0, "Bound on the mean gradient; 0 is none.")

    centre_rate: float = option(1.0, "Federated: how far the centre follows the mean update.")

    examples: int = option(0, "Training examples to use, of image tasks; 0 is all.")
    split: Split = option("iid", "iid, contiguous, dirichlet or class.")
    alpha: float = option(0.5, "Dirichlet: the smaller, the less alike.")
    part: Part = option("test", "Evaluate on test, or on validation for tuning.")
    evaluate_every: int = option(100, "Rounds between evaluations.")

    def __post_init__(self) -> None:
        for name, allowed in {"method": methods(), **_choices()}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("nodes", "rounds", "batch", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("local_steps", "warm_up", "weight_decay", "clip_norm", "examples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name, value in self.to_dict().items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        for name in ("r_over_k", "r_over_k_end"):
            if getattr(self, name) != 0.0 and not getattr(self, name) >= 1.0:
                raise ValueError(
                    f"{name} must be at least 1, or 0 for the rule's own, got {getattr(self, name)}"
                )
        if not 0.0 < self.residual_decay <= 1.0:
            raise ValueError(f"residual_decay must be in (0, 1], got {self.residual_decay}")
        if self.residual_decay < 1.0 and not self.keeps:
            raise ValueError(
                f"residual_decay must be 1 where nothing is kept, got {self.residual_decay} with memory "
                f"{self.memory} and method {self.method}"
            )
        check_density(self.density)
        check_exchange(defaults.exchange(self.nodes, self.exchange), self.make_owner_density())
        self._check_method()
        self.make_codec(0)  # refuses values that it does not know
        if not self.learning_rate > 0.0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if not self.alpha > 0.0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")
        if self.setting == "federated" and self.memory == "momentum-correction":
            raise ValueError(
                "momentum-correction corrects momentum across batches; in the federated setting momentum is "
                "local to a round: use memory error-feedback or none"
            )
        if self.owner_rule != "top-k" and defaults.exchange(self.nodes, self.exchange) != "all-reduce":
            raise ValueError(f"owner_rule {self.owner_rule} is for exchange all-reduce, got {self.exchange}")
        if self.setting == "federated" and self.optimizer != "sgd":
            raise ValueError(f"optimizer must be sgd in the federated setting, got {self.optimizer}")
        if not self.centre_rate > 0.0:
            raise ValueError(f"centre_rate must be positive, got {self.centre_rate}")
        for name, neutral in (("local_steps", 0), ("centre_rate", 1.0)):
            if self.setting == "distributed" and getattr(self, name) != neutral:
                raise ValueError(f"{name} is for the federated setting, got {getattr(self, name)}")

    def _check_method(self) -> None:
        own = {"threshold": "threshold", "matrix_rank": "powersgd", "r_over_k_end": "rtop-k"}
        for name, method in own.items():
            value = getattr(self, name)
            if self.method == method and not value > 0 and name != "r_over_k_end":  # which has a default
                raise ValueError(f"{name} must be positive for method {method}, got {value}")
            if self.method != method and value:
                raise ValueError(f"{name} must be 0 for method {self.method}, got {value}: it is {method}'s")
        if self.method == "powersgd" and (
            self.memory == "momentum-correction" or self.warm_up or self.dense_biases
        ):
            raise ValueError(
                "powersgd must have memory error-feedback or none, warm_up 0 and dense_biases off: "
                "it sends tensors of one dimension whole in any case"
            )

    @property
    def corrects_momentum(self) -> bool:
        """Say whether the nodes, not the centre, carry the momentum."""
        return self.memory == "momentum-correction"

    def make_selector(self, layout: Layout | None = None) -> Rule:
        """Build the rule for which entries are sent; one within tensors needs their layout."""
        rule = RULES["top-k" if self.method == "dense" else self.method]
        made = rule.for_run(self.nodes, self.r_over_k, self.threshold)
        if self.r_over_k_end:
            made = MovingR(self.r_over_k or self.nodes, self.r_over_k_end, self.rounds)
        return PerTensor(made, layout) if self.per_tensor and layout is not None else made

    def require_common(self, engine: str) -> None:
        """Raise ValueError if the run has options that only nodes within one process have."""
        for name in ("same_draws", "per_tensor", "centre_rate", "residual_decay", "r_over_k_end"):
            if getattr(self, name) != ADDED[name]:
                raise ValueError(
                    f"{name} is for runs whose nodes are in one process, got {getattr(self, name)} for {engine}"
                )

    def make_memory(self) -> Memory:
        """Build one node's memory."""
        decay = self.residual_decay
        if self.corrects_momentum and decay < 1.0:
            return DecayedMomentumCorrection(decay, self.momentum, masking=self.masking)
        if self.corrects_momentum:
            return MomentumCorrection(self.momentum, masking=self.masking)
        if not self.keeps:
            return NoMemory()
        return DecayedErrorFeedback(decay) if decay < 1.0 else ErrorFeedback()

    def make_optimizer(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Build the optimizer at the centre, without the momentum that the nodes carry."""
        momentum = 0.0 if self.corrects_momentum else self.momentum
        if self.optimizer == "adamw":
            return torch.optim.AdamW(
                parameters, self.learning_rate, betas=(momentum, 0.999), weight_decay=self.weight_decay
            )
        return torch.optim.SGD(
            parameters, self.learning_rate, momentum=momentum, weight_decay=self.weight_decay
        )

    @property
    def keeps(self) -> bool:
        """Say whether nodes keep what they do not send; dense has nothing to keep."""
        return self.memory != "none" and self.method != "dense"

    def make_density(self) -> Schedule:
        """Build the density as a function of the round."""
        if self.method == "dense":
            return constant(1.0)
        falls = self.warm_up and self.warm_up_start > self.density
        usual: Schedule = (
            warm_up(self.density, self.warm_up, self.warm_up_start) if falls else constant(self.density)
        )
        if not self.flush:
            return usual
        return lambda round_: 1.0 if round_ == self.rounds - 1 else usual(round_)

    def make_owner_density(self) -> OwnerDensity | None:
        """Return the part of the entries that owners pass on, with exchange all-reduce."""
        given = None if not self.owner_density else "all" if self.owner_density == 1.0 else self.owner_density
        return defaults.owner_density(self.nodes, self.exchange, given)  # type: ignore[arg-type]

    def make_layout(self, model: nn.Module) -> Layout:
        """Lay out a model's parameters."""
        return Layout.of(model, dense=one_dimensional if self.dense_biases else nothing)

    def make_codec(self, fingerprint: int) -> Codec:
        """Build the codec that all nodes share."""
        return Codec(self.values, fingerprint=fingerprint)

    def rate(self, round_: int) -> float:
        """Return the learning rate of a round.

        piecewise divides by ten at half and at three quarters; zaremba keeps it for 14 of 55 epochs and then
        divides it by 1.15 every epoch (Zaremba et al.'s large model).
        """
        done = round_ / self.rounds
        if self.rate_schedule == "zaremba":
            return self.learning_rate / 1.15 ** max(0, 55 * round_ // self.rounds - 13)
        if self.rate_schedule == "cosine":
            return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
        if self.rate_schedule == "piecewise":
            return self.learning_rate * (0.01 if done >= 0.75 else 0.1 if done >= 0.5 else 1.0)
        return self.learning_rate

    def evaluates(self, done: int) -> bool:
        """Say whether a run is evaluated after so many rounds."""
        return done % self.evaluate_every == 0 or done == self.rounds

    def to_dict(self) -> dict[str, Any]:
        """Return the plain values."""
        return dict(vars(self))

    @property
    def key(self) -> str:
        """Name this configuration, seed included, in 16 hexadecimal digits."""
        values = {n: v for n, v in self.to_dict().items() if n not in ADDED or v != ADDED[n]}
        return name_of(values)


def name_of(values: Mapping[str, Any]) -> str:
    """Name options by their values, in 16 hexadecimal digits."""
    text = json.dumps(values, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=8).hexdigest()


@functools.cache
def _choices() -> dict[str, tuple[Any, ...]]:
    """Return the values that an option may have, of those with a list of them."""
    return {n: get_args(kind) for n, kind in get_type_hints(Config).items() if get_origin(kind) is Literal}


def command(config: Mapping[str, Any], program: str = "rtopk train") -> str:
    """Return the command that runs the configuration again.

    >>> command({**Config().to_dict(), "density": 0.001, "dense_biases": True, "masking": False})
    'rtopk train --density 0.001 --dense-biases --no-masking'
    """
    words = program.split()
    for one in dataclasses.fields(Config):
        value = config.get(one.name, one.default)
        if value == one.default:
            continue
        flag = one.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", shlex.quote(str(value))]
    return " ".join(words)
