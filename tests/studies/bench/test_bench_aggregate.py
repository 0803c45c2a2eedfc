"""The benchmark of the aggregation runs, and its numbers are those of one aggregation."""

import json

from typer.testing import CliRunner

from rtopk.tools.cli import app


def test_small():
    done = CliRunner().invoke(app, ["bench", "aggregate", "--clients", "3", "--d", "50000", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert 3 * 500 * 4 < found["payload_bytes"] < 3 * 500 * 12
    assert found["average_ms"] > 0
    assert found["dense_bytes"] == 200_000
