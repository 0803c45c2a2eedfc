"""Local SGD on torch.distributed: every rank trains on its own for H steps, then the ranks synchronise.

Each rank sends a payload of common - own weights, all average what they decoded in rank order, and the outer
optimizer steps from the common weights (see `outer`). This is the federated setting for a cluster: the paper's
with `sgd`, DiLoCo with `nesterov`, SparseLoCo with `sparseloco`. The federated experiments run on `CommonWeights`
too, with all nodes in one process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rtopk import defaults
from rtopk.aggregate import Mean
from rtopk.codec import Codec
from rtopk.exchange import OWNER, ExchangeName, OwnerDensity, Vector, make_exchange
from rtopk.layout import DenseRule, Layout, one_dimensional
from rtopk.local.outer import SGD, Outer, by_name
from rtopk.memory import ErrorFeedback, Memory, give_back
from rtopk.schedule import Schedule, as_schedule
from rtopk.select import Selector
from rtopk.sparsifier import Sparsifier
from rtopk.state_file import digest_bits
from rtopk.transport import AllGather, InProcess, Transport


class CommonWeights:
    """The weights that all nodes share, and a model that leaves them and returns to them."""

    def __init__(self, model: nn.Module, layout: Layout, outer: Outer = SGD()) -> None:  # noqa: B008 -- frozen
        self.layout = layout
        self.outer = outer
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.common = self.vector()
        self._outer_state: dict[str, Tensor] = {}

    def vector(self) -> Tensor:
        """Return a copy of the model's own weights as one flat vector."""
        return self.layout.flatten({n: p.detach() for n, p in self._parameters.items()})

    def update(self) -> Tensor:
        """Return how far the model has moved: common - own weights."""
        return self.common - self.vector()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the common weights into the model."""
        for name, values in self.layout.unflatten(self.common).items():
            self._parameters[name].copy_(values)

    def follow(self, mean: Tensor) -> None:
        """Take the outer step along the mean update of all nodes, and put the new weights into the model."""
        step, self._outer_state = self.outer.step(mean, self._outer_state)
        self.common = self.common - step
        self.restore()


class UnevenGather(AllGather):
    """One node per process; payloads differ in size, so sizes go first. They are decoded in host memory."""

    def exchange(self, payloads: Sequence[Tensor]) -> list[Tensor]:
        """Send the payload of this process, return those of all ranks in rank order."""
        (payload,) = payloads
        return [whole.cpu() for whole in self.exchange_uneven(payload)]

    def swap(self, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Send part j to rank j; return what this rank got, in rank order."""
        return [[part.cpu() for part in got] for got in super().swap(parts)]


class LocalSGD(CommonWeights):
    """Count local steps and synchronise the ranks every `local_steps`; call `step()` after the optimizer's.

    All ranks must start from the same weights; that is checked. Without an initialised process group the
    world is one rank. The mean is over all ranks, and without a memory over those that sent an entry.
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
        mean: Mean | None = None,
        exchange: ExchangeName = "all-gather",
        owner_density: OwnerDensity | None = None,
        dense: DenseRule = one_dimensional,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if local_steps < 1:
            raise ValueError(f"local_steps must be at least 1, got {local_steps}")
        pair = by_name(outer) if isinstance(outer, str) else None
        super().__init__(model, Layout.of(model, dense), pair.outer if pair else outer)  # type: ignore[arg-type]
        self.model = model
        self.local_steps = local_steps
        distributed = dist.is_available() and dist.is_initialized()
        several = distributed and dist.get_world_size(group) > 1
        gather = UnevenGather(group, next(model.parameters()).device) if several else None
        self.transport: Transport = gather or InProcess(1)
        self.world, self.rank = self.transport.nodes, self.transport.local[0]
        if memory is None:
            memory = pair.memory() if pair and pair.memory else ErrorFeedback()
        schedule = as_schedule(density)
        self.mean: Mean = mean or defaults.mean(memory)
        keeps = getattr(memory, "keeps", True)
        self.exchange = make_exchange(
            defaults.exchange(self.world, exchange),
            self.transport,
            Vector(self.layout.size, self.layout.dense_size, self.mean, None, keeps, seed),
            Codec(values, fingerprint=self.layout.fingerprint),
            schedule,
            owner_density,
        )
        self.sparsifier = Sparsifier(
            selector or defaults.selector(self.world),
            schedule,
            memory,
            self.exchange.codec,
            seed,
            node=self.rank,
            layout=self.layout,
        )
        self.steps = 0
        self.round = 0
        self.sent = 0  # bytes of payload
        if gather is not None:
            self._check_common(gather)

    def step(self) -> bool:
        """Count a local step; synchronise if it is time, and say whether it was."""
        self.steps += 1
        if self.steps % self.local_steps:
            return False
        self.meet()
        return True

    def meet(self) -> None:
        """Exchange what every rank moved since the last time, and step from there together."""
        payload = self.sparsifier.compress(self.update(), self.round)
        mean, traffic = self.exchange.mean([payload], self.round)
        self.follow(mean)
        self.sent += round(traffic.sent)
        self.round += 1

    def _check_common(self, gather: AllGather) -> None:
        name = torch.frombuffer(bytearray(digest_bits(self.common)), dtype=torch.uint8)
        names = gather.start(name).wait()
        different = sum(not torch.equal(other, names[0]) for other in names)
        if different:
            raise ValueError(
                f"{different} of {self.world} ranks start from other weights than rank 0: "
                "broadcast the model first"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state between two exchanges: tensors and plain values only."""
        return {
            "sparsifier": self.sparsifier.state_dict(),
            **self.exchange.state(),
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
        returned = self.exchange.load({OWNER: state[OWNER]} if OWNER in state else {})
        if returned is not None:
            give_back(self.sparsifier.memory, returned)
        self.common, self._outer_state = state["common"].clone(), dict(state["outer"])
        self.steps, self.round, self.sent = state["steps"], state["round"], state["sent"]
