"""Scenarios with the real Lightning and Accelerate: two sites of two ranks, as FSDP2 shards them there."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, ParallelismConfig
from ddp_parts import bits, net
from ddp_scenarios_adapters import _as_under_torchrun
from ddp_scenarios_faults import attempt
from ddp_worker import Place
from fsdp_parts import meshes, registered, shard, weights
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rtopk.adapters.accelerate import RTopKParallelismConfig, register
from rtopk.adapters.lightning import RTopKCallback

BATCH, STEPS = 4, 4  # a rank's examples in a step, and steps in an epoch
CLIP = 0.5  # of the gradient's norm


def density(epoch: int) -> float:
    return (0.05, 0.1)[epoch]


OPTIONS: dict[str, Any] = {"density": density, "counts": "epochs", "verify_every": 2}


def data(world: int) -> TensorDataset:
    rng = torch.Generator().manual_seed(3)
    examples = BATCH * STEPS * world
    return TensorDataset(torch.randn(examples, 20, generator=rng), torch.randn(examples, 5, generator=rng))


def loader(world: int) -> DataLoader:
    """Return data that the framework deals out to the ranks."""
    return DataLoader(data(world), batch_size=BATCH)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def by_hand(batches: Callable[[int], Iterable[Any]], *optimizers: list[int]) -> list[str]:
    """Train as the frameworks do, with a new optimizer for each list of epochs; weights and the rank's state."""
    model, state = registered(meshes(), **OPTIONS)
    for epochs in optimizers:
        optimizer = sgd(model)
        for epoch in epochs:
            state.set_epoch(epoch)
            for inputs, targets in batches(epoch):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
    return [weights(model), bits(state.state_dict())]


# -- Lightning


class Network(LightningModule):
    def __init__(self, sites: int = 2, poison: tuple[int, int] | None = None, native: bool = False) -> None:
        super().__init__()
        self.layers, self.sites, self.poison, self.native = net(), sites, poison, native
        self.mesh = None

    def configure_model(self) -> None:
        if self.mesh is None:  # Lightning calls this in every fit
            self.mesh = meshes(self.sites)
            shard(self.layers, self.mesh if self.native else self.mesh["shard"])

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        return loss * float("nan") if (self.global_rank, number) == self.poison else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def callback(**options: Any) -> RTopKCallback:
    return RTopKCallback(**{"mesh": lambda module: module.mesh["replicate"], **OPTIONS, **options})


