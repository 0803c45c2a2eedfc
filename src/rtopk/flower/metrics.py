"""Check the metrics of replies, in training and evaluation: finite numbers, the same form for all, bounded weights.

The inner strategy multiplies, adds and compares what clients report, and weighs clients by the weight they claim.
So one odd metric would stop it, and one large weight would decide the round.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable

from flwr.app import Message, MetricRecord, RecordDict

from rtopk.flower.norms import median
from rtopk.flower.refusal import RefusedError

WEIGHT_LIMIT = 2.0**40  # examples
WEIGHT_LEAST = 2.0**-40  # much less would vanish in float32
NAME_LIMIT = 200  # characters of the name of a record or metric
Shape = tuple[object, ...]
Refuse = Callable[[int, str], None]  # node, reason
log = logging.getLogger("rtopk.flower")


def check(content: RecordDict, key: str, limit: float) -> float:
    """Return the weight of a reply; RefusedError unless its metrics are finite and the weight is within bounds."""
    if len(content.metric_records) != 1:
        raise RefusedError(f"a reply must hold one MetricRecord, got {len(content.metric_records)}")
    record = next(iter(content.metric_records.values()))
    for name in (*content, *record):  # Flower logs them
        if len(name) > NAME_LIMIT or not name.isprintable():
            raise RefusedError(f"names must be at most {NAME_LIMIT} printable characters, got {name!r}")
    for name, value in record.items():
        if not all(math.isfinite(number) for number in (value if isinstance(value, list) else [value])):
            raise RefusedError(f"its metric {name!r} is not finite")
    own = record.get(key)
    if not isinstance(own, int | float):
        raise RefusedError(f"its metrics have no number {key!r}")
    if not WEIGHT_LEAST <= own <= limit:
        raise RefusedError(f"its weight must be in [{WEIGHT_LEAST:g}, {limit:g}], got {own}")
    return float(own)


def weight(content: RecordDict, key: str) -> float:
    """Return the weight of a checked reply."""
    return float(next(iter(content.metric_records.values()))[key])  # type: ignore[arg-type]


def alike(messages: Iterable[Message], refuse: Refuse, last: Shape) -> tuple[list[Message], Shape]:
    """Keep the replies whose records have the most common names and lengths; a tie goes to `last`.

    Also return those names and lengths: the next `last`.
    """
    shapes = [(message, _shape(message.content)) for message in messages]
    if not shapes:
        return [], last
    counts = Counter(shape for _, shape in shapes)
    usual = max(counts, key=lambda shape: (counts[shape], shape == last))
    kept = []
    for message, shape in shapes:
        if shape == usual:
            kept.append(message)
        else:
            refuse(message.metadata.src_node_id, f"its metrics {shape} are not those of the others")
    return kept, usual


def cap(messages: Iterable[Message], key: str, ratio: float) -> None:
    """Cap weights at `ratio` times the median of these replies, in the replies."""
    weights = {message: weight(message.content, key) for message in messages}
    limit = ratio * median(list(weights.values()))
    for message, own in weights.items():
        if own > limit:
            node = message.metadata.src_node_id
            log.warning("node %d: weight %g counts as %g, %g times the median", node, own, limit, ratio)
            name, record = next(iter(message.content.metric_records.items()))
            message.content[name] = MetricRecord({**dict(record), key: limit})


def _shape(content: RecordDict) -> Shape:
    metrics = [
        (name, *sorted((key, len(v) if isinstance(v, list) else "number") for key, v in record.items()))
        for name, record in content.metric_records.items()
    ]
    return (*sorted(content.array_records), *metrics)
