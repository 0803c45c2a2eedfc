"""Memory is what docs/ddp.md says, measured on the resident size of processes; and where payloads travel."""

import pytest
import torch
from ddp_launch import Results, clean

from rtopk.transport import carrier

SLACK = 0.3  # vectors: the ranks differ by less than 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("case", "vectors"), [("dense", 12), ("quarter", 6.5), ("sparse", 2)])
def test_memory_of_four_ranks(costly: Results, case: str, vectors: float) -> None:
    for found in clean(costly, "memory"):
        assert vectors - 2 <= found[case] <= vectors + SLACK


@pytest.mark.slow
def test_memory_of_eight_ranks(eight: Results) -> None:
    for found in clean(eight, "memory"):
        assert 15 <= found["dense"] <= 19 + SLACK


def test_a_group_without_a_named_backend(four: Results) -> None:
    results = clean(four, "without_backend")
    for found in results:
        assert (found["backend"], found["device"]) == ("undefined", "cpu")
    assert len({found["weights"] for found in results}) == 1


@pytest.mark.parametrize(
    ("backends", "device", "expected"),
    [
        ("cpu:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:3", "cuda:3"),  # not the current device
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:mpi", "cuda:1", "cpu"),
        ("xpu:xccl", "xpu:0", "xpu:0"),
    ],
)
def test_payloads_travel_where_the_parameters_are(backends: str, device: str, expected: str) -> None:
    assert carrier(backends, torch.device(device)) == torch.device(expected)


def test_a_device_that_no_backend_serves() -> None:
    with pytest.raises(ValueError, match="the process group has no backend for cpu"):
        carrier("cuda:nccl", torch.device("cpu"))
