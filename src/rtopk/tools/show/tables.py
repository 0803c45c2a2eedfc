"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str | None]], right: bool = True) -> list[str]:
    """Return the lines of a table; the first column is aligned left, the others right if asked. None is empty.

    >>> print(*markdown(["method", "bytes"], [["top-k", "12"], ["dense", None]]), sep="\\n")
    | method | bytes |
    | --- | ---: |
    | top-k | 12 |
    | dense | |
    """
    rule = ["---", *["---:" if right else "---"] * (len(heads) - 1)]
    return [
        "|" + "".join(" |" if cell is None else f" {cell} |" for cell in row) for row in (heads, rule, *rows)
    ]
