"""The interface of selection rules: the choice itself, what it needs, and its name.

Your own rule is a subclass of `Rule` in its own file, and must define only `select`. The hook, the fast path, the
laws and the tables read the rest from the rule.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

METHODS: dict[str, type["Rule"]] = {}  # by name; a rule adds itself


class Selector(Protocol):
    """Choose k positions of a vector, ascending: the least that a selector must do."""

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""


class Rule:
    """A selection rule: a plain value that nodes may share; `at_node` returns what belongs to one node.

    `class Mine(Rule, method="mine-k")` makes it a method of the command line and of the studies, too.
    """

    method = ""  # its name there
    sends_k = True  # `select` returns exactly k positions, so that messages have a size that all ranks know
    keeps_state = False  # the choice depends on what was sent before
    needs_all_nodes = False  # every node must take part in every round

    def __init_subclass__(cls, method: str = "", **others: Any) -> None:
        super().__init_subclass__(**others)
        if method:
            cls.method = method
            METHODS[method] = cls
        if "select" in vars(cls) and "considered" not in vars(cls):
            # A new `select` overrides an inherited `considered`.
            cls.considered = Rule.considered  # type: ignore[method-assign]

    @classmethod
    def for_run(cls, nodes: int, r_over_k: float = 0.0, threshold: float = 0.0) -> "Rule":
        """Make the rule for a run of so many nodes from the options of the command line (r_over_k 0: default)."""
        return cls()

    @property
    def label(self) -> str:
        """The name in errors."""
        return type(self).__name__

    def considered(self, k: int, d: int) -> int | None:
        """Return r if the choice is a uniform draw of k from the r largest; None if `select` must be called."""
        return None

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions of a finite vector."""
        raise TypeError(f"{self.label} chooses at a node: call at_node(seed, node).select, or define select")

    def require(self, nodes: int) -> None:
        """Raise ValueError if this number of nodes cannot use the rule together."""

    def at_node(self, seed: int, node: int) -> "Rule":
        """Return the rule for one node; nodes that work together share the seed."""
        return self

    def begin(self, step: int) -> None:
        """Start a round; called before `considered` and `select`, and perhaps more than once."""

    def end(self, sent: Tensor) -> None:
        """End a round; `sent` holds the positions that were really sent."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of everything that the next round depends on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; one that does not fit is refused and changes nothing."""
        if state:
            raise ValueError(f"{self.label} keeps no state, got {sorted(state)}")


class Adopted(Rule):
    """A selector that is not a `Rule`, used as it is."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.select = selector.select  # type: ignore[method-assign]

    @property
    def label(self) -> str:
        """What tables and pictures call it."""
        return type(self.selector).__name__


def as_rule(selector: Selector) -> Rule:
    """Return a selector as a rule; raise ValueError if it cannot select."""
    if isinstance(selector, Rule):
        return selector
    if isinstance(selector, type) or not callable(getattr(selector, "select", None)):
        raise ValueError(f"selector must have a method select(vector, k, rng), got {selector!r}; "
                         "give an object such as rtopk.TopK()")  # fmt: skip
    return Adopted(selector)
