"""Run a table of the paper: find each row's learning rate on validation data, then its figure on test data.

All records of a table and scale are lines of one file, `table-N-SCALE.jsonl`: the tuning runs, one `choice`
line a row, and the results. What is there already is not run again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from rtopk.studies.paper.tables import Row, Scale, Table
from rtopk.studies.paper.tuning import Tuning, note_choice, tuning
from rtopk.studies.train.config import Config
from rtopk.studies.train.processes import barrier, leads
from rtopk.studies.train.records import Record, read
from rtopk.studies.train.runner import Progress, key_of, run_all

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
    tuned = _tune(table, rows, scale, jobs, file, work, stage)
    # One seed of every row before the next seed, so that a table that is stopped is whole, with fewer seeds.
    finals = {row: table.results(scale, row, tuned[row].rate, seeds) for row in rows}
    pairs = [(row, finals[row][seed]) for seed in range(seeds) for row in rows]
    configs = [config for _, config in pairs]
    progress = stage("results", configs, [row.label for row, _ in pairs])
    notes = {config.key: _told(table, scale, row) for row, config in pairs}
    records = run_all(configs, file, work, jobs, progress, notes=notes)
    return {
        row: [record for (other, _), record in zip(pairs, records, strict=True) if other == row]
        for row in rows
    }


def _tune(
    table: Table, rows: Sequence[Row], scale: Scale, jobs: int, file: Path, work: Path, stage: Stage
) -> dict[Row, Tuning]:
    """Find the learning rate of each row: the grid, then what lies beyond its edges where that is better."""
    records = {key_of(record): record for record in read(file)}
    what = "tuning"
    while True:
        tuned = {row: tuning(table, scale, row, records) for row in rows}
        pairs = [(row, config) for row in rows for config in tuned[row].missing]
        if not pairs:
            break
        configs = [config for _, config in pairs]
        notes = {config.key: _told(table, scale, row) for row, config in pairs}
        progress = stage(what, configs, [row.label for row, _ in pairs])
        done = run_all(configs, file, work, jobs, progress, notes=notes)
        records |= {config.key: record for config, record in zip(configs, done, strict=True)}
        what = "tuning beyond the grid"
    for row in rows if leads() else ():
        of = {"table": table.name, "scale": scale, "row": row.label}
        note_choice(file, of, list(tuned[row].tried.values()), tuned[row].rate)
    barrier()  # nobody reads the results while a line is written
    return tuned


def _told(table: Table, scale: Scale, row: Row) -> Record:
    """Return where a run belongs, and what the paper says of its row."""
    told = {"table": table.name, "title": table.title, "scale": scale, "row": row.label, "value": row.paper}
    return {"paper": told}
