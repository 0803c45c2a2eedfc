"""What a record of a run must hold before a page is made of it; anything else is refused by name."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

Record = dict[str, Any]
HEAD = ("config", "metric")
NEEDED = (*HEAD, "curve", "final")
CONFIG = {"task": str, "setting": str, "method": str, "density": float, "nodes": float, "rounds": float}
TOTALS = ("parameters", "seconds", "sent_bytes_per_round", "received_bytes_per_round")
POINT = ("round", "sent_bytes", "received_bytes", "seconds")  # of each point of the curve


def faults(run: Record) -> Iterator[str]:
    """Yield what is wrong with the record of a finished run."""
    missing = [name for name in NEEDED if name not in run]
    if missing:
        yield f"is a train record without {', '.join(missing)}"
        return
    yield from head_faults(run)
    yield from _amounts(run, "", TOTALS)
    if not isinstance(run["curve"], list) or not all(
        isinstance(p, dict) for p in (*run["curve"], run["final"])
    ):
        yield "must have a list of objects as curve and an object as final"
        return
    if not run["curve"] or run["metric"] not in run["final"]:
        yield f"is a train record without a score named {run['metric']!r}"
        return
    for number, point in enumerate((*run["curve"], run["final"])):
        name = f"curve[{number}]." if number < len(run["curve"]) else "final."
        yield from point_faults(point, name)


def head_faults(run: Record) -> Iterator[str]:
    """Yield what is wrong with what is known of a run before its first round."""
    missing = [name for name in HEAD if name not in run]
    if missing:
        yield f"is a run without {', '.join(missing)}"
        return
    config = run["config"] if isinstance(run["config"], dict) else {}
    for name, kind in CONFIG.items():
        if name not in config:
            yield f"has a configuration without {name}"
        elif not (_is_amount(config[name]) if kind is float else isinstance(config[name], kind)):
            yield f"has {config[name]!r} as {name}"
    for name, kind in {"key": str, "metric": str, "environment": dict, "paper": dict, "command": str}.items():
        if name in run and not isinstance(run[name], kind):
            yield f"has {run[name]!r} as {name}"
    if "parameters" in run:
        yield from _amounts(run, "", ("parameters",))


def point_faults(point: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield what is wrong with a point of a curve; scores may be NaN, amounts may not."""
    yield from _amounts(point, name, POINT)
    for key, value in point.items():
        if key == "spent":  # seconds by stage
            right = isinstance(value, dict) and all(map(_is_number, value.values()))
        else:
            right = _is_number(value)
        if not right:
            yield f"has {value!r} as {name}{key}"


def _amounts(record: Mapping[str, Any], prefix: str, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if not _is_amount(record.get(name)):
            yield (
                f"has {record.get(name)!r} as {prefix}{name}" if name in record else f"has no {prefix}{name}"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_amount(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0
