"""What a method is called in tables and pictures."""


def with_compression(method: str, density: float) -> str:
    """Name a method as the paper does, with its compression, 1 - density.

    >>> with_compression("rtop-k", 0.001), with_compression("dense", 1.0)
    ('rtop-k 99.9 %', 'dense')
    """
    return method if method == "dense" else f"{method} {100 * (1 - density):.4g} %"


def with_density(method: str, density: float | None = None, values: str | None = None) -> str:
    """Name a method of the link benchmark: its density, and the form of its values.

    >>> with_density("rtopk", 0.001, "4bit"), with_density("fp16")
    ('rtopk 0.1 % 4bit', 'fp16')
    """
    return " ".join([method, *([f"{100 * density:g} %"] if density else []), *([values] if values else [])])


def rate(mbit: float | None) -> str:
    """Write the rate of a link; None is a link without a limit."""
    return "unshaped" if mbit is None else f"{mbit:g} Mbit/s"
