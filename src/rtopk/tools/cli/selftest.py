"""`rtopk selftest`: check this library on a device, and measure it there."""

import json
from pathlib import Path

import typer


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
