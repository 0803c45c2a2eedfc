"""`rtopk bench link`: every method on shaped links between hosts on this machine."""

import json
from pathlib import Path

import typer


def link(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    markdown: bool = typer.Option(False, "--markdown", help="Print tables for docs/links.md."),
    quick: bool = typer.Option(False, "--quick", help="ResNet-18 at 100 Mbit/s, in under 3 minutes."),
    loopback: bool = typer.Option(False, "--loopback", help="Without root: 127.0.0.1, no limits."),
    model: list[str] = typer.Option([], "--model", help="resnet18, lstm1500 or small; repeat."),
    mbit: list[float] = typer.Option([], "--mbit", min=0, help="Mbit/s, 0 is unshaped; repeat."),
    nodes: list[int] = typer.Option([], "--nodes", min=2, max=64, help="Number of hosts; repeat."),
    rounds: int | None = typer.Option(None, "--rounds", min=1, help="Visits to each method."),
    steps: int | None = typer.Option(None, "--steps", min=1, help="Steps of each visit."),
    compute_ms: float | None = typer.Option(
        None, "--compute-ms", min=0, help="Computation to wait for; else measured."
    ),
    method: list[str] = typer.Option([], "--method", help="Only these methods; repeat."),
    out: Path | None = typer.Option(None, "--out", help="Keep the JSON here; what is there is not repeated."),
    picture: Path | None = typer.Option(None, "--picture", help="PNG of step time over the rate."),
    show: Path | None = typer.Option(None, "--show", help="Print what --out kept; measure nothing."),
) -> None:
    """Measure every method on shaped links.

    Step time, its parts, and bytes at the interface.

    Makes hosts out of network namespaces and limits their links with tc, so it needs root and iproute2.
    Computation is replaced by waiting for as long as a real step takes on one core.
    """
    from dataclasses import replace

    from rich.console import Console

    from rtopk.studies.bench import link as bench
    from rtopk.studies.bench import link_report as report

    plan = bench.QUICK if quick else bench.Plan()
    plan = replace(
        plan,
        models=tuple(model) or plan.models,
        mbits=tuple(rate or None for rate in mbit) or plan.mbits,
        nodes=tuple(nodes) or plan.nodes,
        rounds=rounds or plan.rounds,
        steps=steps or plan.steps,
        compute_ms=compute_ms,
        loopback=loopback,
        methods=tuple(key for key in plan.methods if not method or key[0] in method),
    )
    if not plan.methods:
        names = ", ".join(dict.fromkeys(key[0] for key in bench.METHODS))
        raise ValueError(f"--method must be one of {names}; got {', '.join(method)}")
    kept = show if show is not None else out
    rows: list[bench.Row] = []
    if kept is not None and (show is not None or kept.exists()):
        rows = bench.from_json(json.loads(kept.read_text()))
    console = Console(stderr=True)
    with console.status("") as status:
        # Half an hour of silence in a log would look like a hang.
        tell = status.update if console.is_terminal else console.print
        for cell in bench.measure(plan, tell, rows) if show is None else ():
            rows += cell
            if out is not None:
                out.write_text(json.dumps(bench.as_json(rows), indent=1) + "\n")
    if picture is not None:
        from rtopk.studies.bench.link_picture import draw_measured

        draw_measured(rows, plan.nodes[0], picture)
    if as_json:
        print(json.dumps(bench.as_json(rows)))
    elif markdown:
        print(report.markdown(rows))
    else:
        report.show(rows, Console())
