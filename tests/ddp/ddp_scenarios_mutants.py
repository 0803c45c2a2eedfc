"""The known bugs of DDP hooks (DESIGN section 5), put into ours: each runs the scenario whose test must notice."""

from typing import Any
from unittest import mock

import ddp_scenarios_exact as exact
import ddp_scenarios_faults as faults
import ddp_scenarios_resume as resume
import torch
from ddp_worker import Place

from rtopk import defaults, layout, top_k
from rtopk.aggregate import RunningMean
from rtopk.ddp import buckets
from rtopk.replicas import checkpoint, gradients, group, rounds, state
from rtopk.replicas.options import Options


def residuals_lost_when_buckets_change(at: Place) -> dict[str, Any]:
    """Bug 1: state keyed by bucket is gone when DDP rebuilds its buckets."""
    finish = rounds.Round.finish

    def forget(this: Any, gradients: Any) -> None:
        own = this.state
        if getattr(own, "seen", len(own.buckets)) != len(own.buckets):
            for part in own.groups:
                if hasattr(part.sparsifier.memory, "residual"):
                    part.sparsifier.memory.residual.zero_()
        own.seen = len(own.buckets)
        finish(this, gradients)

    with mock.patch.object(rounds.Round, "finish", forget):
        return exact.equals_reference(at)


def residuals_of_rank_0_for_all(at: Place) -> dict[str, Any]:
    """Bugs 2 and 3: every rank goes on from rank 0's file."""
    resume.first_half(at)
    torch.distributed.barrier()

    def rank_0(own: Any, directory: Any) -> Any:
        saved = checkpoint.read(directory / checkpoint.file_name(0, own.world_size))
        return [{**saved, "rank": own.rank}]

    with mock.patch.object(checkpoint, "_own_share", rank_0):
        return resume.second_half(at)


def sum_instead_of_mean(at: Place) -> dict[str, Any]:
    """Bug 5: nobody divides by the world size."""
    result = RunningMean.result

    def total(running: RunningMean) -> torch.Tensor:
        return result(running) * running.nodes

    with mock.patch.object(RunningMean, "result", total):
        return exact.dense_phase_is_plain_ddp(at)


def unused_parameters_drained(at: Place) -> dict[str, Any]:
    """Bug 6: the residual of an unused parameter is sent, and DDP throws it away."""
    with mock.patch.object(buckets.State, "_watch_use"):
        return faults.unused(at)


def residuals_in_scaled_units(at: Place) -> dict[str, Any]:
    """Bug 7: the loss scale moves and the residual does not know."""
    with mock.patch.object(state.State, "scale", 1.0):
        return faults.grad_scaler(at)


def skipped_steps_change_the_residual(at: Place) -> dict[str, Any]:
    """Bug 7: ranks that were well have taken their gradient in already."""
    with mock.patch.object(group.Group, "rollback"):
        return faults.not_finite(at)


def momentum_twice(at: Place) -> dict[str, Any]:
    """Bug 9: momentum correction beside an optimizer with momentum."""
    with (
        mock.patch.object(gradients, "refuse_momentum"),
        mock.patch.object(state, "refuse_momentum"),
    ):
        return faults.refused(at)


def biases_compete(at: Place) -> dict[str, Any]:
    """Bug 10: biases and norms are sparsified by default."""
    with mock.patch.dict(Options.__init__.__kwdefaults__, {"dense": layout.nothing}):
        return exact.dense_phase_is_plain_ddp(at)


class FirstK:
    """Of the r candidates, keep the first k in the order of their positions."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def __repr__(self) -> str:
        return f"FirstK({self.nodes})"

    def select(self, vector: torch.Tensor, k: int, rng: torch.Generator) -> torch.Tensor:
        return top_k(vector, min(vector.numel(), self.nodes * k))[:k]


def first_k_in_index_order(at: Place) -> dict[str, Any]:
    """Bug 11: truncation in index order starves late positions."""
    with mock.patch.object(defaults, "selector", lambda nodes, memory, given=None: FirstK(nodes)):
        return exact.every_coordinate(at)