def trainer(at: Place, epochs: int, rtop_k: RTopKCallback, distributed: bool = True) -> Trainer:
    strategy = ModelParallelStrategy(at.world, 1, save_distributed_checkpoint=distributed)
    return Trainer(
        accelerator="cpu", devices=at.world, strategy=strategy, max_epochs=epochs, callbacks=[rtop_k],
        gradient_clip_val=CLIP, default_root_dir=at.folder / "lightning", logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip


def fit(
    at: Place,
    epochs: int,
    checkpoint: Path | None = None,
    distributed: bool = True,
    rtop_k: RTopKCallback | None = None,
    **network: Any,
) -> tuple[Network, Trainer, RTopKCallback]:
    module, rtop_k = Network(**network), rtop_k or callback()
    made = trainer(at, epochs, rtop_k, distributed)
    made.fit(module, loader(at.world), ckpt_path=checkpoint)
    return module, made, rtop_k


def start_lightning(at: Place) -> None:
    warnings.simplefilter("ignore")  # Lightning's own
    _as_under_torchrun(at)


def found(module: Network, rtop_k: RTopKCallback) -> list[Any]:
    return [weights(module.layers), bits(rtop_k.state.state_dict()), rtop_k.state.step]


def lightning(at: Place) -> dict[str, Any]:
    """Two epochs at once, through a checkpoint, and as two fits; and the same by hand."""
    start_lightning(at)
    sampler = DistributedSampler(data(at.world), at.world, at.rank)  # as Lightning makes it

    def batches(epoch: int) -> DataLoader:
        sampler.set_epoch(epoch)
        return DataLoader(data(at.world), batch_size=BATCH, sampler=sampler)

    results: dict[str, Any] = {
        "by hand": by_hand(batches, [0, 1])[0],
        "two fits, by hand": by_hand(batches, [0], [0])[0],
    }
    whole, _, rtop_k = fit(at, 2)
    results["whole"] = found(whole, rtop_k)
    for distributed in (True, False):
        first, made, rtop_k = fit(at, 1, distributed=distributed)
        saved = at.folder / "lightning" / f"one-{distributed}.ckpt"
        made.save_checkpoint(saved)
        resumed, _, second = fit(at, 2, saved, distributed)
        results[f"resumed, {distributed}"] = found(resumed, second)
    trainer(at, 1, rtop_k).fit(first, loader(at.world))
    results["two fits"] = found(first, rtop_k)
    _, _, idle = fit(at, 1, saved, False)  # has nothing left to do
    results["nothing left"] = idle.state.step
    return results


def lightning_refused(at: Place) -> dict[str, Any]:
    """Wrong strategies, no mesh, native hybrid sharding, and a checkpoint of other shards."""
    start_lightning(at)
    said: dict[str, Any] = {}
    for strategy in (FSDPStrategy(), SingleDeviceStrategy()):
        elsewhere = SimpleNamespace(strategy=strategy, precision_plugin=None)
        said[type(strategy).__name__] = attempt(callback().on_fit_start, elsewhere, Network())
    said["no mesh"] = attempt(fit, at, 1, rtop_k=callback(mesh=None))
    said["native"] = attempt(fit, at, 1, native=True)
    saved = at.folder / "lightning" / "one-True.ckpt"
    said["other shards"] = attempt(fit, at, 2, saved, sites=1)
    return said


def lightning_skips(at: Place) -> dict[str, Any]:
    """NaN on one rank: all skip the step."""
    start_lightning(at)
    module, _, rtop_k = fit(at, 1, poison=(1, 2))
    finite = all(bool(parameter.to_local().isfinite().all()) for parameter in module.parameters())
    return {"finite": finite, "steps": [rtop_k.state.step, rtop_k.state.skipped]}


def lightning_one_site(at: Place) -> dict[str, Any]:
    """One site goes on from the checkpoint of two: its residual is the mean of theirs."""
    start_lightning(at)
    _, _, rtop_k = fit(at, 1, at.folder / "lightning" / "one-True.ckpt", sites=1)
    saved = torch.load(at.folder / "lightning" / "one-True.ckpt" / "meta.pt", weights_only=True)
    ranks = saved["callbacks"]["RTopKCallback"]["ranks"]
    own = [state["memory"]["residual"] for state in ranks if state["shard"] == rtop_k.state.shard]
    expected = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    residual = rtop_k.state.state_dict()["memory"]["residual"]
    return {
        "ranks": [[state["rank"], state["shard"]] for state in ranks],
        "same": all(torch.allclose(residual[name], expected[name]) for name in expected),
        "step": rtop_k.state.step,
    }


# -- Accelerate


@contextlib.contextmanager
def accelerator(at: Place, parallelism: ParallelismConfig | None, **plugin: Any) -> Iterator[Accelerator]:
    """Accelerate uses its FSDP plugin on GPUs only; tell it that these CPUs are some."""
    warnings.simplefilter("ignore")  # Accelerate's own
    _as_under_torchrun(at)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    made = FullyShardedDataParallelPlugin(
        **{"fsdp_version": 2, "auto_wrap_policy": "size_based_wrap", "min_num_params": 500, **plugin}
    )
    try:
        yield Accelerator(cpu=True, fsdp_plugin=made, parallelism_config=parallelism)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def accelerate(at: Place) -> dict[str, Any]:
    """Two epochs, the second one again after load_state, and the same by hand."""
    inputs, targets = data(at.world).tensors
    batches = [*zip(inputs.split(BATCH), targets.split(BATCH), strict=True)][at.rank :: at.world]
    results: dict[str, Any] = {"by hand": by_hand(lambda epoch: batches, [0, 1])}
    parallelism = RTopKParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        with accelerator(at, parallelism, state_dict_type=kind) as made:
            results[kind] = _continued(made, at, at.folder / kind)
    return results


def _continued(made: Accelerator, at: Place, folder: Path) -> dict[str, Any]:
    model = net()
    model, optimizer, dealt = made.prepare(model, sgd(model), loader(at.world))
    state = register(made, model, **OPTIONS)

    def epoch(number: int) -> list[str]:
        state.set_epoch(number)
        for features, labels in dealt:
            optimizer.zero_grad()
            made.backward(nn.functional.mse_loss(model(features), labels))
            made.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        return [weights(model), bits(state.state_dict())]

    epoch(0)
    made.save_state(str(folder))
    results: dict[str, Any] = {"once": epoch(1)}
    made.load_state(str(folder))
    results["again"] = epoch(1)
    results["files"] = sorted(path.name for path in (folder / "rtopk").iterdir())
    made.gradient_accumulation_steps = 2
    before = state.step
    for features, labels in dealt:
        with made.accumulate(model):
            made.backward(nn.functional.mse_loss(model(features), labels))
    results["accumulated"] = state.step - before
    return results


def accelerate_refused(at: Place) -> dict[str, Any]:
    """What Accelerate can be told that leaves rtopk nothing to do, or no way in."""
    said: dict[str, Any] = {}
    ways = {
        "native": (ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), 2),
        "one site": (RTopKParallelismConfig(dp_shard_size=4), 2),
        "fsdp1": (None, 1),
    }
    for name, (parallelism, version) in ways.items():
        with accelerator(at, parallelism, fsdp_version=version) as made:
            said[name] = attempt(register, made, net())
    warnings.simplefilter("ignore")
    said["cpu"] = attempt(Accelerator, cpu=True, parallelism_config=RTopKParallelismConfig(2, 2))
    AcceleratorState._reset_state(reset_partial_state=True)
    return said
