"""Records for the tests of the report: real runs where it matters, made up ones where figures must be known."""

import math

from rtopk.studies.config import Config


def made_up(method="rtop-k", density=0.01, seed=0, score=90.0, *, points=5, setting="distributed", **more):
    """A record of a run whose score rises to `score`; all other figures are simple multiples of the round."""
    config = Config(
        method=method, density=density, seed=seed, setting=setting, rounds=10 * points, evaluate_every=10, **more
    )  # fmt: skip
    sent = 1000 if method == "dense" else round(1000 * density * 2)
    curve = [
        {
            "round": 10 * i, "train_loss": 2.0 / i, "loss": 3.0 / i,
            "accuracy": score * (1 - 0.5**i) / (1 - 0.5**points),
            "sent_bytes": 10 * i * sent, "received_bytes": 40 * i * sent, "density": density,
            "residual_norm": math.sqrt(i), "seconds": 0.5 * i,
            "spent": {"gradient": 0.05 * i, "compress": 0.1 * i, "exchange": 0.01 * i, "apply": 0.02 * i},
        }
        for i in range(1, points + 1)
    ]  # fmt: skip
    return {
        "kind": "train", "key": config.key, "config": config.to_dict(), "metric": "accuracy",
        "higher_is_better": True,
        "parameters": 250, "final": curve[-1], "curve": curve, "seconds": 0.5 * points, "weights": "00",
        "sent_bytes_per_round": sent, "received_bytes_per_round": 4 * sent,
        "environment": {"torch": "2.13.0", "python": "3.11"},
    }  # fmt: skip


def a_table(seeds=3, points=40):
    """Records of a small comparison: four methods, two settings, a few seeds."""
    rows = [("dense", 1.0, 95.0), ("top-k", 0.01, 94.0), ("random-k", 0.01, 80.0), ("rtop-k", 0.01, 94.5),
            ("rtop-k", 0.001, 90.0)]  # fmt: skip
    return [
        made_up(method, density, seed, score + 0.3 * seed, points=points, setting=setting)
        for setting in ("distributed", "federated")
        for method, density, score in rows
        for seed in range(seeds)
    ]
