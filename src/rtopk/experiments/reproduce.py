"""Run a table of the paper: find each row's learning rate on validation data, then its figure on test data.

All records of a table and scale are lines of one file, `table-N-SCALE.jsonl`: the tuning runs, one `choice`
line a row, and the results. What is there already is not run again.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from rtopk.experiments.config import Config
from rtopk.experiments.processes import leads
from rtopk.experiments.records import Record, append, read
from rtopk.experiments.runner import Progress, run_all
from rtopk.experiments.tables import Row, Scale, Table

Stage = Callable[[str, Sequence[Config], Sequence[str]], Progress]  # what, runs, their names -> progress


def results_file(folder: Path, table: Table, scale: Scale) -> Path:
    """Return where the records of a table are."""
    return folder / f"{table.name}-{scale}.jsonl"


def run_table(
    table: Table,
    rows: Sequence[Row],
    scale: Scale,
    seeds: int,
    jobs: int,
    results: Path,
    work: Path,
    stage: Stage,
) -> dict[Row, list[Record]]:
    """Run what is missing of some rows of a table; return the result records of each."""
    file = results_file(results, table, scale)
    grids = {row: table.tuning(scale, row) for row in rows}
    configs = [config for grid in grids.values() for config in grid]
    notes = {config.key: _told(table, scale, row) for row, grid in grids.items() for config in grid}
    progress = stage("tuning", configs, [row.label for row, grid in grids.items() for _ in grid])
    tuned = run_all(configs, file, work, jobs, progress, notes=notes)
    done = {config.key: record for config, record in zip(configs, tuned, strict=True)}
    rates = {}
    for row, grid in grids.items():
        runs = [done[config.key] for config in grid]
        rates[row] = best_rate(runs)
        _note(file, table, scale, row, runs, rates[row])
    # One seed of every row before the next seed, so that a table that is stopped is whole, with fewer seeds.
    finals = {row: table.results(scale, row, rates[row], seeds) for row in rows}
    pairs = [(row, finals[row][seed]) for seed in range(seeds) for row in rows]
    configs = [config for _, config in pairs]
    progress = stage("results", configs, [row.label for row, _ in pairs])
    notes = {config.key: _told(table, scale, row) for row, config in pairs}
    records = run_all(configs, file, work, jobs, progress, notes=notes)
    return {
        row: [record for (other, _), record in zip(pairs, records, strict=True) if other == row]
        for row in rows
    }


def _told(table: Table, scale: Scale, row: Row) -> Record:
    """Return where a run belongs, and what the paper says of its row."""
    told = {"table": table.name, "title": table.title, "scale": scale, "row": row.label, "value": row.paper}
    return {"paper": told}


def best_rate(runs: Sequence[Record]) -> float:
    """Return the learning rate of the best of the runs; of equals, the smaller."""
    sign = 1.0 if runs[0]["higher_is_better"] else -1.0
    metric = runs[0]["metric"]
    best = max(runs, key=lambda run: (sign * run["final"][metric], -run["config"]["learning_rate"]))
    return float(best["config"]["learning_rate"])


def _note(file: Path, table: Table, scale: Scale, row: Row, runs: Sequence[Record], chosen: float) -> None:
    """Write a row's grid, scores and choice into the records, once."""
    name = f"choice {table.name} {scale} {row.label} {[run['key'] for run in runs]}"
    key = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    if not leads() or any(record["key"] == key for record in read(file)):
        return
    metric = runs[0]["metric"]
    append(
        file,
        {
            "kind": "choice",
            "key": key,
            "table": table.name,
            "scale": scale,
            "row": row.label,
            "metric": metric,
            "grid": [run["config"]["learning_rate"] for run in runs],
            "scores": [run["final"][metric] for run in runs],
            "chosen": chosen,
        },
    )
