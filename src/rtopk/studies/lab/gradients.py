"""Does the paper's premise hold on these gradients? Statistics of real ones, and schemes tried beside a run.

`Inspector` is fed the nodes' gradients round by round. Beside the run it keeps shadows: sparsifiers that see the
same gradients and hold their own residuals, but move no weights. At chosen rounds it is also given the true
(full-batch) gradient, and measures how far each scheme's estimate is from it. `inspect` feeds it from a run, which
goes its own way, exactly as without being looked at.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rtopk.aggregate import average
from rtopk.memory import ErrorFeedback, NoMemory
from rtopk.select import RTopK
from rtopk.sparsifier import Sparsifier, entries_sent
from rtopk.studies.lab.arrival import Arrival, node_gradient, overlap
from rtopk.studies.tasks.objectives import Classification, Examples
from rtopk.studies.train.loop import Run, seeded

GAUSSIAN = 2 / math.pi  # s / d of a vector of independent Gaussian entries: no sparsity at all
SHARES = (0.001, 0.01, 0.1)
DRAWS = 8  # of a random scheme, for its mean error


def describe(vector: Tensor) -> dict[str, Any]:
    """Return the magnitudes of a vector in numbers: quantiles, tail, effective sparsity."""
    magnitude = vector.double().abs().sort(descending=True).values
    d, l1, l2 = magnitude.numel(), float(magnitude.sum()), float(magnitude.norm())
    if l2 == 0.0:
        raise ValueError("the gradient is zero everywhere; inspect an earlier round")
    energy = magnitude.square().cumsum(0) / l2**2
    tail = magnitude[: max(10, d // 100)]
    tail = tail[tail > 0]
    return {
        "d": d,
        "norm": l2,
        "s": (l1 / l2) ** 2,  # entries that a flat vector of the same norms would have
        "s_over_d": (l1 / l2) ** 2 / d,
        "s_model": l1
        / float(magnitude[0]),  # the paper's: sum of theta, if the largest entry is a certain one
        "tail_index": 1 / float((tail / tail[-1]).log().mean().clamp_min(1e-12)),  # Hill, of the largest 1 %
        "energy_in_largest": {f"{share:g}": float(energy[entries_sent(d, share) - 1]) for share in SHARES},
        "quantiles": {
            f"{share:g}": float(magnitude[min(d - 1, int(share * d))]) * math.sqrt(d) / l2
            for share in (*SHARES, 0.5, 0.9)
        },  # in units of the root mean square; the share counts from the largest
    }


@dataclass(frozen=True)
class Candidate:
    """A scheme: rTop-k at one density and one r / k; 1 is top-k, d / k is random-k."""

    density: float
    r_over_k: float

    def name(self, d: int) -> str:
        """Say which of the three it is."""
        if self.r_over_k == 1:
            return "top-k"
        return "random-k" if self.r_over_k * self.density >= 1 else "rtop-k"

    def factor(self, density: float) -> float:
        """Return r / k at this density: random-k stays random-k."""
        return 1 / density if self.r_over_k * self.density >= 1 else self.r_over_k

    def sparsifiers(self, nodes: int, density: float, seed: int, residual: bool) -> list[Sparsifier]:
        """Make every node's sparsifier, at a density that may be a little off the candidate's to fit its bytes."""
        rule = RTopK(r_over_k=self.factor(density))
        return [
            Sparsifier(rule, density, ErrorFeedback() if residual else NoMemory(), seed=seed, node=i)
            for i in range(nodes)
        ]


def exchange(nodes: Sequence[Sparsifier], gradients: Sequence[Tensor], step: int) -> tuple[Tensor, int]:
    """Return the mean that the centre makes (Algorithm 1) and the bytes that a node sent, on average."""
    payloads = [node.compress(g, step) for node, g in zip(nodes, gradients, strict=True)]
    vectors = [node.codec.decode(p) for node, p in zip(nodes, payloads, strict=True)]
    return average(vectors), round(sum(p.numel() for p in payloads) / len(payloads))


class Inspector:
    """Watch a run of n nodes; `density` is that of the comparison, `densities` those to choose from."""

    def __init__(
        self, nodes: int, d: int, density: float, densities: Sequence[float] = (), seed: int = 0,
        tolerance: float = 0.1,
    ) -> None:  # fmt: skip
        if nodes < 1 or d < 2:
            raise ValueError(f"need at least 1 node and d >= 2, got nodes={nodes}, d={d}")
        if not 0 < tolerance < 1:
            raise ValueError(f"tolerance must be in (0, 1), got {tolerance}")
        self.nodes, self.d, self.density, self.seed, self.tolerance = nodes, d, density, seed, tolerance
        self.candidates: dict[Candidate, list[Sparsifier]] = {}
        self.fitted: dict[
            Candidate, float
        ] = {}  # the density with which a candidate sends the bytes of r = n k
        for part in sorted({density, *densities}):
            k = entries_sent(self.d, part)
            within = {r for r in (1.0, 2.0, float(nodes), float(nodes**2)) if r * k < d}
            for factor in sorted({*within, max(d / k, 1 / part)}):  # the last is random-k
                one = Candidate(part, factor)
                self.fitted[one] = part
                self.candidates[one] = one.sparsifiers(nodes, part, seed, residual=True)
        self.estimates: dict[Candidate, Tensor] = {}  # of the latest round
        self.sent = {one: torch.zeros(d) for one in self.candidates}  # summed over rounds
        self.due = torch.zeros(d)
        self.arrivals = [Arrival(nodes, d, density, memory, seed) for memory in (True, False)]
        self.step = -1
        self.looks: list[dict[str, Any]] = []

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Feed the shadows one round."""
        if len(gradients) != self.nodes or any(g.numel() != self.d for g in gradients):
            raise ValueError(f"expected {self.nodes} gradients of {self.d} entries, got {len(gradients)}")
        if self.step < 0:
            self._fit(gradients)
        self.step += 1
        self.due += torch.stack(list(gradients)).mean(0)
        for arrival in self.arrivals:
            arrival.observe(gradients)
        for one, nodes in self.candidates.items():
            self.estimates[one] = exchange(nodes, gradients, self.step)[0]
            self.sent[one] += self.estimates[one]

    def _fit(self, gradients: Sequence[Tensor]) -> None:
        """Make all candidates of one density send equal bytes: the same k costs more where positions spread."""
        sizes = {
            one: exchange(one.sparsifiers(self.nodes, one.density, self.seed, False), gradients, 0)[1]
            for one in self.candidates
        }
        for one in self.candidates:
            beside = {p.r_over_k: p for p in self.candidates if p.density == one.density}
            budget = sizes[beside.get(float(self.nodes), one)]
            most = min(1.0, 1.0 / one.r_over_k) if one.name(self.d) != "random-k" else 1.0
            self.fitted[one] = min(most, one.density * budget / sizes[one])
            self.candidates[one] = one.sparsifiers(self.nodes, self.fitted[one], self.seed, residual=True)

    def lag(self, one: Candidate) -> float:
        """Return what part of all that was due, squared norm, has not been delivered or not exactly."""
        return float((self.sent[one] - self.due).square().sum() / self.due.square().sum())

    def look(self, round_: int, gradients: Sequence[Tensor], true: Tensor) -> None:
        """Measure the round last observed against the true gradient; errors are relative to its norm^2."""
        k = entries_sent(self.d, self.density)
        scale = float(true.square().sum())
        if scale == 0.0:
            raise ValueError(
                f"the gradient of round {round_} is zero everywhere; look at other rounds (--at)"
            )
        mean = torch.stack(list(gradients)).mean(0)
        schemes = []
        for one in self.candidates:
            if one.density != self.density:
                continue
            factor = one.factor(self.fitted[one])
            tries = [
                exchange(one.sparsifiers(self.nodes, self.fitted[one], seed, False), gradients, self.step)
                for seed in range(self.seed, self.seed + (1 if one.r_over_k == 1 else DRAWS))
            ]
            schemes.append(
                {
                    "scheme": one.name(self.d),
                    "r_over_k": one.r_over_k,
                    "k": entries_sent(self.d, self.fitted[one]),
                    "bytes": round(_average([size for _, size in tries])),
                    "error": _average([_distance(e, true) for e, _ in tries]) / scale,
                    "error_scaled": _average([_distance(factor * e, true) for e, _ in tries]) / scale,
                    "error_with_residual": _distance(self.estimates[one], true) / scale,
                    "lag": self.lag(one),
                }
            )
        self.looks.append(
            {
                "round": round_, "k": k, "true": describe(true), "node": describe(gradients[0]),
                "overlap": overlap(gradients, k), "overlap_by_chance": k / self.d,
                "error_of_dense_mean": _distance(mean, true) / scale, "schemes": schemes,
                "magnitudes": _curve(gradients[0]),
            }
        )  # fmt: skip

    def recommend(self) -> dict[str, Any]:
        """Return the least density at which the default rule, top-k, lags within the tolerance; else the largest.

        A rule that lags less learns no better for it (docs/regimes.md), so lag does not choose the rule.
        """
        top = sorted((one for one in self.candidates if one.r_over_k == 1), key=lambda one: one.density)
        best = next((one for one in top if self.lag(one) <= self.tolerance), top[-1])
        k = entries_sent(self.d, self.fitted[best])
        beside = [p for p in self.candidates if p.density == best.density]
        return {
            "k": k,
            "r": min(self.d, round(best.factor(self.fitted[best]) * k)),
            # no real difference
            "alike": [p.r_over_k for p in beside if self.lag(p) <= 1.05 * self.lag(best)],
            "density": best.density,
            "r_over_k": best.r_over_k,
            "scheme": best.name(self.d),
            "lag": self.lag(best),
            "within_tolerance": self.lag(best) <= self.tolerance,
            "tolerance": self.tolerance,
            "rounds": self.step + 1,
        }

    def verdict(self) -> dict[str, Any]:
        """Say which parts of the premise hold, averaged over the looks."""
        if not self.looks:
            raise ValueError("nothing was looked at; choose rounds within the run")
        paper = min(float(self.nodes), self.d / self.looks[0]["k"])
        error = {
            (row["r_over_k"], column): self._mean(row["r_over_k"], column)
            for row in self.looks[0]["schemes"]
            for column in ("error_scaled", "error", "error_with_residual", "lag")
        }
        everything = max(r for r, _ in error)
        s = _average([look["node"]["s_over_d"] for look in self.looks])
        shared = _average([look["overlap"] / look["overlap_by_chance"] for look in self.looks])
        parts = {
            "skewed": s < GAUSSIAN / 2,
            "nodes_agree": shared > 10,
            "beats_random_k_unbiased": error[paper, "error_scaled"] < error[everything, "error_scaled"],
            "beats_top_k_one_round": error[paper, "error"] < error[1.0, "error"],
            "beats_top_k_with_residual": error[paper, "error_with_residual"]
            < error[1.0, "error_with_residual"],
            "lags_less_than_top_k": error[paper, "lag"] < error[1.0, "lag"],
        }
        model = parts["skewed"] and parts["nodes_agree"]
        words = "holds" if all(parts.values()) else "holds in part" if model else "does not hold"
        return {"premise": words, "s_over_d": s, "overlap_over_chance": shared, "parts": parts}

    def _mean(self, r_over_k: float, column: str) -> float:
        return _average(
            [row[column] for look in self.looks for row in look["schemes"] if row["r_over_k"] == r_over_k]
        )


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().sum())


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _curve(vector: Tensor, points: int = 200) -> list[list[float]]:
    """Return magnitudes in root mean squares by rank, at ranks spread evenly on a log axis."""
    magnitude = vector.double().abs().sort(descending=True).values
    rms = float(magnitude.square().mean().sqrt())
    ranks = torch.logspace(0, math.log10(len(magnitude)), points).long().clamp_max(len(magnitude))
    return [[rank, float(magnitude[rank - 1]) / rms] for rank in sorted(set(ranks.tolist()))]


