"""Hugging Face Accelerate: one call on a prepared model; its state goes with `save_state` and `load_state`.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
register(accelerator, model, density=0.001)
"""

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import nn

from rtopk import ddp
from rtopk.schedule import Schedule

FOLDER = "rtopk"  # inside a checkpoint of Accelerate
_registered: "WeakKeyDictionary[Accelerator, int]" = WeakKeyDictionary()  # the number of its last model


def register(
    accelerator: Accelerator, model: nn.Module, density: float | Schedule = 0.001, **options: Any
) -> ddp.State:
    """Make a prepared model exchange rTop-k payloads; takes the options of `rtopk.ddp.register`.

    Not `register_for_checkpointing`: what is registered there is written by the main process alone, and
    residuals differ between ranks.
    """
    scaler = options.pop("scaler", accelerator.scaler)
    state = ddp.register(model, density, scaler=scaler, **options)

    number = _registered[accelerator] = _registered.get(accelerator, -1) + 1
    folder = FOLDER if number == 0 else f"{FOLDER}_{number}"  # as Accelerate names its models' files

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        state.save(Path(output_dir) / folder)

    def load(models: list[nn.Module], input_dir: str) -> None:
        state.load(Path(input_dir) / folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return state
