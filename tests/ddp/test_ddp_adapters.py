"""Lightning and Accelerate, the real packages: their checkpoints bring every rank's residuals back."""

import json
import subprocess
import sys
from pathlib import Path

import ddp_scenarios_adapters as adapters
import pytest
from ddp_launch import Results, clean, environment, launch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def frameworks(shared: Path) -> Results:
    return launch(
        shared,
        "frameworks",
        2,
        [
            adapters.lightning,
            adapters.lightning_skips,
            adapters.accelerate,
            adapters.accelerate_pair,
            adapters.accelerate_adamw,
            adapters.accelerate_momentum,
        ],
    )


@pytest.mark.slow
def test_lightning_resumes_to_the_bit(frameworks: Results) -> None:
    one, two = clean(frameworks, "lightning")
    for found in (one, two):
        assert found["resumed"] == found["whole"]
        assert found["states"][0] == found["states"][1]
        assert found["steps"] == [16, 16]
        assert found["without"] != found["whole"], "the residuals must matter, or this shows nothing"
        assert found["callback_alone"] == "nothing raised"
    assert one["whole"] == two["whole"]
    assert one["residual"] != two["residual"]
    assert one["sent"] < 26128  # the gradient in fp32


@pytest.mark.slow
def test_lightning_skips_a_step_with_nan(frameworks: Results) -> None:
    for found in clean(frameworks, "lightning_skips"):
        assert found["finite"]
        assert found["first"] == [7, 1]
        assert found["other"] == 8  # from its own beginning, not from the residuals of another model


@pytest.mark.slow
def test_accelerate_keeps_two_models_apart(frameworks: Results) -> None:
    for found in clean(frameworks, "accelerate_pair"):
        assert found["loaded"] == found["saved"] != found["moved"]
        assert found["saved"][0] != found["saved"][1]


@pytest.mark.slow
def test_accelerates_adamw_gives_its_first_beta_to_the_memory(frameworks: Results) -> None:
    for found in clean(frameworks, "accelerate_adamw"):
        assert found["again"] == found["once"]
        assert found["betas"] == [0.0, 0.999]
        assert found["memory"] == ["residual", "velocity"]


@pytest.mark.slow
def test_accelerate_hides_no_momentum(frameworks: Results) -> None:
    for found in clean(frameworks, "accelerate_momentum"):
        assert found["AdamW"] == [True, 0.8, 0.0, 0.1, "nothing raised"]
        assert found["SGD"] == [True, 0.8, 0.0, 0.5, "nothing raised"]


@pytest.mark.slow
def test_accelerate_resumes_to_the_bit(frameworks: Results) -> None:
    one, two = clean(frameworks, "accelerate")
    assert two["printed"] == []
    found = json.loads(one["printed"][0])
    assert found["resumed"] == found["weights"]
    assert one["files"] == ["rtopk-rank0-of-2.state", "rtopk-rank1-of-2.state"]


def test_import_rtopk_imports_no_framework() -> None:
    names = ("lightning", "accelerate", "tensorboard")
    script = f"import sys, rtopk; print([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["with_lightning", "with_accelerate"])
def test_examples_run_under_torchrun(tmp_path: Path, name: str) -> None:
    found = torchrun([str(EXAMPLES / f"{name}.py"), "--folder", str(tmp_path)])
    assert json.loads(found.splitlines()[-1])["sent"] < 26128


def torchrun(script: list[str], *options: str, **variables: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, *options, *script],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
