"""rTop-k: train over slow links by sending 0.1 % to 1 % of each gradient and keeping the rest for later.

The stages, in the order a gradient passes them: memory, selector, codec, transport, aggregation. `Sparsifier`
joins the first three. Names are imported at their first use, so that `rtopk --help` needs no torch.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtopk import ddp as ddp
    from rtopk import fsdp as fsdp
    from rtopk import torchft as torchft
    from rtopk.aggregate import average, average_sparse
    from rtopk.codec import Codec, PayloadError
    from rtopk.layout import Layout
    from rtopk.memory import DecayedErrorFeedback, ErrorFeedback, MomentumCorrection, NoMemory
    from rtopk.schedule import constant, warm_up
    from rtopk.select import (
        Chunked,
        Dealt,
        RAgeK,
        RandomK,
        RTopK,
        Rule,
        Threshold,
        TopK,
        random_k,
        rtop_k,
        top_k,
    )
    from rtopk.sparse import SparseVector
    from rtopk.sparsifier import Sparsifier
    from rtopk.transport import AllGather, InProcess

__version__ = "0.1.0"
__all__ = [
    "AllGather",
    "Chunked",
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
_HOMES = ("aggregate", "codec", "layout", "memory", "schedule", "select", "sparse", "sparsifier", "transport")
_ENGINES = ("ddp", "fsdp", "torchft")

if (Path(__file__).parent / "ops.py").exists():  # EleutherAI/rtopk has the same name
    raise ImportError(
        f"two projects named rtopk are installed in {Path(__file__).parent}: gradient sparsification, this one, "
        "and row-wise top-k on CUDA; delete the folder and install each into an environment of its own"
    )


def __getattr__(name: str) -> Any:
    """Import a name where it is defined, once."""
    if name in _ENGINES:
        return importlib.import_module(f"rtopk.{name}")
    if name in __all__:
        home = next(h for h in _HOMES if name in vars(importlib.import_module(f"rtopk.{h}")))
        return globals().setdefault(name, getattr(importlib.import_module(f"rtopk.{home}"), name))
    raise AttributeError(f"module 'rtopk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ENGINES})
