"""One name, one colour and one marker for every method, in every table, picture and page.

The colours are told apart with any colour vision (after Okabe and Ito). There are two sets, for light and for dark
backgrounds, each with a contrast of at least 3 to 1; dashes and markers say the same again.
"""

METHODS = (
    "dense", "top-k", "random-k", "rtop-k", "dealt-k", "rage-k",
    "threshold", "powersgd", "chunked-k",
)  # fmt: skip
LIGHT = ("#1a1a1a", "#0072b2", "#008a64", "#d55e00", "#a3487f", "#806000", "#707070", "#4b3fa7", "#8c1c13")
DARK = ("#f2f2f2", "#56b4e9", "#2fc79a", "#ff8a3d", "#e29ac7", "#f0e442", "#a0a0a0", "#a99cff", "#c2705f")
PLOTLY_MARKERS = (
    "square", "triangle-up", "triangle-down", "circle", "diamond", "x",
    "cross", "star", "hexagon",
)  # fmt: skip
MARKERS = ("s", "^", "v", "o", "D", "X", "P", "*", "h")
CYCLE = (3, 1, 2, 4, 0, 5)  # slots of lines that are no methods, such as rounds or densities


def slot(number: int) -> int:
    """Return the place in the palette; after the last it begins again behind dense."""
    return number if number < len(LIGHT) else 1 + (number - 1) % (len(LIGHT) - 1)


def style(method: str | int) -> tuple[str, str]:
    """Return colour and marker of a method, or of a slot, on a light background; rules from elsewhere too."""
    if isinstance(method, str):
        method = METHODS.index(method) if method in METHODS else len(METHODS) + sum(method.encode())
    at = slot(method)
    return LIGHT[at], MARKERS[at]


def mixed(colour: str, other: str, share: float) -> str:
    """Mix this share of another colour in: a variant of the same method.

    >>> mixed("#000000", "#ffffff", 0.2)
    '#333333'
    """
    parts = [[int(one[i : i + 2], 16) for i in (1, 3, 5)] for one in (colour, other)]
    return "#" + "".join(f"{round((1 - share) * a + share * b):02x}" for a, b in zip(*parts, strict=True))


def is_dark(colour: str) -> bool:
    """Say whether white text is read better on this colour than black."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def css() -> str:
    """Return the colours as CSS variables for both backgrounds."""
    light, dark = (
        "".join(f"--s{i}:{colour};" for i, colour in enumerate(colours)) for colours in (LIGHT, DARK)
    )
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"


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
