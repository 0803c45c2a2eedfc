"""Is the lead of a mean that only rTop-k gets a matter of the step's size? What the tables' tuning runs say.

Every row of a table tried the same rates. So at each of them rTop-k over the received can be held against top-k
over all nodes, and each against the other with the same mean: one run a cell, half as long, on validation data.
"""

from pathlib import Path

from rtopk.studies.paper import TABLES, Scale, TableRow
from rtopk.studies.paper.reproduce import results_file, tuning
from rtopk.studies.train.records import read
from rtopk.studies.train.runner import key_of
from rtopk.tools.show.terminal import markdown

DENSITIES = dict(zip(("I", "II", "III", "IV", "V"), (0.01, 0.01, 0.01, 0.01, 0.05), strict=True))
MEANS = ("nodes", "received")


def render(scale: Scale, results: Path) -> str:
    """Return the scores and the leads at every rate that all four rows of a table tried; positive is better."""
    cells: list[list[str | None]] = []
    for (name, density), table in zip(DENSITIES.items(), TABLES.values(), strict=True):
        records = {key_of(r): r for r in read(results_file(results, table, scale)) if r["kind"] == "train"}
        tuned = {
            (method, mean): tuning(table, scale, TableRow(method, density, mean=mean), records)  # type: ignore[arg-type]
            for method in ("rtop-k", "top-k")
            for mean in MEANS
        }
        for rate in sorted(set.intersection(*(set(one.tried) for one in tuned.values()))):
            score = {row: one.value(rate) for row, one in tuned.items()}
            leads = [
                score["rtop-k", ours] - score["top-k", theirs]
                for ours, theirs in (("received", "nodes"), ("nodes", "nodes"), ("received", "received"))
            ]
            cells.append([name, f"{rate:g}", *(f"{abs(value):.1f}" for value in score.values()),
                          *(f"{lead:+.1f}" for lead in leads)])  # fmt: skip
    heads = [
        "table", "rate", "rTop-k, nodes", "rTop-k, received", "top-k, nodes", "top-k, received",
        "received against nodes", "both nodes", "both received",
    ]  # fmt: skip
    title = "### The same rows at every rate: one run each, half as long, on validation data"
    return "\n".join([title, "", *(markdown(heads, cells) if cells else ["Not run yet."])])
