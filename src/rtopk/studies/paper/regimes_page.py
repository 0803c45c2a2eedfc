"""The map of regimes as a page: what won in each job, what moves the lead of rTop-k, and what was predicted."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from statistics import correlation, fmean
from typing import Any

from rtopk.aggregate import Mean
from rtopk.studies.paper import Scale
from rtopk.studies.paper.regimes import DESIGNS, DRAWS, MAPS, MEANS, RULES, Design
from rtopk.studies.paper.results import RowResult, row_results
from rtopk.tools.show.intervals import Lead, Verdict, judge, lead, p_value, plus_minus, rules
from rtopk.tools.show.terminal import markdown

Job = tuple[int, ...]  # its levels
Cell = tuple[Job, str, Mean]
Seeds = Mapping[int, float]


def cells(design: Design, results: Sequence[RowResult]) -> dict[Cell, RowResult]:
    """Return the results by job, rule and mean."""
    by_row = {result.row: result for result in results}
    every: list[Cell] = list(product(design.jobs, RULES, MEANS))
    return {cell: by_row[row] for cell in every if (row := design.row(*cell)) in by_row}


def effects(design: Design, found: Mapping[Cell, RowResult], rule: str) -> dict[str, Lead]:
    """Return what moves a rule's lead over top-k: the mean over all cells, each factor, and pairs of factors.

    A factor's effect is the lead at its upper level minus that at its lower one; a pair's is the lead where both
    levels are alike minus that where they differ. Seed by seed, so that the seeds are the blocks of the design.
    """
    leads: dict[Job, Seeds] = {}
    for at, (place, mean) in product(design.jobs, enumerate(MEANS)):
        one, top = found[at, rule, mean].by_seed, found[at, "top-k", mean].by_seed
        leads[(*at, place)] = {seed: one[seed] - top[seed] for seed in one.keys() & top.keys()}
    names = [*design.factors, "mean"]

    def part(chosen: Callable[[Job], bool]) -> Seeds:
        inside = [seeds for at, seeds in leads.items() if chosen(at)]
        shared = sorted(set.intersection(*map(set, inside)))
        return {seed: fmean(one[seed] for one in inside) for seed in shared}

    whole = part(lambda at: True)
    told = {"mean over all cells": lead(whole, dict.fromkeys(whole, 0.0), "accuracy")}
    for i, name in enumerate(names):
        high, low = (part(lambda at, i=i, level=level: at[i] == level) for level in (1, 0))  # type: ignore[misc]
        told[name] = lead(high, low, "accuracy")
    for i, j in combinations(range(len(names)), 2):
        alike, unlike = (part(lambda at, i=i, j=j, s=s: (at[i] == at[j]) is s) for s in (True, False))  # type: ignore[misc]
        told[f"{names[i]} x {names[j]}"] = lead(alike, unlike, "accuracy")
    return told


@dataclass(frozen=True)
class Map:
    """What is known of one task's map."""

    name: str
    design: Design
    found: Mapping[Cell, RowResult]
    predicted: Sequence[Mapping[str, Any]]  # of `rtopk lab predict`; empty if there is none

    @property
    def whole(self) -> bool:
        """Say whether every cell has results."""
        return len(self.found) == len(MAPS[self.name].rows)

    def best(self, at: Job, rule: str) -> RowResult:
        """Return a rule's result in a job, with the mean that is better on validation data."""
        return max((self.found[at, rule, mean] for mean in MEANS), key=lambda result: result.validation)

    def leads(self) -> dict[tuple[Job, str], Lead]:
        """Return the leads over top-k in every job, each with its better mean; and of one mean over the other."""
        told = {
            (at, rule): self.best(at, rule).lead(self.best(at, "top-k"))
            for at in self.design.jobs
            for rule in DRAWS
        }
        means = {
            (at, "mean"): self.found[at, "top-k", "received"].lead(self.found[at, "top-k", "nodes"])
            for at in self.design.jobs
        }
        return {**told, **means}

    def effects(self) -> dict[tuple[str, str], Lead]:
        """Return what moves each rule's lead."""
        return {
            (rule, name): effect
            for rule in DRAWS
            for name, effect in effects(self.design, self.found, rule).items()
        }

    def foretold(self, at: Job) -> Mapping[str, Any]:
        """Return what `rtopk lab predict` says of a job, whatever the length of its run."""
        kind = dict(zip(self.design.factors, at, strict=True))
        return next(
            cell
            for cell in self.predicted
            if all(cell[name] == kind[name] for name in ("memory", "overlap", "nodes"))
        )


