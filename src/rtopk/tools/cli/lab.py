"""`rtopk lab`: the paper's theorems, measured; and what they say about the gradients of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rtopk.studies.config import Config, methods
from rtopk.tools.cli import wrong_use

if TYPE_CHECKING:
    from rich.table import Table

    from rtopk.studies.lab.gradients import Inspector

app = typer.Typer(help="See each theorem of the paper happen.", no_args_is_help=True, add_completion=False)
_DEFAULT = Config()

Out = typer.Option(Path("runs/lab"), file_okay=False, help="Folder of the pictures.")
Json = typer.Option(False, "--json", help="Print one JSON object instead of tables.")
Seed = typer.Option(0, help="The same seed repeats every number.")


@app.command()
def risk(
    d: int = typer.Option(4096, min=2, help="Entries of the vector."),
    s: float = typer.Option(64.0, help="Bound on the sum of theta."),
    n: int = typer.Option(1000, min=4, help="Nodes."),
    k: int = typer.Option(150, min=2, help="Bits a node may send."),
    family: str = typer.Option("flat", help="Family of theta: flat, power, few or cube."),
    signed: bool = typer.Option(False, help="Give the ones signs."),
    repeats: int = typer.Option(12, min=2, help="Monte Carlo experiments a point."),
    seed: int = Seed,
    out: Path = Out,
    as_json: bool = Json,
) -> None:
    """Measure the risk of every scheme, and bits used.

    Against k, n, s and d; then the paper's draw and top-k where the ones of some
    coordinates are larger than those of others.
    The last table has the slopes where Theorem 1 predicts -1, -1 and 2.
    """
    from rtopk.studies.lab import pictures
    from rtopk.studies.lab.experiments import steps_of_risk, study_risk
    from rtopk.studies.lab.risk import Setting
    from rtopk.tools.show.terminal import console, counted, table

    with wrong_use():
        base = Setting(d, s, n, k, family, signed)
        base.theta()  # refuses what does not fit
    with counted("risk", steps_of_risk(base)) as step:
        study = study_risk(base, repeats, seed, step)
    paths = [*pictures.risk_sweeps(study, out), *pictures.amplitudes(study, out), *pictures.bits(study, out)]
    if _printed(as_json, study.to_dict(), paths):
        return
    for sweep in study.sweeps:
        fixed = ", ".join(f"{a} = {getattr(base, a):g}" for a in "dsnk" if a != sweep.axis)
        rows = [
            [
                f"{getattr(risks[0].setting, sweep.axis):g}", *(f"{found.mean:.4g}" for found in risks),
                f"{lower:.4g}" if lower else "-", f"{upper:.4g}",
            ]
            for *risks, lower, upper in zip(*sweep.risks.values(), sweep.lower, sweep.upper, strict=True)
        ]  # fmt: skip
        heads = [sweep.axis, *sweep.risks, "Thm 2", "Thm 1"]
        laid = table(f"Risk against {sweep.axis} ({fixed})", heads, rows, left=0)
        laid.add_section()
        laid.add_row("slope", *(f"{slope.value:+.3f}" for slope in sweep.slopes.values()), "", "")
        console.print(laid)
    rows = [
        [
            row.setting.family, f"1 to {1 + row.setting.spread:g}", str(row.setting.n), f"{row.reach:.2g}",
            f"{row.paper.mean:.3f}", f"{row.top.mean:.3f}", row.better,
        ]
        for row in study.amplitudes
    ]  # fmt: skip
    title = f"Missed by direction, best length (d = {base.d}, s = {base.s:g}, k = {base.k})"
    heads = ["theta", "amplitudes", "n", "n k / d log(d/s)", "paper", "top", "less"]
    if rows:
        console.print(table(title, heads, rows, left=1))
    rows = [
        [str(needs[0][0]), *("none" if need is None else str(need) for _, need in needs)]
        for needs in zip(*study.needed.values(), strict=True)
    ]
    title = "Bits a node for 3 x centralised risk (s = 16, n = 4000)"
    console.print(table(title, ["d", *study.needed], rows, left=0))
    rows = [[axis, str(study.regime[axis]), want] for axis, want in (("k", "-1"), ("n", "-1"), ("s", "+2"))]
    heads = ["axis", "slope, 95 % interval", "theorem"]
    console.print(table("Slopes in the regime (d = 2^60, k' far below s)", heads, rows, left=0))
    worst = max(row["used"] - row["k"] for row in study.bits)
    console.print(f"Bits used: at most k at {len(study.bits)} values of k; the closest is k {worst:+d}.")
    _tell(paths)


@app.command()
def bounds(
    repeats: int = typer.Option(16, min=2, help="Least Monte Carlo experiments a setting."),
    seed: int = Seed,
    out: Path = Out,
    as_json: bool = Json,
) -> None:
    """Hold measured risk between Theorem 2 and Theorem 1.

    On a grid; prints the constants c and C that it needs.
    """
    from rtopk.studies.lab import LOWER, UPPER, pictures
    from rtopk.studies.lab.experiments import study_bounds
    from rtopk.studies.lab.risk import grid
    from rtopk.tools.show.terminal import console, counted, table

    with counted("bounds", len(grid())) as step:
        study = study_bounds(repeats, seed, step)
    paths = pictures.bounds(study, out)
    if _printed(as_json, study.to_dict(), paths):
        return
    cells = []
    for d in sorted({row.setting.d for row in study.rows}):
        rows = [row for row in study.rows if row.setting.d == d]
        least, largest = min(row.over_lower for row in rows), max(row.over_upper for row in rows)
        cells.append([str(d), str(len(rows)), f"{least:.3f}", f"{largest:.3f}"])
    heads = ["d", "settings", "least / Thm 2", "largest / Thm 1"]
    console.print(table("Measured risk over each bound, by d", heads, cells, left=0))
    console.print(
        f"{len(study.rows)} settings need c = {study.c:.3f} and C = {study.C:.3f}; the fixed pair "
        f"({LOWER:g}, {UPPER:g}) {'encloses them all' if study.inside else 'DOES NOT enclose them all'}."
    )
    _tell(paths)


@app.command()
def convergence(
    d: int = typer.Option(100, min=2, help="Dimensions of the problem."),
    nodes: int = typer.Option(4, min=1, help="Nodes."),
    sigma: float = typer.Option(1.0, min=0.0, help="Size of the gradient noise."),
    density: list[float] = typer.Option([0.05, 0.2, 1.0], help="k / d; repeat for several."),
    horizon: list[int] = typer.Option([150, 400, 1000], help="T; repeat for at least three."),
    seeds: int = typer.Option(1, min=1, help="Runs of each kind."),
    out: Path = Out,
    as_json: bool = Json,
) -> None:
    """See Algorithm 1 converge as Theorem 3 says.

    On a non-convex problem with known L and G.
    """
    from rtopk.studies.lab import pictures
    from rtopk.studies.lab.convergence import Problem, steps_of_convergence, study_convergence
    from rtopk.tools.show.terminal import console, counted, table

    with wrong_use():
        problem = Problem(d, nodes, sigma)
    with counted("convergence", steps_of_convergence(density, horizon, seeds)) as step:
        study = study_convergence(problem, density, horizon, seeds, step)
    paths = pictures.convergence(study, out)
    if _printed(as_json, study.to_dict(), paths):
        return
    title = f"Mean ||grad f||^2 (L = {problem.L:g}, G = {problem.G:.3f}, gap = {problem.gap():.2f})"
    heads = ["k", "T", "measured", "Thm 3", "1/sqrt(T) term", "1/T term"]
    rows = [
        [str(o.k), str(o.T), *(f"{value:.4g}" for value in (o.measured, sum(o.bound), *o.bound))]
        for o in study.outcomes
    ]
    console.print(table(title, heads, rows, left=0))
    for k, slope in sorted(study.slopes.items()):
        console.print(f"k = {k}: slope in T {slope} (first term of the theorem: -0.5)")
    rows = [
        [str(k), *(f"{value:.4g}" for _, value in excess), f"{term:.4g}"]
        for (k, term), *excess in zip(study.second_terms, *study.excess.values(), strict=True)
    ]
    title = f"measured(k) - measured(d) at T = {study.excess_horizon}"
    console.print(table(title, ["k", *study.excess, "1/T term"], rows, left=0))
    for name, slope in study.excess_slopes.items():
        console.print(f"{name}: slope of that in k {slope} (second term of the theorem: about -2)")
    console.print(f"Theorem 3 {'was never crossed' if study.never_crossed else 'WAS CROSSED'}.")
    _tell(paths)


@app.command()
def inspect(
    context: typer.Context,
    gradients: Path | None = typer.Option(
        None, file_okay=False, help="Gradients of your own job: a folder that rtopk.ddp.record has filled."
    ),
    task: str = typer.Option(_DEFAULT.task, help="A task of `rtopk train`."),
    method: str = typer.Option("dense", help=f"How the run itself trains: {', '.join(methods())}."),
    at: list[int] = typer.Option(
        [], help="Rounds to look at; repeat for several. 0, 20 and 60; of gradients first, middle and last."
    ),
    nodes: int = typer.Option(_DEFAULT.nodes, help="Number of nodes."),
    batch: int = typer.Option(_DEFAULT.batch, help="Examples per node and step."),
    density: float = typer.Option(0.01, help="k / d of the comparison."),
    choose: list[float] = typer.Option([0.001, 0.003, 0.01, 0.03, 0.1], help="Densities to choose from."),
    tolerance: float = typer.Option(0.1, help="Part of what was due that may lag."),
    seed: int = Seed,
    out: Path = Out,
    as_json: bool = Json,
) -> None:
    """Test the paper's premise on a model's gradients.

    Runs the task and, beside it, every scheme on the same gradients; or tries
    the schemes on gradients of your own job. Ends with a verdict and a
    recommendation for k and r.
    """
    import torch

    from rtopk.studies.lab import pictures
    from rtopk.tools.show.terminal import console, table

    torch.set_num_threads(1)
    with wrong_use():
        if gradients is None:
            config = Config(task=task, method=method, nodes=nodes, batch=batch, density=density, seed=seed,
                            rounds=max([_DEFAULT.rounds, *(1 + round_ for round_ in at)]))  # fmt: skip
            inspector, source = _look_into_a_run(config, at or [0, 20, 60], choose, tolerance), task
        else:
            if given := [name for name in ("task", "method", "nodes", "batch") if _given(context, name)]:
                raise ValueError(
                    f"--gradients are recorded already, so --{given[0]} has no meaning; leave it out"
                )
            inspector, source = _look_into_a_recording(gradients, at, density, choose, tolerance, seed)
    paths = pictures.gradients(inspector.looks, out)
    verdict, advice = inspector.verdict(), inspector.recommend()
    arrived = {
        "with a memory" if one.memory else "without": {c.label: value for c, value in one.cosines().items()}
        for one in inspector.arrivals
    }
    report = {
        "task": source, "looks": inspector.looks, "verdict": verdict, "recommendation": advice, "arrived": arrived,
    }  # fmt: skip
    if _printed(as_json, report, paths):
        return
    if gradients is not None:
        console.print(source)
    for look in inspector.looks:
        console.print(_look_table(look))
    console.print(
        f"Premise {verdict['premise']}: s / d = {verdict['s_over_d']:.3f} (Gaussian: 0.637); the nodes' k "
        f"largest overlap {verdict['overlap_over_chance']:.1f} x more than by chance."
    )
    for name, true in verdict["parts"].items():
        console.print(f"  {'yes' if true else 'no ':3} {name.replace('_', ' ')}")
    console.print(
        f"Recommended: k = {advice['k']} (density {advice['density']:g}); after {advice['rounds']} rounds "
        f"{100 * advice['lag']:.1f} % of what was due lags (tolerance {100 * tolerance:g} %"
        f"{'' if advice['within_tolerance'] else ', NOT kept: choose a larger density'})."
    )
    if len(advice["alike"]) > 1:
        alike = ", ".join(f"{r:.4g}" for r in advice["alike"])
        console.print(f"r / k = {alike} lag alike (within 5 %).")
    title = f"Cosine of what arrived with what was due, after {advice['rounds']} rounds at {density:g}"
    rows = [
        [label, *(f"{cosines[label]:.3f}" for cosines in arrived.values())] for label in arrived["without"]
    ]
    console.print(table(title, ["choice", *arrived], rows))
    console.print(
        f"Paste: rtopk.ddp.register(model, density={advice['density']:g}). Its rule and mean won in the map of "
        "regimes (docs/regimes.md); how much arrives did not decide there which rule learns best."
    )
    _tell(paths)


@app.command()
def predict(
    study: str = typer.Option("map-cifar10", help="The map to predict: map-digits or map-cifar10."),
    known: str = typer.Option(
        "map-digits", "--from", help="A map that has run, to learn from; none: watch only."
    ),
    rounds: int = typer.Option(10, min=1, help="Rounds of a dense run that are watched."),
    results: Path = typer.Option(Path("results"), help="Folder of the records and predictions."),
    data_dir: Path | None = typer.Option(None, help="Folder of the data sets; default $RTOPK_DATA."),
) -> None:
    """Predict a map of regimes from a few steps of its jobs.

    Writes prediction-STUDY.json into the results. Commit it before the map's
    runs: docs/regimes.md compares both.
    """
    import json

    import torch

    from rtopk.studies.lab import arrival
    from rtopk.studies.paper.regimes import DESIGNS
    from rtopk.studies.paper.regimes_page import maps
    from rtopk.tools.cli import set_environment
    from rtopk.tools.show.terminal import console, counted

    with wrong_use():
        if study not in DESIGNS:
            raise ValueError(f"study must be one of {', '.join(DESIGNS)}, got {study!r}")
        found_maps = {one.name: one for one in maps("small", results)}
        if known != "none" and found_maps[study].found:
            raise ValueError(
                f"{study} has runs in {results} already, so this would be no prediction; name other --results"
            )
        whole = {name: one for name, one in found_maps.items() if one.whole and one.predicted}
        if known != "none" and known not in whole:
            raise ValueError(
                f"--from must be a map that has run and was watched ({', '.join(whole) or 'there is none yet'}), "
                f"or none, got {known!r}"
            )
    torch.set_num_threads(1)
    set_environment(data_dir)
    with counted("rounds", 4 * rounds) as step:
        found = arrival.watch(DESIGNS[study], rounds, step)
    if known != "none":
        found = arrival.predict(found, DESIGNS[study], whole[known])
    file = results / f"prediction-{study}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"study": study, "from": known, "cells": found}, indent=1) + "\n")
    console.print(f"Prediction: {file}")


def _look_into_a_run(
    config: Config, at: Sequence[int], choose: Sequence[float], tolerance: float
) -> "Inspector":
    from rtopk.studies.lab.gradients import Inspector, inspect
    from rtopk.studies.tasks import check_task
    from rtopk.studies.train.loop import Run
    from rtopk.tools.show.terminal import counted

    check_task(config.task)
    run = Run(config)
    inspector = Inspector(config.nodes, run.layout.size, config.density, choose, config.seed, tolerance)
    with counted("rounds", max(at) + 1) as step:
        inspect(run, inspector, at, step)
    return inspector


def _look_into_a_recording(
    folder: Path, at: Sequence[int], density: float, choose: Sequence[float], tolerance: float, seed: int
) -> tuple["Inspector", str]:
    """Show an inspector what a job recorded; return it, and what the recording holds."""
    from rtopk.replicas.recording import Recording
    from rtopk.studies.lab.gradients import Inspector, replay
    from rtopk.tools.show.terminal import counted

    found = Recording.read(folder)
    last = found.steps - 1
    if at and not 0 <= min(at) <= max(at) <= last:
        raise ValueError(f"--at must be in [0, {last}], the steps that {folder} holds, got {sorted(at)}")
    inspector = Inspector(found.nodes, found.entries, density, choose, seed, tolerance)
    with counted("steps", found.steps) as step:
        replay(found, inspector, at or (0, last // 2, last), step)
    sample = "" if found.entries == found.size else f", a sample of {found.size:,}"
    bad = last - inspector.step
    left_out = f"; {bad} more had a gradient that is not finite" if bad else ""
    held = f"{inspector.step + 1} steps of {found.nodes} ranks, {found.entries:,} entries{sample}{left_out}"
    return inspector, f"{folder}: {held}"


def _given(context: typer.Context, name: str) -> bool:
    """Say whether an option was written on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _look_table(look: dict[str, Any]) -> "Table":
    from rtopk.tools.show.terminal import table

    node = look["node"]
    against = (
        f"||true||^2 (dense mean of the nodes: {look['error_of_dense_mean']:.3g})"
        if look["error_of_dense_mean"]
        else "||mean||^2, against the mean of the ranks"  # recorded gradients: nobody knows the true one
    )
    title = (
        f"Round {look['round']}: d = {node['d']}, k = {look['k']}, s = {node['s']:.0f}, tail index "
        f"{node['tail_index']:.2f}, {100 * node['energy_in_largest']['0.01']:.0f} % of energy in 1 %\n"
        f"Squared error / {against}"
    )
    heads = ["scheme", "r / k", "k", "bytes", "plain", "x r / k", "with residual", "lag"]
    rows = []
    for row in look["schemes"]:
        errors = [f"{row[c]:.3g}" for c in ("error", "error_scaled", "error_with_residual", "lag")]
        rows.append([row["scheme"], f"{row['r_over_k']:.4g}", str(row["k"]), f"{row['bytes']:,}", *errors])
    return table(title, heads, rows, left=0)


def _printed(as_json: bool, report: dict[str, Any], paths: Sequence[Path]) -> bool:
    from rtopk.tools.show.terminal import print_json

    if as_json:
        print_json({**report, "pictures": [str(path) for path in paths]})
    return as_json


def _tell(paths: Sequence[Path]) -> None:
    from rtopk.tools.show.terminal import console

    console.print("Pictures: " + ", ".join(str(path) for path in paths))
