"""From DDP's buckets to a round, and back.

Every collective is issued in the hook's body, in the order of the buckets, which is the same on all ranks. The
round ends at the last bucket; earlier buckets return a pending Future that is completed there.
"""

import weakref
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rtopk.kernels.host import promise
from rtopk.replicas import state
from rtopk.replicas.gradients import mean_in
from rtopk.replicas.options import Options, plain_name
from rtopk.replicas.rounds import Round
from rtopk.transport import AllGather


class State(state.State):
    """The residuals of one rank, its counters, and the rounds; `register` makes it."""

    def __init__(self, model: DistributedDataParallel, options: Options, transport: AllGather) -> None:
        # Weak: DDP owns this state in C++, where the garbage collector cannot see a cycle.
        self._model = weakref.ref(model)
        super().__init__(trainable(model), options, transport)
        self.written.follow(self.parameters)
        self.used: set[str] = set()  # parameters that took part, if DDP allows unused ones
        self.buckets: list[tuple[torch.futures.Future[Tensor], Tensor]] = []  # of the round in progress
        self.gradients: dict[str, Tensor] = {}  # views of the buckets, by parameter
        if model.find_unused_parameters or model.static_graph:
            self._watch_use()

    def _watch_use(self) -> None:
        self.may_be_idle, used = True, self.used
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, name=name: used.add(name)
            )

    @property
    def model(self) -> DistributedDataParallel:
        """The DDP model, as long as something else keeps it alive."""
        model = self._model()
        if model is None:
            raise RuntimeError(
                "the DDP model of this state is gone; keep it: model = DistributedDataParallel(...)"
            )
        return model

    @property
    def idle(self) -> set[str]:
        """The parameters that took no part in this backward."""
        return set(self.parameters) - self.used if self.may_be_idle else set()

    def begin(self) -> Round:
        """Begin a round."""
        _refuse_join(self.model)
        self.round, self.buckets, self.gradients = Round(self), [], {}
        return self.round

    def end_round(self) -> None:
        """Forget a round that is over or was interrupted."""
        super().end_round()
        self.buckets, self.gradients = [], {}
        self.used.clear()


def trainable(model: DistributedDataParallel) -> dict[str, Tensor]:
    """Return the parameters that DDP reduces, by their names in the plain model."""
    ignored = model.parameters_to_ignore
    return {
        plain_name(name): parameter
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    }


def _refuse_join(model: DistributedDataParallel) -> None:
    """Raise RuntimeError inside `model.join()`: it shadows the hook's collective with an all-reduce."""
    if model._join_config.enable:
        raise RuntimeError(
            "DDP's join() (uneven inputs) does not run communication hooks on ranks that are done, so the "
            "others would wait for ever; give all ranks the same number of batches"
        )


def take(state: State, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":  # type: ignore[name-defined]
    """Collect a bucket's gradients, send what is ready, and end the round at the last bucket."""
    this = state.begin() if bucket.index() == 0 or state.round is None else state.round
    buffer: Tensor = bucket.buffer()
    future = promise(buffer)
    state.buckets.append((future, buffer))
    views = views_by_name(state.names, bucket.parameters(), buffer)
    state.gradients.update(views)
    idle = state.idle
    for name, gradient in views.items():
        mean = None
        with this.telling():
            mean = mean_in(state.parameters[name], idle=name in idle)
            if mean is not None:
                gradient.sub_(mean)
        this.put(name, None if name in idle else gradient, mean)
    if state.options.scope == "bucket":
        this.send([state.group_of[name] for name in views], idle)
    if bucket.is_last():
        buckets, gradients, state.round = state.buckets, state.gradients, None
        if state.options.scope == "global":
            this.send(state.groups, idle)
        this.finish(gradients)
        state.end_round()
        for pending, filled in buckets:
            pending.set_result(filled)
    return future


def views_by_name(
    names: Mapping[int, str], parameters: Iterable[Tensor], buffer: Tensor
) -> dict[str, Tensor]:
    """Split a bucket by parameter; each lies in it in the memory order of the parameter, if that has no gaps."""
    views, offset = {}, buffer.storage_offset()
    for parameter in parameters:
        shape, stride = parameter.shape, parameter.stride()
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        if extent != parameter.numel():  # a slice of something larger: DDP lays it out plainly
            stride = torch.empty(shape, device="meta").stride()
        views[names[id(parameter)]] = buffer.as_strided(shape, stride, offset)
        offset += parameter.numel()
    return views
