"""`rtopk report` and `rtopk watch` (results as one page, finished or live), and `rtopk advise`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from rtopk.tools.cli import wrong_use

if TYPE_CHECKING:
    from rtopk.tools.advise.output import Rows

T = TypeVar("T")


def report(
    runs: list[Path] = typer.Argument(..., help="Run folders, results files, or JSON of bench and lab."),
    out: Path = typer.Option(Path("report.html"), "--out", "-o", help="The page to write."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object: what was written."),
) -> None:
    """Make one self-contained page of any records.

    It opens from disk, needs no network, and stays readable without scripts.
    """
    from rtopk.state_file import write_atomically
    from rtopk.tools.report.inputs import read
    from rtopk.tools.report.page import Page
    from rtopk.tools.show.terminal import console, print_json

    if out.is_dir():
        raise typer.BadParameter(f"--out must name a file, and {out} is a folder")
    inputs = read(runs)
    data = Page(inputs).html().encode()
    write_atomically(out, data)
    told = {"page": str(out), "bytes": len(data), "runs": len(inputs.runs), "studies": len(inputs.studies)}
    if as_json:
        print_json(told)
        return
    console.print(
        f"{out}: {told['runs']} runs, {told['studies']} studies, {len(data) / 1e6:.2f} MB",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def watch(
    runs: list[Path] = typer.Argument(..., help="Folders of runs that go on (or are finished)."),
    port: int = typer.Option(0, min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one."),
    open_browser: bool = typer.Option(False, "--open", help="Open the page in the browser."),
) -> None:
    """Serve the report of runs while they go on, renewed by itself.

    Only this machine can see it (127.0.0.1). Ctrl-C ends it.
    """
    import signal

    from rtopk.tools.report.page import serve
    from rtopk.tools.show.terminal import console, errors

    # A shell starts what runs in the background with SIGINT ignored; whoever sends it here means it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def tell(address: str) -> None:
        console.print(f"Watching at {address} (Ctrl-C ends)", soft_wrap=True, highlight=False)
        if open_browser:
            typer.launch(address)

    try:
        serve(runs, port, tell)
    except KeyboardInterrupt as stopped:
        errors.print("stopped watching")
        raise typer.Exit(130) from stopped


def advise(
    model: str = typer.Option("11.2M", "--model", help="Entries (11.2M, 7B) or module:factory."),
    nodes: int = typer.Option(4, "--nodes", min=2, help="Number of nodes."),
    mbit: float | None = typer.Option(None, "--mbit", help="Mbit/s of each node's link."),
    latency_ms: float | None = typer.Option(None, "--latency-ms", min=0, help="One way; 0.1 if not said."),
    step_ms: float = typer.Option(100.0, "--step-ms", min=0, help="A step without communication."),
    device: str = typer.Option("cpu", "--device", help="cpu, cuda, a100 or h100; other than cpu: predicted."),
    probe: str | None = typer.Option(None, "--probe", help="HOST:PORT of a host that runs --listen."),
    listen: int | None = typer.Option(
        None, "--listen", min=1, max=65535, help="Serve one --probe on this port."
    ),
    measure: bool = typer.Option(False, "--measure", help="Measure this machine's parts, 1-2 minutes."),
    machine_file: Path | None = typer.Option(None, "--machine", help="Parts kept by --measure --keep."),
    keep: Path | None = typer.Option(None, "--keep", help="Write the parts here as JSON."),
    simulate: bool = typer.Option(False, "--simulate", help="Past this machine: who wins where."),
    against: Path | None = typer.Option(None, "--against", help="Compare with JSON of `bench link`."),
    cores: int = typer.Option(2, "--cores", min=1, help="Cores that the ranks of --against shared."),
    picture: Path | None = typer.Option(None, "--picture", help="PNG of --simulate or --against."),
    markdown: bool = typer.Option(False, "--markdown", help="Print tables in Markdown."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    """Predict the step time of each method and recommend one.

    Predictions come from measured parts: selection, codec, software and wire. Without --measure they are
    those of the machine that the documentation was measured on. With --device the parts of a card are
    predicted from the bytes that it moves: none has been run on one.
    """
    from rtopk.tools.advise import Link, Machine, choose, output, predict, reference
    from rtopk.tools.advise import machine as machines
    from rtopk.tools.advise.advice import compare, median_error
    from rtopk.tools.advise.advice import simulate as simulate_all
    from rtopk.tools.advise.cost import workload
    from rtopk.tools.advise.device import on_device
    from rtopk.tools.show.terminal import errors

    if listen is not None:
        machines.listen(listen)
        return
    if machine_file is not None:
        machine = _read(machine_file, Machine.from_json, "`rtopk advise --measure --keep`")
    elif measure:
        with errors.status("") as status:
            machine = machines.measure(status.update)
    else:
        machine = reference()
    if keep is not None:
        keep.write_text(json.dumps(machine.as_json(), indent=1) + "\n")
    with wrong_use():
        machine = on_device(machine, device)
    if simulate:
        points = list(simulate_all(machine))
        if picture is not None:
            output.draw_winners(points, picture)
        text = f"Parts of: {machine.name}"
        _say(output.simulated(points), text, output.simulated_json(points), as_json, markdown)
        return
    if against is not None:
        rows = _read(against, lambda data: compare(machine, data["rows"], cores), "`rtopk bench link --out`")
        if not rows:
            raise ValueError(f"{against} has no row of a method that is predicted")
        if picture is not None:
            output.draw_compared(rows, picture)
        text = (
            f"Median error {100 * median_error(rows):.1f} % over {len(rows)} rows. Parts of: {machine.name}"
        )
        _say(output.compared(rows), text, output.compared_json(rows), as_json, markdown)
        return
    if probe is not None:
        host, _, port = probe.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise typer.BadParameter(f"--probe must be HOST:PORT, with a port of 1 to 65535, got {probe!r}")
        found = machines.probe(host, int(port))
        mbit = found.mbit if mbit is None else mbit
        latency_ms = found.latency_ms if latency_ms is None else latency_ms
    if mbit is None:
        raise typer.BadParameter("how fast is the link? Give --mbit, or --probe HOST:PORT to measure it")
    with wrong_use():
        link = Link(nodes, mbit, 0.1 if latency_ms is None else latency_ms)
        work = workload(model, step_ms)
    predictions = predict(machine, work, link)
    advice = choose(predictions)
    paste = f"\nAccuracy is not predicted; docs/index.md has densities to start with\n{advice.line}"
    text = (
        f"{work.size / 1e6:,.1f} M entries, {nodes} nodes, {output.rate(round(mbit, 1))}, "
        f"latency {link.latency_ms:.2g} ms. Parts of: {machine.name}; no GPU was measured\n{advice.reason}"
        + (paste if advice.line else "")
    )
    data = {
        "mbit": mbit,
        "latency_ms": link.latency_ms,
        "machine": machine.name,
        **output.advice_json(predictions, advice),
    }
    _say(output.predictions(predictions), text, data, as_json, markdown)


def _read(path: Path, parse: Callable[[Any], T], command: str) -> T:
    """Parse what a command wrote; raise ValueError for anything else."""
    try:
        return parse(json.loads(path.read_text()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not what {command} writes") from error


def _say(rows: "Rows", text: str, data: dict[str, Any], as_json: bool, markdown: bool) -> None:
    from rtopk.tools.show.terminal import console, print_json, table
    from rtopk.tools.show.terminal import markdown as in_markdown

    if as_json:
        print_json(data)
    elif markdown:
        print(*in_markdown(rows[0], rows[1:], right=False), sep="\n", end=f"\n\n{text}\n")
    else:
        console.print(table("", rows[0], rows[1:], left=len(rows[0])))
        print(text)
