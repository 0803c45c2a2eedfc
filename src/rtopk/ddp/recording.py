"""`rtopk.ddp.record`: plain DDP that also writes each rank's own gradients, before they are averaged."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations by identity.

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from rtopk.ddp.buckets import trainable, views_by_name
from rtopk.layout import Layout, nothing, one_dimensional
from rtopk.replicas.recording import Recorder

log = logging.getLogger("rtopk")


class Recording:
    """What the hook keeps between the buckets of a step."""

    def __init__(self, model: DistributedDataParallel, folder: Path, steps: int, entries: int) -> None:
        parameters = trainable(model)
        self.layout = Layout.of(
            ((n, p) for n, p in parameters.items() if not one_dimensional(n, tuple(p.shape))), dense=nothing
        )  # biases and norms are sent in full
        if not self.layout.size:
            raise ValueError(
                "all parameters have one dimension and are sent in full: there is nothing to record"
            )
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self.group = model.process_group
        rank, nodes = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.recorder = Recorder(folder, rank, nodes, self.layout.size, steps, entries)
        self.gradients: dict[str, Tensor] = {}  # of the step under way


def record_hook(state: Recording, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Keep a bucket's gradients, write them at the last bucket, and average them as DDP does."""
    if state.recorder.left:
        views = views_by_name(state.names, bucket.parameters(), bucket.buffer())
        state.gradients |= {name: gradient.clone() for name, gradient in views.items()}
        if bucket.is_last():
            try:
                state.recorder.write(state.layout.flatten(state.gradients))
            except OSError as error:  # a full disk must not end the training
                log.warning("recording of gradients ends: %s", error)
                state.recorder.left = 0
            state.gradients = {}
    return allreduce_hook(state.group, bucket)
