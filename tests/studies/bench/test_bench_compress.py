"""The bench of the compress step: every row is there, every method does its work, bars are judged right."""

import json

import pytest
import torch
from typer.testing import CliRunner

from rtopk.studies.bench import compress, real, synthetic
from rtopk.studies.bench.compress import METHODS, CompressPlan, CompressRow, bars
from rtopk.tools.cli import app


@pytest.mark.parametrize("name", ["rtopk", "hook", "momentum", "topk", "dgc"])
def test_a_method_takes_k_of_the_r_largest_out(name):
    gradient = synthetic(20_000, 1).vectors[0]
    method = METHODS[name](20_000, 100, 500)
    method.step(gradient, 0)
    residual = method.memory.residual if name in ("rtopk", "hook", "momentum") else method.residual
    taken = (residual != gradient).nonzero()[:, 0]
    assert taken.numel() == 100
    assert not residual[taken].any()
    least = gradient.abs().topk(650).values.min()  # DGC's threshold is within 30 % of r = 500
    assert bool((gradient[taken].abs() >= least).all())


def test_json_has_every_row(monkeypatch):
    monkeypatch.setattr(compress, "QUICK", CompressPlan(sizes=(20_000,), repetitions=2, rivals_every=1))
    result = CliRunner().invoke(app, ["bench", "compress", "--quick", "--json", "--threads", "1"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert set(rows[0]) == {"d", "density", "threads", "data", "method", "ms", "over_floor"}
    seen = {(row["density"], row["threads"], row["data"], row["method"]) for row in rows}
    assert len(seen) == len(rows) == 2 * 1 * 2 * 6
    assert {row["data"] for row in rows} == {"synthetic", "real"}
    assert all(row["over_floor"] == 1.0 for row in rows if row["method"] == "floor")
    assert all(row["ms"] > 0.0 for row in rows)


def test_bars_are_judged():
    def rows(d, ms, rtopk, dgc, topk):
        ratios = {"floor": 1.0, "rtopk": rtopk, "dgc": dgc, "topk": topk}
        return [CompressRow(d, 0.001, 1, "real", name, ms * ratio, ratio) for name, ratio in ratios.items()]

    good = bars(rows(11_200_000, 3.0, 1.4, 4.5, 22.0) + rows(66_000_000, 17.0, 1.4, 4.5, 22.0))
    assert len(good) == 7
    assert all(bar.met for bar in good)
    bad = bars(rows(11_200_000, 3.0, 1.8, 4.5, 22.0) + rows(66_000_000, 30.0, 1.8, 4.5, 22.0))
    assert not any(bar.met for bar in bad)


def test_a_step_is_timed_beside_a_spinning_neighbour():
    one, two = compress.beside_neighbour(synthetic(300_000, 1), 0.01, compress.WARM + 2)
    assert one > 0.0 < two


def test_real_gradients_are_those_of_a_model():
    gradients = real(30_000, 2)
    assert "digits" in gradients.source
    assert not torch.equal(gradients.vectors[0], gradients.vectors[1])
    assert all(vector.isfinite().all() for vector in gradients.vectors)