CHUNK = 500  # examples of a full-batch gradient at a time


def inspect(
    run: Run, inspector: Inspector, rounds: Collection[int], on_round: Callable[[], None] = lambda: None
) -> None:
    """Advance a run to the last of the chosen rounds, showing the inspector every round up to it."""
    if run.config.setting != "distributed":
        raise ValueError(f"inspect needs the distributed setting, got {run.config.setting}: there a node sends "
                         "a gradient, and there is a true one to hold it against")  # fmt: skip
    last = max(rounds, default=-1)
    if last < 0 or min(rounds) < run.round or last >= run.config.rounds:
        raise ValueError(
            f"rounds must be in [{run.round}, {run.config.rounds}), got {sorted(rounds)}; raise --rounds"
        )
    while run.round <= last:
        gradients = [node_gradient(run, node) for node in run.nodes]
        inspector.observe(gradients)
        if run.round in rounds:
            inspector.look(run.round, gradients, full_gradient(run))
        run.advance()
        on_round()


def replay(
    steps: Iterable[Sequence[Tensor]],
    inspector: Inspector,
    rounds: Collection[int],
    on_round: Callable[[], None] = lambda: None,
) -> None:
    """Show the inspector recorded steps; the nodes' mean stands for the true gradient, which nobody recorded."""
    for step, gradients in enumerate(steps):
        inspector.observe(gradients)
        if step in rounds:
            inspector.look(step, gradients, torch.stack(list(gradients)).mean(0))
        on_round()


def full_gradient(run: Run) -> Tensor:
    """Return the gradient of the mean loss of all nodes' examples at the common weights."""
    task = run.task
    if not isinstance(task, Classification):
        raise ValueError(f"inspect needs a task with classes, got {run.config.task}")
    total = torch.zeros(run.layout.size)
    examples = 0
    for node in run.nodes:
        buffers, shard = node.buffers, cast(Examples, node.shard)
        with run.at(node), seeded(run.config.seed, "full", node.number, run.round):
            for count, batch in task.chunks(shard, CHUNK):
                loss = task.loss(run.model, batch) * count
                gradients = torch.autograd.grad(loss, list(run.parameters.values()))
                total += run.layout.flatten(dict(zip(run.parameters, gradients, strict=True)))
                examples += count
        node.buffers = buffers
    return total / examples
