"""Colours that are told apart with any colour vision (after Okabe and Ito), on light and on dark.

Each has a contrast of at least 3 to 1 with its background; dashes and markers say the same again.
Slots 0 to 3 are dense, top-k, random-k and rTop-k; other methods take those after.
"""

LIGHT = ("#1a1a1a", "#0072b2", "#008a64", "#d55e00", "#a3487f", "#806000", "#707070", "#4b3fa7")
DARK = ("#f2f2f2", "#56b4e9", "#2fc79a", "#ff8a3d", "#e29ac7", "#f0e442", "#a0a0a0", "#a99cff")
DASHES = ("solid", "dash", "dot", "dashdot")
PLOTLY_MARKERS = ("square", "triangle-up", "triangle-down", "circle", "diamond", "x", "cross", "star")
MARKERS = ("s", "^", "v", "o", "D", "X", "P", "*")


def slot(number: int) -> int:
    """Return the place in the palette; after the last it begins again behind dense."""
    return number if number < len(LIGHT) else 1 + (number - 1) % (len(LIGHT) - 1)


def css() -> str:
    """Return the colours as CSS variables for both backgrounds."""
    light, dark = (
        "".join(f"--s{i}:{colour};" for i, colour in enumerate(colours)) for colours in (LIGHT, DARK)
    )
    return f":root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}"
