"""Lightning: the callback and the strategy's hook are all there is.

torchrun --nproc-per-node 2 examples/with_lightning.py --folder runs/lightning
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rtopk.adapters.lightning import RTopKCallback, hook


class Network(LightningModule):
    """Which quarter of the inputs is largest?"""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        )

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def loader() -> DataLoader:
    """Return data that Lightning deals out to the ranks."""
    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.view(-1, 4, 8).sum(2).argmax(1)), batch_size=32)


def trainer(folder: Path, epochs: int) -> tuple[Trainer, RTopKCallback]:
    """Return a trainer that exchanges rTop-k payloads."""
    rtop_k = RTopKCallback(density=0.01)
    strategy = DDPStrategy(ddp_comm_state=rtop_k, ddp_comm_hook=hook)
    made = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[rtop_k],
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    return made, rtop_k


def weights(module: nn.Module) -> str:
    """Name the bits of a model."""
    vector = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    network = Network()
    made, rtop_k = trainer(arguments.folder, arguments.epochs)
    made.fit(network, loader())
    made.save_checkpoint(arguments.folder / "last.ckpt")
    if made.is_global_zero:
        print(json.dumps({"sent": rtop_k.state.stats.bytes_sent, "weights": weights(network)}))


if __name__ == "__main__":
    main()
