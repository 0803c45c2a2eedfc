"""rTop-k: train over slow links by sending 0.1 % to 1 % of each gradient and losing nothing.

The stages, in the order a gradient passes them: memory, selector, codec, transport, aggregation. `Sparsifier`
joins the first three.
"""

import importlib
import types

from rtopk import ddp as ddp  # so that `import rtopk` is enough for rtopk.ddp.register
from rtopk.aggregate import average, average_sparse
from rtopk.codec import Codec, PayloadError
from rtopk.layout import Layout
from rtopk.memory import DecayedErrorFeedback, ErrorFeedback, MomentumCorrection, NoMemory
from rtopk.schedule import constant, warm_up
from rtopk.select import Dealt, RAgeK, RandomK, RTopK, Rule, Threshold, TopK, random_k, rtop_k, top_k
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier
from rtopk.transport import AllGather, InProcess

__version__ = "0.1.0"
__all__ = [
    "AllGather",
    "Codec",
    "Dealt",
    "DecayedErrorFeedback",
    "ErrorFeedback",
    "InProcess",
    "Layout",
    "MomentumCorrection",
    "NoMemory",
    "PayloadError",
    "RAgeK",
    "RTopK",
    "RandomK",
    "Rule",
    "SparseVector",
    "Sparsifier",
    "Threshold",
    "TopK",
    "average",
    "average_sparse",
    "constant",
    "random_k",
    "rtop_k",
    "top_k",
    "warm_up",
]


def __getattr__(name: str) -> types.ModuleType:
    """Import `rtopk.fsdp` at its first use: it takes a second of its own."""
    if name == "fsdp":
        return importlib.import_module("rtopk.fsdp")
    raise AttributeError(f"module 'rtopk' has no attribute {name!r}")