def more_arrives(cosines: Mapping[str, Mapping[Mean, float]]) -> dict[str, float]:
    """Return how much larger each rule's cosine is than top-k's, each with its better mean."""
    top = max(cosines["top-k"].values())
    return {rule: max(found.values()) - top for rule, found in cosines.items() if rule != "top-k"}


def maps(scale: Scale, results: Path) -> list[Map]:
    """Return the maps that have results."""
    found = []
    for name, design in DESIGNS.items():
        here = cells(design, row_results(MAPS[name], scale, results))
        file = results / f"prediction-{name}.json"
        predicted = json.loads(file.read_text())["cells"] if file.exists() else []
        found.append(Map(name, design, here, predicted))
    return found


def render(scale: Scale, results: Path) -> str:
    """Return the page's tables; all its comparisons are judged together."""
    found = maps(scale, results)
    whole = [one for one in found if one.whole]
    leads = [lead for one in whole for lead in (*one.leads().values(), *one.effects().values())]
    verdicts = iter(judge(leads))
    parts = [rules(leads)]
    for one in found:
        parts.append(f"### {MAPS[one.name].heading(scale)}")
        if not one.whole:
            parts.append(f"{len(one.found)} of {len(MAPS[one.name].rows)} rows have run.")
            continue
        judged = {key: next(verdicts) for key in one.leads()}
        moved = {key: next(verdicts) for key in one.effects()}
        parts += ["\n".join(_jobs(one, judged)), "\n".join(_effects(one, moved))]
        if one.predicted and "leads" in one.predicted[0]:
            parts.append("\n".join(_prediction(one, judged)))
    return "\n\n".join(parts) + "\n"


def _named(one: Map, at: Job) -> str:
    levels = [pair[level][0] for pair, level in zip(one.design.factors.values(), at, strict=True)]
    return ", ".join(levels)


def _jobs(one: Map, judged: Mapping[tuple[Job, str], Verdict]) -> list[str]:
    leads = one.leads()
    rows: list[list[str | None]] = []
    for at in one.design.jobs:
        scores = [one.found[at, rule, mean].mean for rule, mean in product(RULES, MEANS)]
        told = [f"**{score:.1f}**" if score == max(scores) else f"{score:.1f}" for score in scores]
        told += [
            f"{leads[at, what].mean:+.1f}{plus_minus(leads[at, what].half, 1)}, {judged[at, what].word}"
            for what in ("r = 2 k", "r = n k", "mean")
        ]
        rows.append([_named(one, at), *told])
    choices = [f"{rule}, {mean}" for rule, mean in product(RULES, MEANS)]
    return markdown(
        ["job", *choices, "r = 2 k against top-k", "r = n k against top-k", "top-k: received against nodes"],
        rows,
    )


def _effects(one: Map, judged: Mapping[tuple[str, str], Verdict]) -> list[str]:
    moved = one.effects()
    rows: list[list[str | None]] = []
    for name in dict.fromkeys(name for _, name in moved):
        told = []
        for rule in DRAWS:
            effect = moved[rule, name]
            told += [f"{effect.mean:+.2f}{plus_minus(effect.half)}", p_value(judged[rule, name].p)]
        rows.append([name, *told])
    heads = [head for rule in DRAWS for head in (f"lead of {rule}", "p, corrected")]
    return ["What moves the lead over top-k, in points:", "", *markdown(["effect", *heads], rows)]


def _prediction(one: Map, judged: Mapping[tuple[Job, str], Verdict]) -> list[str]:
    leads, rows = one.leads(), list[list[str | None]]()
    pairs: list[tuple[float, float, bool]] = []  # predicted, measured, decided
    for at in one.design.jobs:
        said = one.foretold(at)
        row = [_named(one, at)]
        for rule in DRAWS:
            predicted, measured = said["leads"][rule][at[3]], leads[at, rule].mean
            pairs.append((predicted, measured, judged[at, rule].word in ("ahead", "behind")))
            row += [f"{predicted:+.1f}", f"{measured:+.1f}, {judged[at, rule].word}"]
        rows.append([*row])
    right = [(predicted > 0) == (measured > 0) for predicted, measured, _ in pairs]
    sure = [held for held, (_, _, decided) in zip(right, pairs, strict=True) if decided]
    alike = correlation(*zip(*((predicted, measured) for predicted, measured, _ in pairs), strict=True))
    heads = ["job", *(f"{rule}: {what}" for rule in DRAWS for what in ("predicted", "measured"))]
    told = (
        f"`rtopk lab predict` gave these leads over top-k from {said['rounds']} rounds of each job, before it ran. "
        f"The sign was right in {sum(sure)} of {len(sure)} decided leads and in {sum(right)} of all {len(right)}; "
        f"the correlation of predicted and measured leads is {alike:.2f}."
    )
    return [told, "", *markdown(heads, rows)]
