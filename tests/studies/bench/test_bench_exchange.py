"""`rtopk bench exchange`: what a node receives, counted on messages."""

import json

import pytest

from rtopk.studies.bench.exchange import QUICK, ExchangePlan, count


@pytest.fixture(scope="module")
def rows():
    return list(count(QUICK))


def test_an_all_gather_grows_and_an_all_reduce_does_not(rows):
    for density in QUICK.densities:
        by = {row.nodes: row for row in rows if row.density == density}
        assert by[32].all_gather == pytest.approx(31 * by[2].all_gather)
        # 2 k (n - 1) / n entries, and some bytes for each part, which are few entries in so small a model.
        assert by[8].all_reduce < by[32].all_reduce < 31 / 32 / (7 / 8) * by[8].all_reduce + 2 * 40 * 32
        assert by[32].all_reduce < by[32].all_gather / 7
        assert by[32].all_reduce < by[32].dense / 10


def test_owners_get_alike(rows):
    for row in rows:
        assert row.fullest < 1.15


def test_the_command_prints_json_and_draws(rtopk, tmp_path):
    ended = rtopk("bench", "exchange", "--quick", "--json", "--picture", tmp_path / "exchange.png")
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)["rows"]) == len(QUICK.nodes) * len(QUICK.densities)
    assert (tmp_path / "exchange.png").read_bytes()[:4] == b"\x89PNG"


def test_real_models_are_the_default():
    assert ExchangePlan().models == ("resnet18", "lstm1500")
    assert max(ExchangePlan().nodes) == 256
