"""The folder of the FSDP tests' launches: each runs once a session, also under pytest-xdist."""

from pathlib import Path

import pytest

from rtopk import compat


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    base = tmp_path_factory.getbasetemp()
    return (base.parent if hasattr(request.config, "workerinput") else base) / "fsdp"


@pytest.fixture(scope="session", autouse=True)
def supported() -> None:
    """Skip where FSDP2 lacks the hook; tests/test_compat.py sees that `register` refuses."""
    if compat.version() < compat.FSDP:
        pytest.skip(f"rtopk.fsdp needs torch {'.'.join(map(str, compat.FSDP))}")
