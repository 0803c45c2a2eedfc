"""Scenarios with the real Lightning and Accelerate."""

import copy
import importlib.util
import logging
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from ddp_parts import bits
from ddp_scenarios_faults import attempt
from ddp_worker import Place

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _as_under_torchrun(at: Place) -> None:
    os.environ.update(
        RANK=str(at.rank),
        LOCAL_RANK=str(at.rank),
        WORLD_SIZE=str(at.world),
        LOCAL_WORLD_SIZE=str(at.world),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29511",
        ACCELERATE_USE_CPU="true",
    )


def lightning(at: Place) -> dict[str, Any]:
    """Two epochs of eight steps at once, and one and one through a checkpoint of Lightning."""
    warnings.simplefilter("ignore")  # Lightning's own
    _as_under_torchrun(at)
    made = example("with_lightning")
    folder = at.folder / "lightning"

    def fit(epochs: int, checkpoint: Path | None = None) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        network = made.Network()
        trainer, rtop_k = made.trainer(folder, epochs)
        trainer.fit(network, made.loader(), ckpt_path=checkpoint)
        return network, trainer, rtop_k

    whole, _, undisturbed = fit(2)
    _, trainer, first = fit(1)
    saved = folder / "one.ckpt"
    trainer.save_checkpoint(saved)
    residual = bits(first.state.state_dict()["memory"])
    resumed, _, second = fit(2, saved)
    forgetful = made.RTopKCallback.load_state_dict
    made.RTopKCallback.load_state_dict = lambda self, state: None
    without, _, _ = fit(2, saved)
    made.RTopKCallback.load_state_dict = forgetful

    from lightning.pytorch import Trainer

    from rtopk.adapters.lightning import RTopKCallback

    plain = Trainer(
        accelerator="cpu", devices=at.world, strategy="ddp", max_steps=1, callbacks=[RTopKCallback(0.01)],
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        default_root_dir=folder,
    )  # fmt: skip
    said = attempt(plain.fit, made.Network(), made.loader())
    return {
        "whole": bits(whole),
        "resumed": bits(resumed),
        "without": bits(without),
        "residual": residual,
        "states": [bits(undisturbed.state.state_dict()), bits(second.state.state_dict())],
        "steps": [undisturbed.state.step, second.state.step],
        "sent": second.state.stats.bytes_sent,
        "callback_alone": said,
    }


def lightning_skips(at: Place) -> dict[str, Any]:
    """NaN on one rank: Lightning goes backward inside optimizer.step. Then the callback serves another model."""
    warnings.simplefilter("ignore")  # Lightning's own
    _as_under_torchrun(at)
    made = example("with_lightning")

    class Poisoned(made.Network):
        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = super().training_step(batch, number)
            return loss * float("nan") if (at.rank, number) == (1, 3) else loss

    network = Poisoned()
    trainer, rtop_k = made.trainer(at.folder / "lightning", 1)
    trainer.fit(network, made.loader())
    first = [rtop_k.state.step, rtop_k.state.skipped]
    again, _ = made.trainer(at.folder / "lightning", 1)
    again.strategy._ddp_comm_state = rtop_k
    again.callbacks = [rtop_k]
    again.fit(made.Network(), made.loader())
    return {
        "finite": all(bool(parameter.isfinite().all()) for parameter in network.parameters()),
        "first": first,
        "other": rtop_k.state.step,
    }


def accelerate_pair(at: Place) -> dict[str, Any]:
    """Two models with one Accelerator: each has its own residuals again after load_state."""
    warnings.simplefilter("ignore")  # Accelerate's own
    _as_under_torchrun(at)
    from accelerate import Accelerator

    from rtopk.adapters.accelerate import register

    accelerator = Accelerator(cpu=True)
    models = accelerator.prepare(*(torch.nn.Linear(8, 8) for _ in range(2)))
    states = [register(accelerator, model, density=0.1) for model in models]

    def go(scale: float) -> list[str]:
        for number, model in enumerate(models):
            accelerator.backward(model(torch.full((2, 8), scale + number + at.rank)).square().mean())
        return [bits(state.state_dict()) for state in states]

    saved = go(1.0)
    accelerator.save_state(str(at.folder / "accelerate-pair"))
    moved = go(2.0)
    accelerator.load_state(str(at.folder / "accelerate-pair"))
    return {"saved": saved, "moved": moved, "loaded": [bits(state.state_dict()) for state in states]}


def accelerate_adamw(at: Place) -> dict[str, Any]:
    """The optimizer that Accelerate has wrapped gives its first beta to the memory, after load_state too."""
    warnings.simplefilter("ignore")  # Accelerate's own
    _as_under_torchrun(at)
    from accelerate import Accelerator

    from rtopk.adapters.accelerate import register

    logging.getLogger("rtopk").setLevel(logging.ERROR)
    accelerator = Accelerator(cpu=True)
    network = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))
    state = register(accelerator, model, density=0.1, optimizer=optimizer)

    def go() -> str:
        for step in range(3):
            optimizer.zero_grad()
            accelerator.backward(model(torch.full((2, 8), 1.0 + step + at.rank)).square().mean())
            optimizer.step()
        return bits([bits(network), bits(state.state_dict()), bits(optimizer.state_dict())])

    go()
    accelerator.save_state(str(at.folder / "accelerate-adamw"))
    once = go()
    accelerator.load_state(str(at.folder / "accelerate-adamw"))
    return {
        "once": once,
        "again": go(),
        "betas": list(optimizer.param_groups[0]["betas"]),
        "memory": sorted(state.state_dict()["memory"]),
    }


def accelerate_momentum(at: Place) -> dict[str, Any]:
    """`prepare` wraps an optimizer, and its momentum moves all the same; a checkpoint of before included."""
    warnings.simplefilter("ignore")  # Accelerate's own
    _as_under_torchrun(at)
    from accelerate import Accelerator

    from rtopk.adapters.accelerate import register

    accelerator, found = Accelerator(cpu=True), {}
    for kind, given in (("AdamW", {"betas": (0.8, 0.95)}), ("SGD", {"momentum": 0.8})):
        network = torch.nn.Linear(8, 8)
        own = getattr(torch.optim, kind)(network.parameters(), lr=0.01, weight_decay=0.1, **given)
        model, optimizer = accelerator.prepare(network, own)
        before = copy.deepcopy(optimizer.state_dict())
        state = register(accelerator, model, density=0.1, optimizer=optimizer)
        optimizer.load_state_dict(before)
        accelerator.backward(model(torch.ones(2, 8)).square().mean())
        said = attempt(optimizer.step)
        group = own.param_groups[0]
        moved = [group["betas"][0] if kind == "AdamW" else group["momentum"], round(group["weight_decay"], 9)]
        found[kind] = [state.takes_over, state.groups[0].sparsifier.memory.momentum, *moved, said]
    return found


def accelerate(at: Place) -> dict[str, Any]:
    """The example saves with save_state, goes on, and goes on again from load_state."""
    warnings.simplefilter("ignore")  # Accelerate's own
    _as_under_torchrun(at)
    import torch.distributed as dist

    module = example("with_accelerate")
    printed: list[str] = []
    module.print = printed.append
    destroy, dist.destroy_process_group = dist.destroy_process_group, lambda *args: None
    sys.argv = ["with_accelerate", "--folder", str(at.folder / "accelerate")]
    try:
        module.main()
    finally:
        dist.destroy_process_group = destroy
    files = sorted(path.name for path in (at.folder / "accelerate" / "checkpoint" / "rtopk").iterdir())
    return {"printed": printed, "files": files}
