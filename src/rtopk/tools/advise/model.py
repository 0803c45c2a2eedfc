"""What the user may name as a model: a number of entries, or `module:factory`."""

import importlib
import sys
from pathlib import Path

from rtopk.tools.advise.cost import Workload

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}


def workload(model: str, step_ms: float) -> Workload:
    """Read a model: 11200000, 11.2M, 7B, or the importable factory of a torch module.

    >>> workload("7B", 100.0).size
    6999696060
    """
    if ":" in model:
        return Workload(_shapes(model), step_ms)
    number, unit = (model[:-1], model[-1].lower()) if model[-1:].lower() in UNITS else (model, "")
    try:
        size = round(float(number) * UNITS.get(unit, 1))
    except ValueError:
        raise ValueError(
            f"model must be a number of entries (11200000, 11.2M, 7B) or module:factory, got {model!r}"
        ) from None
    return Workload.of_size(size, step_ms)


def _shapes(model: str) -> tuple[tuple[int, ...], ...]:
    import torch

    module, _, factory = model.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import {model}: {error}") from error
    with torch.device("meta"):  # shapes only: a large model need not fit here
        made = make()
    if not isinstance(made, torch.nn.Module):
        raise ValueError(f"{model} must return a torch.nn.Module, got {type(made).__name__}")
    return tuple(tuple(p.shape) for p in made.parameters() if p.requires_grad)
