"""The training loop under torchrun: one node per process.

In the distributed setting gradients are exchanged by the DDP hook, in the federated one updates by an
all-gather. The same batches, draws, payloads and order of additions as with all nodes in one process, so the
weights are the same to the bit. Files are written by the first process; every process reads them.
"""

import io
import math
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rtopk import ddp
from rtopk.exchange import OWNER
from rtopk.layout import nothing, one_dimensional
from rtopk.local import UnevenGather
from rtopk.state_file import byte_tensor
from rtopk.studies.config import Config
from rtopk.studies.tasks import Task
from rtopk.studies.train.loop import Diverged, Run, seeded


def launched() -> bool:
    """Say whether torchrun, or something like it, has started several processes for this run."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leads() -> bool:
    """Say whether this process writes files and talks: the first one, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def barrier() -> None:
    """Wait for all processes of the launch."""
    if dist.is_initialized():
        dist.barrier()


class ProcessRun(Run):
    """A run of which this process holds one node."""

    def __init__(self, config: Config, task: Task | None = None) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        transport = UnevenGather()
        if config.method == "powersgd":
            raise ValueError(
                "under torchrun powersgd does not run; run it in one process, or use torch's own hook, "
                "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
            )
        config.require_common("torchrun")
        if config.nodes != transport.nodes:
            raise ValueError(
                f"nodes must be the number of processes, {transport.nodes}, got {config.nodes}; "
                f"add --nodes {transport.nodes}"
            )
        super().__init__(config, task, transport)
        self.gather = transport
        self.node = self.nodes[0]
        self.state: ddp.State | None = self._hook() if config.setting == "distributed" else None

    def _hook(self) -> ddp.State:
        config = self.config
        clip_norm = config.clip_norm * math.sqrt(config.nodes) if config.clip_norm else None
        self.hooked = DistributedDataParallel(self.model, forward_sync_buffers=False)
        state = ddp.register(
            self.hooked,
            config.make_density(),
            selector=config.make_selector(),
            memory=config.make_memory,
            values=config.values,
            mean=config.mean,
            weights=self.weights,
            exchange=config.exchange,
            owner_density=config.make_owner_density(),
            clip_norm=clip_norm,
            dense=one_dimensional if config.dense_biases else nothing,
            seed=config.seed,
            on_nonfinite="raise",
            optimizer=self.optimizer,
        )
        self.node.sparsifier, self.exchange = state.groups[0].sparsifier, state.groups[0].exchange
        return state

    @property
    def leads(self) -> bool:
        """Say whether this process writes files and talks."""
        return leads()

    def anyone(self, *wishes: bool) -> list[bool]:
        """Say of each wish whether any process has it, so that all act alike."""
        said = torch.stack(self.gather.exchange([torch.tensor(wishes, dtype=torch.uint8)]))
        return [bool(wanted) for wanted in said.any(0)]

    def advance(self) -> None:
        """Do one round; in the distributed setting backward exchanges the gradients."""
        if self.state is None:
            super().advance()
            return
        rate = self.config.rate(self.round)
        self.optimizer.zero_grad()
        with self.at(self.node), seeded(self.config.seed, "forward", self.node.number, self.round):
            loss = self.task.loss(self.hooked, self.batch(self.node, self.round))
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            except ddp.GradientNotFinite as error:  # on all ranks alike
                raise Diverged(str(error)) from error
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.sent += self.state.measured["bytes_sent"]
        self.received += self.state.measured["bytes_received"]
        self.loss = float(loss.detach())
        self.round += 1

    def evaluate(self) -> dict[str, float]:
        """Return the scores of the common weights, with the mean of all processes' buffers and losses."""
        everyone = [_read(raw) for raw in self._share(self._own_part())]
        own = self.nodes
        self.nodes = [_Buffers(part["buffers"]) for part in everyone]  # type: ignore[misc]
        try:
            scores = super().evaluate()
        finally:
            self.nodes = own
        self.loss = sum(part["loss"] for part in everyone) / len(everyone)
        return scores

    def residual_norm(self) -> float:
        """Return the mean norm of what the nodes keep back."""
        word = torch.tensor([self.node.residual_norm()], dtype=torch.float64).view(torch.uint8)
        norms = [float(message.view(torch.float64)) for message in self.gather.exchange([word])]
        return sum(norms) / len(norms)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all nodes; every process calls it."""
        parts = [_read(raw) for raw in self._share({**self.node.state_dict(), **self.exchange.state()})]
        kept = [part.pop(OWNER) for part in parts if OWNER in part]
        owners = {OWNER: torch.stack(kept).sum(0)} if kept else {}
        return {**super().state_dict(), **owners, "nodes": dict(enumerate(parts))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of all nodes."""
        super().load_state_dict(state)
        if self.state is not None:
            self.state.step = self.round

    def _own_part(self) -> dict[str, Any]:
        return {"buffers": self.node.buffers, "loss": self.loss}

    def _share(self, part: Mapping[str, Any]) -> list[bytes]:
        """Bring the parts of all processes to all of them."""
        buffer = io.BytesIO()
        torch.save(dict(part), buffer)
        raw = byte_tensor(buffer.getvalue())
        return [bytes(message.numpy()) for message in self.gather.exchange([raw])]


def _read(raw: bytes) -> dict[str, Any]:
    """Read another process's part; its tensors may be of a GPU that is not ours."""
    part: dict[str, Any] = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    return part


class _Buffers:
    """As much of another process's node as evaluation reads."""

    def __init__(self, buffers: dict[str, Tensor]) -> None:
        self.buffers = buffers
