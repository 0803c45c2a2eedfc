"""What a federation costs on the wire, with and without compression, engine included.

Both runs are deployments whose clients talk to the server through a counting proxy. Bytes are those of the
TCP streams: payloads, Flower's records, gRPC, polling and heartbeats. `steady` is a round after the first;
`total` is everything from the first connection to the end, the app itself and the first model too.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtopk.studies.federation.engines import deploy
from rtopk.studies.federation.options import Federation


def compare(
    federation: Federation,
    folder: Path,
    on_run: Callable[[str], None] = lambda name: None,
    *,
    brief: bool = False,
) -> dict[str, Any]:
    """Run dense FedAvg, the federation as given and (unless brief) with other ways down; return the bytes."""
    variants = {
        "dense FedAvg": dataclasses.replace(federation, compressed=False),
        "rtopk": federation,
        "rtopk, first model sent": dataclasses.replace(federation, initial_known=False),
        "rtopk, exact downlink": dataclasses.replace(
            federation, downlink_density=1.0, downlink_values="fp32"
        ),
    }
    rows: list[dict[str, Any]] = []
    for number, (name, variant) in enumerate(list(variants.items())[: 2 if brief else 4]):
        on_run(name)
        rows.append(row(name, deploy(variant, folder / str(number))))
    for entry in rows:
        entry["steady_times_less"] = rows[0]["steady"] / entry["steady"]
        entry["total_times_less"] = rows[0]["total"] / entry["total"]
    return {"config": federation.config.to_dict(), "rows": rows}


def row(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of one deployment."""
    rounds = {
        int(number): entry["up"] + entry["down"] for number, entry in record["wire"]["by_round"].items()
    }
    last = max(rounds)
    later = [size for number, size in rounds.items() if number >= 2]
    own = record.get("ledger", {})
    content = sum(entry[f"{way}_{part}"] for entry in own.values() for way in ("up", "down")
                  for part in ("payload", "framing"))  # fmt: skip
    total = record["wire"]["up"] + record["wire"]["down"]
    return {
        "name": name,
        "rounds": last,
        "parameters": record["parameters"],
        "up": record["wire"]["up"],
        "down": record["wire"]["down"],
        "total": total,
        "steady": sum(later) / len(later),
        "engine": total - content if own else None,
        "weights": record["weights"],
    }
