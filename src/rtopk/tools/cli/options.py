"""Options of commands: from the fields of a dataclass, and those that reach the workers through the environment."""

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import typer


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
