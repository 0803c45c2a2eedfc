"""The command line: parse, call, print; no logic. One file per group of commands.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted. An error is one line; `--debug` shows where.
"""

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, get_origin, get_type_hints

try:
    import typer
    import typer.core
except ImportError:  # pragma: no cover
    sys.exit("rtopk: the command line needs typer and rich: pip install 'rtopk[cli]'")

import rtopk

typer.core.HAS_RICH = False  # typer 0.20, which Flower needs, escapes brackets for rich in plain help too

# Where each command is, and its line in the help. Its file is imported when it is used: some need torch.
COMMANDS = {
    "advise": ("report:advise", "Predict the step time of each method and recommend one."),
    "demo": ("train:demo", "Compare four methods on scikit-learn's digits with five nodes."),
    "train": ("train:train", "Train once and write a record."),
    "report": ("report:report", "Make one self-contained page of any records."),
    "watch": ("report:watch", "Serve the report of runs while they go on, renewed by itself."),
    "fed": ("train:fed", "Train federated on Flower, compressed both ways."),
    "bench": ("bench:app", "Measure the parts against their floors and rivals."),
    "selftest": ("bench:selftest", "Check the library on a device against the CPU, to the bit."),
    "rivals": ("studies:rivals", "Compare all methods at equal bytes sent."),
    "gpt": ("studies:gpt", "Compare methods of local steps on a small GPT."),
    "reproduce": ("studies:reproduce", "Run one of the paper's tables and print both side by side."),
    "tables": ("studies:tables", "Print the tables that have been run, paper beside ours."),
    "lab": ("lab:app", "See each theorem of the paper happen."),
    "data": ("studies:data", "The data sets of the experiments."),
}

MEASURES = {"advise", "bench", "selftest"}  # of this machine as it is


class Deferred(typer.core.TyperCommand):
    """A command whose file is imported when it is used."""

    def __init__(self, name: str, place: str, summary: str) -> None:
        super().__init__(name, short_help=summary)
        self.place = place

    def command(self) -> Any:
        """Import the command."""
        file, _, name = self.place.partition(":")
        found = getattr(importlib.import_module(f"rtopk.tools.cli.{file}"), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(self.name)(found)
            found = alone
        return typer.main.get_command(found)

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Go on in the real command."""
        return self.command().make_context(*args, **options)


class Commands(typer.core.TyperGroup):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        commands = {name: Deferred(name, place, summary) for name, (place, summary) in COMMANDS.items()}
        super().__init__(**{**options, "commands": commands})


app = typer.Typer(
    name="rtopk",
    cls=Commands,
    help="Train over slow links: send 0.1 % to 1 % of each gradient, keep the rest for later.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"rtopk {rtopk.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print version."),
) -> None:
    if debug:
        os.environ["RTOPK_DEBUG"] = "1"


def main() -> None:
    """Run the command line."""
    if not MEASURES.intersection(sys.argv):
        _fix_instructions()
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's own, which some versions of typer bring with them
            _wrong_use(error)
        if os.environ.get("RTOPK_DEBUG"):
            raise
        text = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename:  # without Python's "[Errno 13]"
            text = f"{error.filename}: {error.strerror}"
        print(f"rtopk: {text}", file=sys.stderr)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _fix_instructions() -> None:
    """Keep torch to AVX2 where it could use AVX-512: a seed then gives the same bits on processors with either."""
    processor = Path("/proc/cpuinfo")
    if processor.is_file() and " avx512f " in processor.read_text():
        os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")


def _wrong_use(error: Any) -> NoReturn:
    """Say in one line what was wrong with the command; a command without anything gets its help."""
    message = error.format_message()
    if "\n" in message:
        print(message, file=sys.stderr)
    else:
        where = error.ctx.command_path if getattr(error, "ctx", None) else "rtopk"
        print(f"rtopk: {message} (see {where} --help)", file=sys.stderr)
    sys.exit(error.exit_code)


# -- for the files of the commands


@contextmanager
def wrong_use() -> Iterator[None]:
    """Report a ValueError as wrong use of the command, which ends with code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def options_of(
    kind: type, *names: str, defaults: dict[str, Any] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take fields of a dataclass (all, or those named) as options, before its own.

    The command gets them as `**fields`. `defaults` replaces those of the dataclass. A field without a help text is
    no option.
    """
    hints, changed = get_type_hints(kind), defaults or {}
    fields = {
        field.name: field
        for field in dataclasses.fields(kind)
        if "help" in field.metadata and (not names or field.name in names)
    }

    def take(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        given = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=typer.Option(changed.get(name, field.default), help=field.metadata["help"]),
                annotation=str if get_origin(hints[name]) is Literal else hints[name],
            )
            for name, field in fields.items()
        ]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]

        def call(**values: Any) -> None:
            command(**values)

        call.__signature__ = inspect.Signature([*given, *own])  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in (*given, *own)}
        call.__name__, call.__doc__ = command.__name__, command.__doc__
        return call

    return take


def set_environment(
    data_dir: Path | None = None, device: str | None = None, tensorboard: bool = False
) -> None:
    """Set the variables that runs read; workers inherit them."""
    if data_dir is not None:
        os.environ["RTOPK_DATA"] = str(data_dir)
    if device is not None:
        os.environ["RTOPK_DEVICE"] = device
    if tensorboard:
        os.environ["RTOPK_TENSORBOARD"] = "1"
