"""`rtopk bench` (the parts against their floors and rivals) and `rtopk selftest` (the library on a device)."""

import json
from dataclasses import replace
from pathlib import Path

import typer

app = typer.Typer(
    help="Measure the parts against their floors and rivals.", no_args_is_help=True, add_completion=False
)


@app.command()
def compress(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    markdown: bool = typer.Option(False, "--markdown", help="Print the tables of docs/performance.md."),
    quick: bool = typer.Option(False, "--quick", help="Only d = 11.2 M, in under 40 s."),
    threads: list[int] = typer.Option([], "--threads", help="Threads; repeat for several."),
    d: list[int] = typer.Option([], "--d", min=1000, help="Entries; repeat for several."),
    r_over_k: int = typer.Option(1, "--r-over-k", min=1, help="Draw k of so many times k; 1 is top-k."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", envvar="RTOPK_DATA", help="CIFAR-10 and PTB; else digits, manual."
    ),
) -> None:
    """Measure selection against only adding the gradient.

    Accumulate, select and subtract, beside the floor and two rivals.
    """
    from rtopk.studies.bench import as_json as to_json
    from rtopk.studies.bench import compress as bench
    from rtopk.studies.bench import compress_report as report
    from rtopk.tools.show.terminal import errors

    plan = replace(bench.QUICK if quick else bench.CompressPlan(), data_dir=data_dir, r_over_k=r_over_k)
    plan = replace(plan, threads=tuple(threads) or plan.threads, sizes=tuple(d) or plan.sizes)
    with errors.status("") as status:
        measured = list(bench.measure(plan, status.update))
        if as_json:
            print(json.dumps(to_json(row for _, rows in measured for row in rows)))
            return
        status.update("memory, second scans")
        extras = report.measure_extras(quick)
    if markdown:
        print(report.markdown(measured, extras))
    else:
        report.show(measured, extras)


@app.command()
def codec(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    quick: bool = typer.Option(False, "--quick", help="Fewer runs and rivals, under 40 s."),
    data_dir: Path | None = typer.Option(
        None, "--data-dir", envvar="RTOPK_DATA", help="CIFAR-10; else digits."
    ),
) -> None:
    """Measure bits and time of payloads against the entropy bound."""
    from rtopk.studies.bench import codec as bench
    from rtopk.tools.show.terminal import errors

    plan = replace(bench.QUICK if quick else bench.CodecPlan(), data_dir=data_dir)
    with errors.status("") as status:
        measured = bench.measure(plan, status.update)
    if as_json:
        print(json.dumps(bench.as_json(measured)))
    else:
        bench.show(measured)


