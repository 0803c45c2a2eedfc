"""The command line: parse, call, print; no logic. One file per group of commands.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted. An error is one line; `--debug` shows where.
"""

import os
import sys
from typing import Any, NoReturn

try:
    import typer
    import typer.core
except ImportError:  # pragma: no cover
    sys.exit("rtopk: the command line needs typer and rich: pip install 'rtopk[cli]'")

from rtopk.tools.cli import bench
from rtopk.tools.cli.lab import app as lab
from rtopk.tools.cli.report import advise, report, watch
from rtopk.tools.cli.selftest import selftest
from rtopk.tools.cli.studies import data, reproduce, rivals, tables
from rtopk.tools.cli.train import demo, fed, train

typer.core.HAS_RICH = False  # typer 0.20, which Flower needs, escapes brackets for rich in plain help too

app = typer.Typer(
    name="rtopk",
    help="Train over slow links: send 0.1 % to 1 % of each gradient and lose nothing.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def _version(wanted: bool) -> None:
    if wanted:
        from rtopk import __version__

        print(f"rtopk {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print version."),
) -> None:
    if debug:
        os.environ["RTOPK_DEBUG"] = "1"


app.add_typer(bench.app, name="bench")
app.add_typer(fed, name="fed")
for command in (advise, demo, train, rivals, reproduce, tables):
    app.command()(command)
app.add_typer(data, name="data")
app.add_typer(lab, name="lab")
for command in (report, watch, selftest):
    app.command()(command)


def main() -> None:
    """Run the command line."""
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own, which some versions of typer bring with them
            _wrong_use(error)
        if os.environ.get("RTOPK_DEBUG"):
            raise
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        print(f"rtopk: {kind}{error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _wrong_use(error: Any) -> NoReturn:
    """Say in one line what was wrong with the command; a command without anything gets its help."""
    message = error.format_message()
    if "\n" in message:
        print(message, file=sys.stderr)
    else:
        where = error.ctx.command_path if getattr(error, "ctx", None) else "rtopk"
        print(f"rtopk: {message} (see {where} --help)", file=sys.stderr)
    sys.exit(error.exit_code)
