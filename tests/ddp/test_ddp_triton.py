"""The DDP tests once more, with Triton's programs under its interpreter in every rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = ("exact", "steps", "faults", "resume", "options", "owners")


@pytest.mark.slow
def test_every_scenario_on_the_triton_backend() -> None:
    """About 15 minutes: two ranks interpret, and the reference beside them does too."""
    pytest.importorskip("triton")
    ddp = [str(HERE / f"test_ddp_{name}.py") for name in FILES]
    backend = {"RTOPK_BACKEND": "triton", "TRITON_INTERPRET": "1", "RTOPK_TEST_TIMEOUT": "1200"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *ddp],
        cwd=HERE.parent.parent,
        env=os.environ | backend,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert " failed" not in done.stdout