@app.command()
def link(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    markdown: bool = typer.Option(False, "--markdown", help="Print tables for docs/links.md."),
    quick: bool = typer.Option(False, "--quick", help="ResNet-18 at 100 Mbit/s, in under 3 minutes."),
    loopback: bool = typer.Option(False, "--loopback", help="Without root: 127.0.0.1, no limits."),
    engine: str = typer.Option("ddp", "--engine", help="ddp, torchft, or fsdp: sites of two ranks."),
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
    from rtopk.studies.bench import MODELS
    from rtopk.studies.bench import as_json as to_json
    from rtopk.studies.bench import link as bench
    from rtopk.studies.bench import link_report as report
    from rtopk.tools.show.terminal import console, errors

    if engine not in bench.ENGINES:
        raise typer.BadParameter(f"--engine must be one of {', '.join(bench.ENGINES)}, got {engine}")
    if unknown := set(model) - set(MODELS):
        raise typer.BadParameter(f"--model must be one of {', '.join(MODELS)}, got {', '.join(unknown)}")
    plan = bench.QUICK if quick else bench.LinkPlan()
    plan = replace(
        plan, engine=engine, methods=bench.ENGINES[engine], nodes=(2,) if engine == "fsdp" else plan.nodes
    )
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
        names = ", ".join(dict.fromkeys(key[0] for key in bench.ENGINES[engine]))
        raise typer.BadParameter(f"--method must be one of {names}; got {', '.join(method)}")
    kept = show if show is not None else out
    rows: list[bench.LinkRow] = []
    if kept is not None and (show is not None or kept.exists()):
        rows = bench.from_json(json.loads(kept.read_text()))
    with errors.status("") as status:
        # Half an hour of silence in a log would look like a hang.
        tell = status.update if errors.is_terminal else errors.print
        for cell in bench.measure(plan, tell, rows) if show is None else ():
            rows += cell
            if out is not None:
                out.write_text(json.dumps(to_json(rows), indent=1) + "\n")
    if picture is not None:
        report.draw_measured(rows, plan.nodes[0], picture)
    if as_json:
        print(json.dumps(to_json(rows)))
    elif markdown:
        print(report.markdown(rows))
    else:
        report.show(rows, console)


@app.command()
def traffic(
    markdown: bool = typer.Option(False, "--markdown", help="Print the tables of docs/gpu.md."),
) -> None:
    """Predict what a step takes on a card, from the bytes it moves.

    Nothing is run: bytes are counted from the programs and divided by bandwidths.
    """
    from rtopk.studies.bench import traffic as model
    from rtopk.tools.show.terminal import console, table
    from rtopk.tools.show.terminal import markdown as in_markdown

    for title, (heads, *rows) in (
        ("a step: predicted, not run on a GPU", model.table()),
        ("packing: predicted, not run on a GPU", model.packing_table()),
        ("averaging: predicted, not run on a GPU", model.averaging_table()),
    ):
        if markdown:
            print(f"**{title[0].upper()}{title[1:]}.**\n", *in_markdown(heads, rows), sep="\n", end="\n\n")
        else:
            console.print(table(title, heads, rows))


@app.command()
def exchange(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    markdown: bool = typer.Option(False, "--markdown", help="Print tables for docs/links.md."),
    quick: bool = typer.Option(False, "--quick", help="A small model and up to 32 nodes, in seconds."),
    picture: Path | None = typer.Option(None, "--picture", help="PNG of bytes over nodes."),
) -> None:
    """Count what a node receives in a step, for 2 to 256 nodes.

    Both exchanges, PowerSGD, Ok-Topk's bound and dense, on real gradients of ResNet-18 and of an LSTM.
    """
    from rtopk.studies.bench import as_json as to_json
    from rtopk.studies.bench import exchange as bench
    from rtopk.tools.show import terminal

    with terminal.errors.status("") as status:
        tell = status.update if terminal.errors.is_terminal else terminal.errors.print
        rows = list(bench.count(bench.QUICK if quick else bench.ExchangePlan(), tell))
    if picture is not None:
        bench.draw(rows, picture)
    if as_json:
        print(json.dumps(to_json(rows)))
        return
    for title, found in bench.panels(rows).items():
        cells = [bench.cells(row) for row in found]
        if markdown:
            print("", f"{title}, kB:", "", *terminal.markdown(bench.HEADS, cells), sep="\n")
        else:
            terminal.console.print(terminal.table(f"{title}, kB received", bench.HEADS, cells))


@app.command()
def start(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    runs: int = typer.Option(3, min=1, help="Repetitions; the median counts."),
    ranks: int = typer.Option(8, min=1, help="Ranks that start at once."),
) -> None:
    """Measure help, imports and the first step, cold and warm."""
    from rtopk.studies.bench import as_json as to_json
    from rtopk.studies.bench.start import measure
    from rtopk.tools.show.terminal import console, errors, table

    with errors.status("") as status:
        found = measure(runs, ranks, status.update if errors.is_terminal else errors.print)
    if as_json:
        print(json.dumps(to_json(found)))
        return
    cells = [[row.name, f"{row.seconds:.2f}", f"{row.cpu_seconds:.2f}"] for row in found]
    console.print(table(f"Start-up, median of {runs}", ["", "seconds", "CPU seconds"], cells))


@app.command()
def aggregate(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    clients: int = typer.Option(100, min=1, help="Number of clients."),
    d: int = typer.Option(11_173_962, "--d", min=1000, help="Entries of the model."),
    density: float = typer.Option(0.01, help="Part of the entries a client sends: k / d."),
) -> None:
    """Measure the server's mean against only adding the entries."""
    from dataclasses import asdict

    from rtopk.studies.bench.codec import measure_aggregation
    from rtopk.tools.show.terminal import errors

    with errors.status("making payloads, then taking turns"):
        found = measure_aggregation(clients, d, density)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    print(f"{found.clients} clients x {found.d:,} entries at density {found.density:g}")
    print(f"adding the decoded entries  {found.floor_ms:8.1f} ms")
    print(f"the same by index_add_      {found.torch_ms:8.1f} ms")
    print(f"decoding alone              {found.decode_ms:8.1f} ms")
    print(f"check, decode, judge, add   {found.average_ms:8.1f} ms  {found.over_floor:.2f} x the adding")
    print(f"the same in the first round {found.first_ms:8.1f} ms")
    print(f"payloads                    {found.payload_bytes / 1e6:8.1f} MB")
    print(
        f"memory beside the payloads  {found.peak_bytes / 1e6:8.1f} MB  {found.over_dense:.2f} dense vectors"
    )


def selftest(
    device: str = typer.Option("", "--device", help="cuda, cuda:1 or cpu; the first card if there is one."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
    out: Path | None = typer.Option(None, "--out", help="Folder for selftest.md and selftest.json."),
    small: bool = typer.Option(False, "--small", help="A few hundred entries, no figures worth keeping."),
) -> None:
    """Check the library on a device against the CPU, to the bit.

    Also trains with two ranks, and measures a step beside add_, topk and DGC. Two minutes at most. Please send
    us the report, whether it passed or not.
    """
    import torch

    from rtopk.studies.bench import selftest as checks
    from rtopk.tools.show.terminal import errors

    cards = torch.cuda.device_count()
    known = ["cpu", *(["cuda"] if cards else []), *(f"cuda:{card}" for card in range(cards))]
    device = device or ("cuda" if cards else "cpu")
    if device not in known:
        seen = f"sees {cards} of them" if cards else "sees no card"
        raise ValueError(
            f"--device {device}: torch {torch.__version__} {seen} here; use {' or '.join(known)}"
        )
    chosen = torch.device(device)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # now, not after two minutes
    report = checks.run(chosen, checks.SMALL if small else None, errors.print)
    page, record = checks.markdown(report), json.dumps(report.as_json(), indent=1)
    if out is not None:
        (out / "selftest.md").write_text(page + "\n")
        (out / "selftest.json").write_text(record + "\n")
    print(record if as_json else page)
    if not report.passed:
        raise typer.Exit(1)
