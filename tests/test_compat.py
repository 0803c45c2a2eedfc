"""What differs between versions of torch, with the versions that are not installed played."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rtopk.fsdp
from rtopk import compat


def test_versions_are_compared_as_numbers(monkeypatch):
    for text, found in (("2.6.0+cu124", (2, 6)), ("2.15.0a0+git1", (2, 15))):
        monkeypatch.setattr(torch, "__version__", text)
        assert compat.version() == found
    compat.require_torch((2, 13), "this")  # 2.15 is newer than 2.13, and "2.15" < "2.2" as text


def test_fsdp_refuses_an_older_torch_and_names_the_one_it_needs(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(RuntimeError, match=r"rtopk.fsdp needs torch 2.\d+ or newer, found 2.6.0"):
        rtopk.fsdp.register(nn.Linear(1, 1), None)


@pytest.mark.parametrize("name", ["all_gather_single", "all_gather_into_tensor"])
def test_the_gather_goes_by_either_name(name, monkeypatch):
    for known in ("all_gather_single", "all_gather_into_tensor"):
        monkeypatch.delattr(dist, known, raising=False)
    monkeypatch.setattr(
        dist, name, lambda out, own, group, async_op: (out, own, group, async_op), raising=False
    )
    assert compat.all_gather_single("out", "own", "group") == ("out", "own", "group", True)
