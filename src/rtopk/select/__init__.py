"""Which entries to send: the paper's family of rules, and others, one file each.

All choose from finite vectors, as a memory returns them. docs/rivals.md compares them at equal bytes.
"""

from rtopk.select.age import RAgeK
from rtopk.select.chunked import Chunked
from rtopk.select.dealt import Dealt
from rtopk.select.family import (
    RandomK,
    RTopK,
    TopK,
    draw,
    draw_largest,
    drawing_largest,
    random_k,
    rtop_k,
    top_k,
)
from rtopk.select.rule import METHODS, Rule, Selector, as_rule
from rtopk.select.threshold import Threshold

__all__ = [
    "METHODS",
    "Chunked",
    "Dealt",
    "RAgeK",
    "RTopK",
    "RandomK",
    "Rule",
    "Selector",
    "Threshold",
    "TopK",
    "as_rule",
    "draw",
    "draw_largest",
    "drawing_largest",
    "random_k",
    "rtop_k",
    "top_k",
]
