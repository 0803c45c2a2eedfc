"""`rtopk demo`."""

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import typer


def demo(
    seeds: int = typer.Option(3, min=1, help="Runs of each method, with different seeds."),
    rounds: int = typer.Option(900, min=60, help="Rounds, distributed; federated half."),
    jobs: int = typer.Option(2, min=1, help="Runs side by side, one core each."),
    out: Path = typer.Option(Path("runs/demo"), help="Where records and the picture go."),
    fresh: bool = typer.Option(False, help="Run again what is recorded there already."),
    tensorboard: bool = typer.Option(False, help="Write TensorBoard event files of every run too."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
) -> None:
    """Compare four methods on scikit-learn's digits with five nodes.

    Dense, top-k, random-k and rTop-k, in the distributed setting (one round per
    batch) and the federated one (one round per local epoch), and what each
    sent; then a page to look at. About two minutes on two cores.
    """
    from rtopk.studies.train import demo as experiment
    from rtopk.studies.train.picture import score_against_bytes
    from rtopk.studies.train.records import write_atomically
    from rtopk.studies.train.runner import run_all
    from rtopk.studies.train.summary import summarise
    from rtopk.studies.train.tensorboard import VARIABLE
    from rtopk.tools.report.inputs import Inputs
    from rtopk.tools.report.page import Page
    from rtopk.tools.show.terminal import console, print_json, results_table, runs_progress

    if tensorboard:
        os.environ[VARIABLE] = "1"  # the workers inherit it
    results = out / "results.jsonl"
    if fresh:
        results.unlink(missing_ok=True)
        shutil.rmtree(out / "runs", ignore_errors=True)
    configs = experiment.configs(seeds, rounds)
    names = [f"{c.setting:11} {c.method:8} {'' if c.method == 'dense' else c.density}" for c in configs]
    with runs_progress(configs, names) as on_progress:
        records = run_all(configs, results, out / "runs", jobs, on_progress)
    rows = summarise(records)
    picture = out / "accuracy-against-bytes.png"
    score_against_bytes(records, picture)
    page = out / "report.html"
    write_atomically(page, Page(Inputs(records)).html().encode())
    if as_json:
        print_json(
            {
                "rows": [asdict(row) for row in rows],
                "results": str(results),
                "picture": str(picture),
                "page": str(page),
            }
        )
        return
    for setting, what in (("distributed", "one round per batch"), ("federated", "one round per local epoch")):
        console.print(
            results_table(f"{setting} setting: {what}", [row for row in rows if row.setting == setting])
        )
    console.print(f"Five nodes, {records[0]['parameters']:,} parameters. Bytes are measured on the payloads.")
    console.print(f"Records: {results}\nPicture: {picture}\nPage:    {page}")
