"""Local SGD on torch.distributed: every rank trains on its own for H steps, then the ranks meet.

At a meeting each rank sends a payload of common - own weights, all average what they decoded in rank order,
and the outer optimizer steps from the common weights (see `outer`). This is the federated setting for a
cluster: the paper's with `sgd`, DiLoCo with `nesterov`, SparseLoCo with `sparseloco`.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rtopk.aggregate import Mean, average
from rtopk.codec import Codec
from rtopk.layout import DenseRule, Layout, one_dimensional
from rtopk.memory import Memory
from rtopk.outer import Outer, by_name
from rtopk.schedule import Schedule
from rtopk.select import RTopK, Selector
from rtopk.sparsifier import Sparsifier


class LocalSGD:
    """Count local steps and let the ranks meet every `local_steps`; call `step()` after the optimizer's.

    All ranks must start from the same weights; that is checked. Without an initialised process group the
    world is one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        local_steps: int,
        density: float | Schedule = 0.01,
        *,
        selector: Selector | None = None,
        outer: str | Outer = "sgd",
        memory: Memory | None = None,
        values: str = "fp32",
        mean: Mean = "nodes",
        dense: DenseRule = one_dimensional,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if local_steps < 1:
            raise ValueError(f"local_steps must be at least 1, got {local_steps}")
        pair = by_name(outer) if isinstance(outer, str) else None
        self.model = model
        self.local_steps = local_steps
        self.mean: Mean = mean
        self.group = group
        distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if distributed else 0
        self.world = dist.get_world_size(group) if distributed else 1
        self.layout = Layout.of(model, dense)
        self.outer: Outer = pair.outer if pair else outer  # type: ignore[assignment]
        self.sparsifier = Sparsifier(
            selector or RTopK(nodes=self.world),
            density,
            memory if memory is not None else (pair.memory() if pair else None),
            Codec(values, fingerprint=self.layout.fingerprint),
            seed,
            node=self.rank,
            layout=self.layout,
        )
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.common = self._vector()
        self.steps = 0
        self.round = 0
        self.sent = 0  # bytes of payload
        self._outer_state: dict[str, Tensor] = {}
        self._check_common()

    def step(self) -> bool:
        """Count a local step; meet if it is time, and say whether it was."""
        self.steps += 1
        if self.steps % self.local_steps:
            return False
        self.meet()
        return True

    def meet(self) -> None:
        """Exchange what every rank moved since the last meeting, and step from there together."""
        payload = self.sparsifier.compress(self.common - self._vector(), self.round)
        everyone = self._exchange(payload)
        codec = self.sparsifier.codec
        mean = average([codec.decode(p, size=self.layout.size) for p in everyone], self.mean)
        step, self._outer_state = self.outer.step(mean, self._outer_state)
        self.common = self.common - step
        self._set(self.common)
        self.sent += payload.numel()
        self.round += 1

    def _exchange(self, payload: Tensor) -> list[Tensor]:
        """Return the payloads of all ranks; they differ in size, so sizes go first."""
        if self.world == 1:
            return [payload]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([payload.numel()]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: payload.numel()] = payload
        gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(gathered, padded, group=self.group)
        return [whole[: int(size)] for whole, size in zip(gathered, sizes, strict=True)]

    def _check_common(self) -> None:
        if self.world == 1:
            return
        theirs = self.common.clone()
        dist.broadcast(theirs, dist.get_global_rank(self.group, 0) if self.group else 0, group=self.group)
        different = torch.tensor([0 if torch.equal(theirs, self.common) else 1])
        dist.all_reduce(different, group=self.group)
        if int(different):
            raise ValueError(
                f"{int(different)} of {self.world} ranks start from other weights than rank 0: "
                "broadcast the model first"
            )

    def _vector(self) -> Tensor:
        return self.layout.flatten({n: p.detach() for n, p in self._parameters.items()})

    @torch.no_grad()
    def _set(self, vector: Tensor) -> None:
        for name, values in self.layout.unflatten(vector).items():
            self._parameters[name].copy_(values)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state between two meetings: tensors and plain values only."""
        return {
            "sparsifier": self.sparsifier.state_dict(),
            "common": self.common.clone(),
            "outer": dict(self._outer_state),
            "steps": self.steps,
            "round": self.round,
            "sent": self.sent,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this rank."""
        if state["common"].shape != self.common.shape:
            raise ValueError(
                f"state is of {state['common'].numel()} entries, this model has {self.common.numel()}"
            )
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.common, self._outer_state = state["common"].clone(), dict(state["outer"])
        self.steps, self.round, self.sent = state["steps"], state["round"], state["sent"]
