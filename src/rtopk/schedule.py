"""Step -> density. A schedule is a plain function of the step; nothing here has state.

`warm_up` is DGC's: the density falls geometrically (the sparsity rises exponentially) from `start` to its
final value. The caller decides what a "step" is: DGC counts epochs, the DDP hook counts rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[int], float]


def check_density(density: float, name: str = "density") -> float:
    """Return the density if it is in (0, 1]."""
    if density is None or isinstance(density, str | bool) or not 0.0 < density <= 1.0:
        raise ValueError(f"{name} must be in (0, 1], got {density!r}")
    return float(density)


@dataclass(frozen=True)
class Constant:
    """The same density at every step; made by `constant`."""

    density: float

    def __call__(self, step: int) -> float:
        """Return the density at this step."""
        return self.density


@dataclass(frozen=True)
class WarmUp:
    """A geometric fall of the density; made by `warm_up`."""

    density: float
    steps: int
    start: float
    every: int

    def __call__(self, step: int) -> float:
        """Return the density at this step."""
        stages = -(-self.steps // self.every)
        stage = step // self.every
        if step >= self.steps or stages == 1:
            return self.density if step >= self.steps else self.start
        return float(self.start * (self.density / self.start) ** (stage / (stages - 1)))


def constant(density: float) -> Constant:
    """Keep one density."""
    return Constant(check_density(density))


def warm_up(density: float, steps: int, start: float = 0.25, every: int = 1) -> WarmUp:
    """Go from `start` at step 0 down to `density` over `steps` steps, changing every `every` steps.

    The last stage of the warm-up already has the final density, as in DGC. Over five epochs, by epoch:

    >>> [f"{100 * warm_up(0.001, steps=5)(epoch):.3g} %" for epoch in range(6)]
    ['25 %', '6.29 %', '1.58 %', '0.398 %', '0.1 %', '0.1 %']

    The same in rounds, with 78 rounds per epoch: in stairs, and changing every round:

    >>> stairs = warm_up(0.001, steps=5 * 78, every=78)
    >>> glide = warm_up(0.001, steps=5 * 78)
    >>> f"{stairs(100):.4f} {glide(100):.4f}"
    '0.0629 0.0605'
    """
    check_density(density)
    check_density(start, "start")
    if start < density:
        raise ValueError(f"start must be at least the final density {density}, got {start}")
    if steps < 1 or not 1 <= every <= steps:
        raise ValueError(f"need steps >= 1 and 1 <= every <= steps, got steps={steps}, every={every}")
    return WarmUp(density, steps, start, every)


def as_schedule(density: float | Schedule) -> Schedule:
    """Accept a density or a schedule, return a schedule."""
    return density if callable(density) else constant(density)
