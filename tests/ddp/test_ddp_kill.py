"""SIGKILL of a rank in the middle of a step: torchrun restarts the job, which ends with the same bits."""

import json
import re
from pathlib import Path

import pytest
from test_ddp_adapters import torchrun


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["all-gather", "all-reduce"])
def test_a_killed_job_ends_with_the_same_weights(tmp_path: Path, exchange: str) -> None:
    steps = ["--steps", "60", "--save-every", "20"]
    job = str(Path(__file__).with_name("ddp_fault_job.py"))
    how = {"RTOPK_TEST_EXCHANGE": exchange}
    quiet = torchrun([job, "--folder", str(tmp_path / "quiet"), *steps], RTOPK_TEST_DIES="0", **how)
    # torchrun's own store outlives the first life, and a rank that is early in the second may find the address
    # of a dead one in it (pytorch issue 135712); a store per life does not have that.
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **how}
    killed = torchrun([job, "--folder", str(tmp_path / "killed"), *steps], "--max-restarts", "1", **apart)
    lives = sorted(re.findall(r"life \d of rank \d", killed))
    assert lives == ["life 0 of rank 0", "life 0 of rank 1", "life 1 of rank 0", "life 1 of rank 1"]
    before, after = (json.loads(text.splitlines()[-1]) for text in (quiet, killed))
    assert after["weights"] == before["weights"]
    assert after["loss"] == before["loss"]
    saved = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert saved == ["step-000020", "step-000040", "step-000060"]
