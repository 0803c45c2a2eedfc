"""95 % intervals over seeds, and what a page may say of the difference between two methods.

Runs with the same seed share initial weights, data split and order, so methods are compared seed by seed: the t
test and the interval of the paired differences. Welch's interval, which ignores the pairing, is shown beside it.
`judge` corrects for all comparisons of a page (Holm). Half widths are infinite where there is no interval.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

ERROR = 0.05  # of a page: the chance that any of its verdicts of one kind is wrong
# How far apart two methods may be and still count as level: a little less than the smallest leads that the paper
# reports as a win. These are 0.79 points of accuracy (Table I, rTop-k over top-k at 99 %) and 2.5 % of perplexity
# (Table IV, rTop-k over the baseline).
POINTS, SHARE = 0.75, 0.02


def half_width(scores: Sequence[float]) -> float:
    """Return half the interval of the mean (Student's t)."""
    n = len(scores)
    return t_quantile(n - 1) * math.sqrt(variance(scores) / n) if n > 1 else math.inf


def welch(one: Sequence[float], other: Sequence[float]) -> float:
    """Return half the interval of the difference of two means (Welch: the spreads need not be equal)."""
    if min(len(one), len(other)) < 2:
        return math.inf
    a, b = variance(one) / len(one), variance(other) / len(other)
    if a + b == 0.0:
        return 0.0
    freedom = (a + b) ** 2 / (a**2 / (len(one) - 1) + b**2 / (len(other) - 1))
    return t_quantile(freedom) * math.sqrt(a + b)


def t_quantile(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def margin(metric: str, score: float) -> float:
    """Return how far from a score still counts as level; nothing does for a metric that we do not know."""
    return {"accuracy": POINTS, "perplexity": SHARE * score}.get(metric, 0.0)


@dataclass(frozen=True)
class Lead:
    """How far one method is ahead of another, in units of the metric; negative where it is behind."""

    mean: float  # over the seeds that both ran
    half: float  # of the paired interval; infinite for one seed
    welch: float  # half of Welch's interval
    p_equal: float  # of the paired t test against equal means
    p_apart: float  # of two one-sided paired t tests against a difference of the margin or more


def lead(
    one: Mapping[int, float], other: Mapping[int, float], metric: str, higher_is_better: bool = True
) -> Lead:
    """Compare two methods by their scores, each by seed."""
    from scipy.special import stdtr

    sign = 1.0 if higher_is_better else -1.0
    seeds = sorted(one.keys() & other.keys())
    differences = [sign * (one[seed] - other[seed]) for seed in seeds]
    across = welch(list(one.values()), list(other.values()))
    if not seeds:
        return Lead(sign * (fmean(one.values()) - fmean(other.values())), math.inf, across, 1.0, 1.0)
    gap, freedom = fmean(differences), len(seeds) - 1
    error = math.sqrt(variance(differences) / len(seeds)) if freedom and math.isfinite(gap) else 0.0
    # Equal differences are a coincidence of coarse scores (one image of 449), not certainty.
    if not error > 1e-9 * max(abs(score) for score in (*one.values(), *other.values())):
        return Lead(gap, math.inf, across, 1.0, 1.0)
    beyond = abs(gap) - margin(metric, fmean(other[seed] for seed in seeds))
    p_equal, p_apart = 2 * stdtr(freedom, -abs(gap) / error), stdtr(freedom, beyond / error)
    return Lead(gap, t_quantile(freedom) * error, across, float(p_equal), float(p_apart))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number, by Holm's step-down procedure.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, least = [1.0] * len(p_values), 0.0
    for rank, at in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[at]))
        corrected[at] = least
    return corrected


@dataclass(frozen=True)
class Verdict:
    """What the seeds decide about one lead."""

    word: str  # ahead, behind, level or undecided
    p: float  # against equal means, corrected


def judge(leads: Sequence[Lead]) -> list[Verdict]:
    """Decide all leads of a page together; a lead inside the margin that is not chance is still a lead."""
    equal, apart = (holm([getattr(one, p) for one in leads]) for p in ("p_equal", "p_apart"))
    return [
        Verdict(
            ("ahead" if one.mean > 0 else "behind") if p <= ERROR else "level" if q <= ERROR else "undecided",
            p,
        )
        for one, p, q in zip(leads, equal, apart, strict=True)
    ]


def rules(leads: Sequence[Lead]) -> str:
    """Say how the verdicts of a page are made, and from how many tests."""
    from scipy.special import stdtrit

    if not leads:
        return "No two rows have run that could be compared."
    n = len(leads)
    sure = f"at {100 * ERROR:g} %, after Holm's correction over {n} test{'s' * (n > 1)}"
    words = [verdict.word for verdict in judge(leads)]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("ahead", "behind", "level", "undecided"))
    clear = sum(abs(one.mean) > one.half for one in leads)
    wide = [f"{float(stdtrit(seeds - 1, 1 - ERROR / n / 2)):.1f} with {seeds}" for seeds in (3, 5, 10)]
    return "\n".join(
        (
            f"How these {n} comparisons are judged:" if n > 1 else "How this comparison is judged:",
            "",
            "- ± is the 95 % interval of the differences seed by seed; Welch's, which ignores the pairing, stands",
            "  beside it. Neither is corrected for the number of comparisons, nor for the choice of the rates.",
            f"- *ahead*, *behind*: the paired t test rejects equal means {sure}.",
            f"- *level*: two one-sided paired t tests reject, {sure}, a difference",
            f"  of {POINTS:g} points of accuracy, or {100 * SHARE:g} % of the perplexity, or more.",
            "- *undecided*: neither. The first lead to be decided must be this many standard errors wide:",
            f"  {', '.join(wide)} seeds.",
            f"- In all: {counts}. The paired interval, taken by itself, leaves out zero in {clear}.",
        )
    )


def plus_minus(half: float, digits: int = 2) -> str:
    """Write half a width after its mean; nothing where it is infinite.

    >>> f"90.1{plus_minus(0.254)}", f"90.1{plus_minus(math.inf)}"
    ('90.1 ± 0.25', '90.1')
    """
    return "" if half == math.inf else f" ± {half:.{digits}f}"


def p_value(p: float) -> str:
    """Write a p value.

    >>> p_value(0.0712), p_value(0.00002), p_value(1.0)
    ('0.071', '< 0.001', '1')
    """
    return "< 0.001" if p < 0.001 else "1" if p > 0.9995 else f"{p:.3f}"
