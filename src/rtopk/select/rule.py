"""What every selection rule offers: the choice itself, what it needs, and what it is called.

A rule of your own is a subclass of `Rule` in a file of its own. `select` is all that it must write; the hook, the
fast path, the laws and the tables ask the rule for the rest.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

METHODS: dict[str, type["Rule"]] = {}  # by name; a rule adds itself


class Selector(Protocol):
    """Choose k positions of a vector, ascending: all that is asked of a rule from elsewhere."""

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""


class Rule:
    """A selection rule, as a value that many nodes may share; `at_node` gives each node what is its own.

    `class Mine(Rule, method="mine-k")` makes it a method of the command line and of the studies, too.
    """

    method = ""  # its name there
    sends_k = (
        True  # exactly as many entries as are asked for, so that messages have a size that all ranks know
    )
    keeps_state = False  # what it chooses depends on what was sent before
    needs_all_nodes = False  # it counts on every node to take part in every round

    def __init_subclass__(cls, method: str = "", **others: Any) -> None:
        super().__init_subclass__(**others)
        if method:
            cls.method = method
            METHODS[method] = cls
        if "select" in vars(cls) and "considered" not in vars(cls):
            # Its choice is its own, whatever it inherits.
            cls.considered = Rule.considered  # type: ignore[method-assign]

    @classmethod
    def for_run(cls, nodes: int, r_over_k: float = 0.0, threshold: float = 0.0) -> "Rule":
        """Make the rule for a run of so many nodes from the options of the command line (r_over_k 0: default)."""
        return cls()

    @property
    def label(self) -> str:
        """What messages call it."""
        return type(self).__name__

    def considered(self, k: int, d: int) -> int | None:
        """Return r if the choice is a uniform draw of k from the r largest; None if `select` must be asked."""
        return None

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions of a finite vector."""
        raise NotImplementedError(f"{type(self).__name__} must define select")

    def require(self, nodes: int) -> None:
        """Raise ValueError if so many nodes cannot use it together."""

    def at_node(self, seed: int, node: int) -> "Rule":
        """Return the rule for one node; nodes that work together have one seed."""
        return self

    def begin(self, step: int) -> None:
        """Hear which round it is."""

    def end(self, sent: Tensor) -> None:
        """Hear which positions the others have really received."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of all that the next round depends on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state; one that does not fit is refused and changes nothing."""
        if state:
            raise ValueError(f"{self.label} keeps no state, got {sorted(state)}")


class Adopted(Rule):
    """A selector that is no `Rule`: it is asked as it is."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.select = selector.select  # type: ignore[method-assign]

    @property
    def label(self) -> str:
        """What tables and pictures call it."""
        return type(self.selector).__name__


def as_rule(selector: Selector) -> Rule:
    """Return a selector as a rule; what cannot select is refused."""
    if isinstance(selector, Rule):
        return selector
    if isinstance(selector, type) or not callable(getattr(selector, "select", None)):
        raise ValueError(f"selector must have a method select(vector, k, rng), got {selector!r}; "
                         "give an object such as rtopk.TopK()")  # fmt: skip
    return Adopted(selector)
