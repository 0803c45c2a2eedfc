"""A refused reply: who sent it, when, and why, in text that is safe to log."""

from dataclasses import dataclass

HEAD, TAIL = 60, 140  # characters shown of a text from a client: a traceback says most in its last line


class RefusedError(ValueError):
    """A reply that the server does not use."""


@dataclass(frozen=True)
class Refusal:
    """Who was refused when, and why."""

    round: int
    client: str
    node: int
    reason: str


def shown(text: str) -> str:
    """Return a text that is safe to log: short, without escape codes or line breaks.

    >>> shown("red: \\x1b[31m" + 5_000_000 * "!")[:16]
    'red: \\\\x1b[31m!!!'
    """
    short = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} ... {text[-TAIL:]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in short)


def reason_of(error: Exception) -> str:
    """Return what is wrong with a reply, from the exception raised while reading it."""
    return shown(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
