"""SIGKILL of a rank in the middle of a step: torchrun restarts the job, which ends with the same bits."""

import json
import re
from pathlib import Path

import pytest
from test_ddp_adapters import EXAMPLES, torchrun

FOUR = ("--nproc-per-node", "4")


@pytest.mark.slow
def test_a_killed_job_of_two_sites_ends_with_the_same_weights(tmp_path: Path) -> None:
    steps = ["--steps", "40", "--save-every", "10"]
    quiet = torchrun([str(EXAMPLES / "with_fsdp.py"), "--folder", str(tmp_path / "quiet"), *steps], *FOUR)
    job = str(Path(__file__).with_name("fsdp_fault_job.py"))
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see tests/ddp/test_ddp_kill.py
    killed = torchrun(
        [job, "--folder", str(tmp_path / "killed"), *steps], *FOUR, "--max-restarts", "1", **apart
    )
    lives = sorted(re.findall(r"life \d of rank \d", killed))
    assert lives == [f"life {life} of rank {rank}" for life in range(2) for rank in range(4)]
    before, after = (json.loads(text.splitlines()[-1]) for text in (quiet, killed))
    assert after["weights"] == before["weights"]
    assert after["loss"] == before["loss"]
