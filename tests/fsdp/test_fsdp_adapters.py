"""Lightning and Accelerate, the real packages, with models that FSDP2 shards: two sites of two ranks on Gloo."""

from pathlib import Path

import fsdp_scenarios_adapters as adapters
import pytest
from ddp_launch import Results, clean
from test_fsdp import run

pytestmark = pytest.mark.slow  # four ranks load both packages


@pytest.fixture(scope="session")
def frameworks(shared: Path) -> Results:
    scenarios = [
        adapters.lightning,
        adapters.lightning_refused,
        adapters.accelerate,
        adapters.accelerate_refused,
    ]
    return run(shared, "frameworks", 4, scenarios)


def test_lightning_trains_as_by_hand(frameworks: Results) -> None:
    ranks = clean(frameworks, "lightning")
    assert len({rank["whole"][0] for rank in ranks}) == 1
    assert len({rank["whole"][1] for rank in ranks}) == 4  # every rank has a residual of its own
    for rank in ranks:
        assert rank["whole"][0] == rank["by hand"]
        assert rank["two fits"][0] == rank["two fits, by hand"] != rank["by hand"]
        assert (rank["whole"][2], rank["two fits"][2]) == (8, 8)


@pytest.mark.parametrize("distributed", [True, False])
def test_lightning_resumes_to_the_bit(frameworks: Results, distributed: bool) -> None:
    for rank in clean(frameworks, "lightning"):
        assert rank[f"resumed, {distributed}"] == rank["whole"]


def test_lightning_keeps_the_state_of_a_checkpoint_that_is_done(frameworks: Results) -> None:
    assert {rank["nothing left"] for rank in clean(frameworks, "lightning")} == {4}


@pytest.mark.parametrize(("name", "reason"), [
    ("FSDPStrategy", "TypeError: RTopKCallback needs DDP or FSDP2, this strategy is FSDPStrategy (FSDP1)"),
    ("SingleDeviceStrategy", "this strategy is SingleDeviceStrategy; use Trainer(strategy=DDPStrategy(...))"),
    ("no mesh", "ValueError: RTopKCallback needs the mesh of the replicas"),
    ("native", "FSDP reduces the whole gradient between replicas before rtopk sees it"),
    ("other shards", "another number of shards goes on from torch.distributed.checkpoint"),
])  # fmt: skip
def test_lightning_is_refused_with_the_fix(frameworks: Results, name: str, reason: str) -> None:
    for rank in clean(frameworks, "lightning_refused"):
        assert reason in rank[name], rank[name]


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerate_trains_as_by_hand_and_resumes_to_the_bit(frameworks: Results, kind: str) -> None:
    ranks = clean(frameworks, "accelerate")
    assert len({rank["by hand"][0] for rank in ranks}) == 1
    for rank in ranks:
        assert rank[kind]["once"] == rank[kind]["again"] == rank["by hand"]
        assert rank[kind]["accumulated"] == 2  # exchanges for four batches
        assert rank[kind]["files"] == [
            f"rtopk-rank{replica}-of-2-shard-{part}-of-2.state" for replica in range(2) for part in range(2)
        ]


@pytest.mark.parametrize(("name", "reason"), [
    ("native", "pass parallelism_config=RTopKParallelismConfig(dp_replicate_size=sites"),
    ("one site", "with 2 sites or more"),
    ("fsdp1", "use FullyShardedDataParallelPlugin(fsdp_version=2)"),
    ("cpu", "but got DistributedType.MULTI_CPU"),  # what is missing on CPUs; docs/fsdp.md says so
])  # fmt: skip
def test_accelerate_is_refused_with_the_fix(frameworks: Results, name: str, reason: str) -> None:
    for rank in clean(frameworks, "accelerate_refused"):
        assert reason in rank[name], rank[name]


@pytest.mark.slow
def test_lightning_skips_a_step_with_nan(shared: Path) -> None:
    for rank in clean(run(shared, "nan", 4, [adapters.lightning_skips]), "lightning_skips"):
        assert rank["finite"]
        assert rank["steps"] == [3, 1]


@pytest.mark.slow
def test_lightning_goes_on_with_one_site(frameworks: Results, shared: Path) -> None:
    for rank in clean(run(shared, "one-site", 2, [adapters.lightning_one_site]), "lightning_one_site"):
        assert rank["ranks"] == [[0, "0 of 2"], [0, "1 of 2"], [1, "0 of 2"], [1, "1 of 2"]]
        assert rank["same"]
        assert rank["step"] == 4
