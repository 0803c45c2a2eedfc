"""The demo: five nodes learn scikit-learn's digits, every method, both settings.

The rounds are chosen so that even at 99.9 % compression every coordinate is sent several times by the nodes
(rounds x density is 3 in the distributed setting, 2 in the federated one, each times five nodes); with fewer, a
comparison says nothing. The learning rate is one that suits every method: rTop-k's entries wait about n rounds
longer than top-k's and bear only a smaller one.
"""

from collections.abc import Sequence

from rtopk.experiments.config import Config

ROWS = (("dense", 1.0), ("top-k", 0.01), ("random-k", 0.01), ("rtop-k", 0.01), ("rtop-k", 0.001))


def configs(seeds: int, rounds: int = 3000) -> Sequence[Config]:
    """Return every run of the demo; all methods share every option but their own."""
    distributed = Config(rounds=rounds, learning_rate=0.02, evaluate_every=max(1, rounds // 30))
    federated = Config(
        setting="federated",
        rounds=2 * rounds // 3,
        batch=128,  # a round is an epoch of two batches
        learning_rate=0.05,
        evaluate_every=max(1, rounds // 45),
    )
    return [
        Config(**{**setting.to_dict(), "method": method, "density": density, "seed": seed})
        for setting in (distributed, federated)
        for method, density in ROWS
        for seed in range(seeds)
    ]
