"""Count the branches of selection that structured vectors reach.

The loops run here as the Python that they are written in. Prints JSON: for each function its branches and those
never taken. Run by test_structured.py in a process of its own.
"""

import json
import sys
import tempfile
from pathlib import Path

import coverage

WATCHED = {
    "rank.py": None,  # all functions
    "search.py": ("stride", "quantiles", "Search.aim", "Search.learn", "Search.take", "Search.put"),
    "loops.py": ("keep", "pick"),
    "cpu.py": ("pick",),
    "collect.py": ("collect", "without_search", "_cut", "_floor", "_piece", "_grown"),
}


def exercise():
    """Select from structured vectors, small ones mostly: Python is slow."""
    import numpy as np
    import structured
    import torch

    from rtopk import kernels
    from rtopk.kernels import draws, loops, rank
    from rtopk.kernels.search import LARGE, Search

    for module in (rank, loops):
        for name, found in list(vars(module).items()):
            if hasattr(found, "__wrapped__"):
                setattr(module, name, found.__wrapped__)
    torch.set_num_threads(1)
    kernels._stand_in = False  # torch's backend does not stand in for loops that are not compiled
    rank.ONE_BY_ONE_BELOW = 16  # so that few entries make the histogram narrow
    rng, search = np.random.default_rng(0), Search()
    for d in [65, 300, 3000] * 12 + [40_000] * 6:
        values = structured.vector(rng, d)[1]
        vector, r = torch.from_numpy(values), structured.ranks(rng, d)
        expected, k = structured.exact(values, r), max(1, r // 2)
        assert np.array_equal(kernels.largest(vector, r).numpy(), expected)
        rth = float(np.abs(values[expected]).min())
        for floor in (rth, 0.0, rth * 4):
            search.floor, search.wanted = floor, r
            found = kernels.scan(vector, search)
            if len(found) >= r:
                words = draws.draw_words(r, k, 7)
                picked = kernels.pick(found, r, words, k)
                assert np.array_equal(picked.positions.numpy(), expected[draws.set_bits(words, k).numpy()])
    vector, r = torch.arange(40_000.0).flip(0), LARGE
    for floor in (
        0.0,
        1e6,
        40_000.0 - r,
    ):  # r is large: a sample corrects the first two floors, not the third
        for _ in range(2):
            search.floor, search.wanted, search.size = floor, r, 39_990
            kernels.scan(vector, search)
    for kind in (vector, vector.double()):
        assert torch.equal(kernels.largest(kind, 39_999), torch.arange(39_999))
    fresh = Search()
    for magnitude, r in ((1.0, 10), (1e3, 10), (0.0, 10), (1.0, 20)):
        fresh.aim(r, 400)
        fresh.learn(magnitude, r)
    assert not fresh.aim(400, 400)
    try:
        kernels.pick(kernels.scan(vector, Search(1e6)), 1, draws.every_bit(1), 1)
    except ValueError as error:
        assert "need at least r=1 candidates, got 0" in str(error)  # noqa: PT017


def main():
    """Measure, and print a JSON report."""
    import rtopk

    home = Path(rtopk.__file__).parent / "kernels"
    watch = coverage.Coverage(data_file=None, branch=True, include=[str(home / name) for name in WATCHED])
    watch.exclude("raise AssertionError")
    watch.start()
    exercise()
    watch.stop()
    with tempfile.TemporaryDirectory() as folder:
        watch.json_report(outfile=f"{folder}/report.json")
        report = json.loads(Path(folder, "report.json").read_text())
    found = {}
    for path, part in report["files"].items():
        names = WATCHED[Path(path).name]
        for name, function in part["functions"].items():
            if name and (names is None or name in names):
                summary = function["summary"]
                found[f"{Path(path).stem}.{name}"] = {
                    "branches": summary["num_branches"],
                    "never taken": function["missing_branches"],
                    "never run": function["missing_lines"],
                }
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
