"""`rtopk report` and `rtopk watch`: results as one page, finished or live."""

from pathlib import Path

import typer


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

    from rtopk.tools.report.watch import serve
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
