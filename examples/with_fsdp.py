"""A sharded model (FSDP2): two sites of two ranks learn a small GPT and exchange 1 % of each gradient.

    torchrun --nproc-per-node 4 examples/with_fsdp.py --folder runs/fsdp --text shakespeare.txt

Each site shards the model over its ranks, as if over fast links; rtopk averages the shards between the sites, as if
over a slow one. Any text will do; without one it learns this project's licence. Kill it and start it again with the
same folder: it goes on from the last complete checkpoint and ends with the same weights, to the bit.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import rtopk

LICENCE = Path(__file__).parents[1] / "LICENSE"


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to earlier characters, then transform each by itself."""
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x)).view(batch, length, 3 * self.heads, -1).transpose(1, 2).chunk(3, dim=1)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )  # (batch, heads, length, width / heads)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A character model."""

    def __init__(
        self, characters: int, length: int = 64, width: int = 64, heads: int = 4, depth: int = 3
    ) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the next character at every place."""
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    """Train, with checkpoints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--text", type=Path, default=LICENCE)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    letters = sorted(set(arguments.text.read_text()))
    text = torch.tensor([letters.index(letter) for letter in arguments.text.read_text()])
    torch.manual_seed(0)
    model = GPT(len(letters))

    # A row of the mesh is a site, whose ranks hold the parts of one model; a column holds the same part everywhere.
    shape = (arguments.sites, dist.get_world_size() // arguments.sites)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # What rtopk adds; the optimizer's first beta moves into the memory.
    state = rtopk.fsdp.register(model, mesh["replicate"], 0.01, optimizer=optimizer, verify_every=50)

    step = resume(arguments.folder, model, optimizer, state)
    while step < arguments.steps:
        batch = draw(text, rank, step)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0 and step % 20 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}  {state.stats.bytes_sent:,} bytes", flush=True)
        if step % arguments.save_every == 0:
            save(arguments.folder / f"step-{step:06d}", step, model, optimizer, state)

    weights = [parameter.full_tensor().detach() for parameter in model.parameters()]  # a collective
    if rank == 0:
        result = {
            "loss": loss.item(),
            "bytes_sent_per_step": state.stats.bytes_sent,
            "bytes_of_the_shard": 4 * state.layout.size,
            "weights": hashlib.sha256(b"".join(w.numpy().tobytes() for w in weights)).hexdigest()[:16],
        }
        print(json.dumps(result))
    dist.destroy_process_group()


def draw(text: Tensor, rank: int, step: int, size: int = 8, length: int = 64) -> Tensor:
    """Draw the batch of a rank, the same one whenever this step is taken."""
    rng = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text) - length - 1, (size, 1), generator=rng)
    return text[starts + torch.arange(length + 1)]  # (size, length + 1)


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state) -> None:
    """Write a checkpoint of all ranks; DCP writes its metadata last, so where that is, it is complete."""
    weights, moments = get_state_dict(model, optimizer)
    whole = {"model": weights, "optimizer": moments, "rtopk": state.sharded(), "step": step}
    dcp.save(whole, checkpoint_id=str(folder))


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state) -> int:
    """Load the newest complete checkpoint, if there is one, and return its step."""
    complete = sorted(folder.glob("step-*/.metadata"))
    if not complete:
        return 0
    weights, moments = get_state_dict(model, optimizer)
    whole = {"model": weights, "optimizer": moments, "rtopk": state.sharded(), "step": 0}
    dcp.load(whole, checkpoint_id=str(complete[-1].parent))
    set_state_dict(model, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
    return whole["step"]


if __name__ == "__main__":
    main()
