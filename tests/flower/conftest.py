"""Tests of the Flower part share a harness in this folder."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _threads():
    """Apps that run in this process set the number of threads; other tests want theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
