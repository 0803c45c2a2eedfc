"""Training with few bits per value loses nothing: memory carries on what rounding left."""

import statistics

import pytest

from rtopk.studies.config import Config
from rtopk.studies.train.loop import Run

SEEDS, ROUNDS = 5, 1000


def accuracy(values, seed):
    run = Run(Config(rounds=ROUNDS, method="rtop-k", density=0.01, values=values, seed=seed))
    for _ in range(ROUNDS):
        run.advance()
    return run.evaluate()["accuracy"], 8 * run.sent / ROUNDS / round(0.01 * run.layout.size)


@pytest.mark.slow
def test_4_bit_values_lose_nothing():
    """Digits, five nodes, density 1 %, five seeds: the means differ by less than the spread between seeds.

    Prints the table of docs/wire-format.md: python -m pytest -m slow -s tests/wire/test_codec_training.py
    """
    table = {}
    for values in ("fp32", "4bit", "2bit"):
        found, bits = zip(*(accuracy(values, seed) for seed in range(SEEDS)), strict=True)
        table[values] = found
        mean, deviation = statistics.mean(found), statistics.stdev(found)
        print(f"\n| {values} | {bits[0]:.1f} | {mean:.2f} | {deviation:.2f} |", end="", flush=True)
    spread = max(statistics.stdev(table["fp32"]), statistics.stdev(table["4bit"]))
    assert abs(statistics.mean(table["4bit"]) - statistics.mean(table["fp32"])) <= spread
