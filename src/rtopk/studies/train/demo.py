"""The demo: five nodes learn scikit-learn's digits, every method, both settings.

The rounds are chosen so that even at 99.9 % compression the five nodes together send every coordinate several
times (nodes x rounds x density is 4.5 in the distributed setting, 2.25 in the federated one); with fewer, a
comparison says nothing. Three seeds say more than two with more rounds: their 95 % intervals are a third as wide.
The learning rate is one that suits every method: rTop-k's entries wait about n rounds longer than top-k's and bear
only a smaller one.
"""

from collections.abc import Sequence

from rtopk.studies.train.config import Config

ROWS = (("dense", 1.0), ("top-k", 0.01), ("random-k", 0.01), ("rtop-k", 0.01), ("rtop-k", 0.001))


def configs(seeds: int, rounds: int = 900) -> Sequence[Config]:
    """Return every run of the demo; all methods share every option but their own."""
    distributed = Config(rounds=rounds, learning_rate=0.02, evaluate_every=max(1, rounds // 30))
    federated = Config(
        setting="federated",
        rounds=rounds // 2,
        batch=128,  # a round is an epoch of two batches
        learning_rate=0.05,
        evaluate_every=max(1, rounds // 60),
    )
    return [
        Config(**{**setting.to_dict(), "method": method, "density": density, "seed": seed})
        for setting in (distributed, federated)
        for method, density in ROWS
        for seed in range(seeds)
    ]
