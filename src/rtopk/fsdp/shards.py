"""From the gradient shards of FSDP2 to a round, and back.

FSDP calls a hook for each sharded module after it has reduced the module's gradients within the site and before it
adds them to `parameter.grad`. The hook only notes that; gradients are read from `parameter.grad`, so nothing here
depends on how FSDP lays out, scales or casts its buffers, and padding is never seen. The round ends in a callback
at the end of backward, after FSDP's own. With scope "global" the one message is sent there. With scope "bucket" the
shards of a module are sent as soon as a later module is reduced, so that the exchange overlaps with backward.

The ranks of a site hold parts of one model, so they must skip a step together: after the exchange between replicas
they compare the outcome over the fast links of their site.
"""

import logging
import math
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rtopk.fsdp.refusals import roots, trainable
from rtopk.kernels.host import fetch
from rtopk.replicas import checkpoint, state
from rtopk.replicas.control import RanksDisagree, by_rank
from rtopk.replicas.options import Options
from rtopk.replicas.rounds import Round
from rtopk.seed import derive
from rtopk.state_file import StateError, byte_tensor
from rtopk.transport import AllGather

TOLD = 512  # bytes of an outcome that a rank tells the other shards


class State(state.State):
    """The residual of one shard on one rank, its counters, and the rounds; `register` makes it."""

    tells_use = True

    def __init__(self, model: nn.Module, options: Options, between: AllGather, within: AllGather) -> None:
        self.within = within
        self._model = weakref.ref(model)
        self.shard = f"{within.rank} of {within.nodes}"
        super().__init__(trainable(model), options, between)
        self.transports = [between, within]
        # What FSDP reduces at once: the parameters of a module, in the order in which backward reaches them.
        self.parts = _parts(model, self.names)[::-1]
        self.reduced: list[int] = []  # parts that FSDP has reduced in this backward
        self.sent = 0  # how many of `parts` have been sent
        self._task = -1  # the backward pass of the round in progress
        self._waiting: dict[str, Tensor] = {}  # means that were set aside before a round
        self._zeros: dict[str, Tensor] = {}  # gradients that were zero before this backward
        self._deferred: set[int] = set()  # parts that a backward without an all-reduce left to this one
        self._left: dict[str, Tensor] = {}  # gradients, not zero, that such a backward left
        self._backward = -1  # the last backward pass that reduced something
        self._noting = False  # whether its end will note what it left

    @property
    def seed(self) -> int:
        """The seed of this shard: shards draw independently."""
        return derive(self.options.seed, "shard", self.within.rank)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The shards of this rank."""
        return {name: _local(parameter.detach()) for name, parameter in self.parameters.items()}

    @property
    def level(self) -> int:
        """The level at which this rank logs what all ranks know: one rank of one site tells."""
        return logging.DEBUG if self.within.rank else super().level

    @property
    def verifies(self) -> bool:
        """Whether the ranks compare their weights: in the first round too, since FSDP does not broadcast them."""
        return super().verifies or not self.measured

    def settle(self, refusal: str, error: Exception | None) -> tuple[str, Exception | None]:
        """Tell the other shards of this replica whether to skip or to raise, and do as they do."""
        here = f"step {self.step}, density {self.density(self.step):.6g}, scale {self.scale:g}"
        word = f"!{error}" if error is not None else f"?{refusal}" if refusal else f"={here}"
        message = byte_tensor(word.encode()[:TOLD].ljust(TOLD))
        told = [
            bytes(other.tolist()).rstrip().decode(errors="ignore")
            for other in self.within.exchange([message])
        ]
        failed = [f"shard {shard}: {said[1:]}" for shard, said in enumerate(told) if said.startswith("!")]
        skipped = [f"shard {shard}: {said[1:]}" for shard, said in enumerate(told) if said.startswith("?")]
        if error is None and failed:
            error = RuntimeError(
                f"another shard of this replica failed in step {self.step}. {'; '.join(failed)}"
            )
        elif not (failed or skipped) and len(set(told)) > 1:
            error = RanksDisagree(
                f"the shards of a replica are not at the same point ({by_rank([said[1:] for said in told])}); load "
                "states, and set epochs and scales, on all ranks alike"
            )
        return "; ".join(skipped), error

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from this rank's state; means that wait are of another point, and forgotten."""
        super().load_state_dict(saved)
        self._waiting.clear()
        self._deferred.clear()

    def sharded(self) -> "Sharded":
        """Return this state for torch.distributed.checkpoint, which can change the number of shards."""
        return Sharded(self)

    # -- backward

    def attach(self) -> None:
        """Let FSDP call `reduce` for everything that it reduces at once."""
        model = cast(nn.Module, self._model())
        for root in roots(model):  # the model itself may never run: a LightningModule does not
            root.register_forward_pre_hook(self._before_forward, prepend=True)  # while parameters are sharded
        for index, (module, _) in enumerate(self.parts):
            module.set_all_reduce_hook(partial(self.reduce, index))

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Forget an interrupted round, and follow parameters that were replaced by a load."""
        if torch._C._current_graph_task_id() != -1:  # a recomputation inside backward
            return
        self.end_round()
        model = self._model()
        current = {} if model is None else trainable(model)
        if set(current) - set(self.parameters):
            new = sorted(set(current) - set(self.parameters))
            raise RuntimeError(
                f"{len(new)} parameters became trainable after registration, {new[0]} among them, and would not be "
                "exchanged; thaw or add them before you register"
            )
        if any(found is not self.parameters[name] for name, found in current.items()):
            self.parameters |= current  # load_state_dict(assign=True) has replaced them
            self.names = {id(parameter): name for name, parameter in self.parameters.items()}

    def end_round(self) -> None:
        """Forget a round that is over or was interrupted."""
        super().end_round()
        self.reduced, self.sent, self._zeros = [], 0, {}

    @torch.no_grad()
    def reduce(self, part: int, buffer: Tensor) -> None:
        """Note that FSDP is about to add gradients to the parameters of a part."""
        module, names = self.parts[part]
        task = torch._C._current_graph_task_id()
        if self.round is not None and task != self._task:  # an error ended the backward pass of that round
            self.end_round()
        if task != self._backward:
            self._backward, self._noting = task, False
            self._forget_cleared()
        if part in self.reduced:
            if part < self.sent:
                raise RuntimeError(
                    f"{names[0]} was reduced again after it was sent: its module runs more than once in forward; "
                    "use scope='global'"
                )
            return
        if not _group(
            module
        ).all_reduce_grads:  # set_requires_all_reduce(False): another backward will follow
            if not self._noting:
                self._noting = True
                torch.autograd.Variable._execution_engine.queue_callback(self._note_left)
            self._set_aside(names)
            self._deferred.add(part)
            return
        if self.round is None:
            self.round, self._task = Round(self), task
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if self.options.scope == "bucket":  # in the same order on all ranks
            while self.sent < len(self.parts) and self.sent in self.reduced:
                self._send(self.round, self.parts[self.sent][1])
                self.sent += 1
        self.reduced.append(part)
        self._set_aside(names)

    def _set_aside(self, names: Iterable[str]) -> None:
        """Move means of an earlier round, which no optimizer has used yet, out of the way of new gradients.

        Zeros move too: what is there after backward is then a gradient.
        """
        held = {
            name: _local(gradient) for name in names if (gradient := self.parameters[name].grad) is not None
        }
        asked = [told for here in held.values() for told in (here.any(), here.isfinite().all())]
        told = iter(fetch(*asked))  # one wait for all of them
        for name, here in held.items():
            parameter, holds, finite = self.parameters[name], bool(next(told)), bool(next(told))
            if not holds:
                self._zeros[name] = cast(Tensor, parameter.grad)
            elif id(parameter) in self.written.means and finite:
                self._waiting[name] = here
            else:
                continue
            parameter.grad = None
            self.written.forget(id(parameter))

    def _note_left(self) -> None:
        """Note what a backward without an all-reduce leaves to the next one."""
        names = [name for part in sorted(self._deferred) for name in self.parts[part][1]]
        left = {name: gradient for name in names if (gradient := self.parameters[name].grad) is not None}
        told = fetch(*(_local(gradient).any() for gradient in left.values()))
        self._left = {name: left[name] for name, holds in zip(left, told, strict=True) if holds}

    def _forget_cleared(self) -> None:
        """Forget what waits for this backward if the user has cleared the gradients that an earlier one left."""
        left, self._left = self._left, {}
        there = {name: gradient for name, gradient in left.items() if self.parameters[name].grad is gradient}
        told = fetch(*(_local(gradient).any() for gradient in there.values()))
        kept = {name for name, holds in zip(there, told, strict=True) if holds}
        for name in left.keys() - kept:
            self._waiting.pop(name, None)
        if left and not kept:  # all of them: the means of layers that had no gradient then, too
            self._waiting.clear()
            self._deferred.clear()

    def _fresh(self) -> set[str]:
        """Return the parameters with a gradient of this backward, or of one that left the exchange to it."""
        reduced = (name for part in {*self.reduced, *self._deferred} for name in self.parts[part][1])
        return {name for name in reduced if self.parameters[name].grad is not None}

    def _send(self, this: Round, names: list[str]) -> None:
        fresh = self._fresh().intersection(names)
        # With a divisor of the user's, set_gradient_divide_factor, HSDP adds replicas instead of averaging them.
        divided = [own for module, own in self.parts if _group(module).gradient_divide_factor is not None]
        adds = set(chain(*divided))
        gradients = {n: _local(cast(Tensor, self.parameters[n].grad)) for n in names if n in fresh}
        gradients |= {n: gradients[n] * self.world_size for n in adds & fresh}
        for name, gradient in gradients.items():
            this.put(name, gradient)
        if self.options.clip_norm is not None:
            this.clip_norm = self._share_of_norm(gradients.values(), self.options.clip_norm)
        this.held |= {name: self._waiting.pop(name) for name in names if name in self._waiting}
        this.send(list({self.group_of[name]: None for name in names}), set(names) - fresh)

    def _share_of_norm(self, gradients: Iterable[Tensor], limit: float) -> float:
        """Return the norm that this shard may have if the gradient of the whole replica may have `limit`."""
        norms = fetch(*(torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients))
        own = math.hypot(*map(float, norms))
        word = torch.tensor([own], dtype=torch.float64).view(torch.uint8)
        told = self.within.exchange([word])
        whole = math.hypot(*(float(message.view(torch.float64)) for message in told))
        return limit * (own / whole) if whole else limit

    @torch.no_grad()
    def _finish(self) -> None:
        """Exchange what is left and write the mean into the gradients, at the end of backward."""
        this = self.round
        if this is None:
            return
        if getattr(
            self.parts[0][0]._get_fsdp_state()._state_ctx, "post_backward_final_callback_queued", False
        ):
            raise RuntimeError(
                "FSDP has not ended this backward pass: it lies inside another, as checkpoint(use_reentrant=True) "
                "makes them (use use_reentrant=False), or an error ended an earlier one, from which FSDP2 does not "
                "recover (restart from a checkpoint)"
            )
        for part, (_, names) in enumerate(self.parts):
            if part not in self.reduced:
                self._set_aside(names)
            elif not self._fresh().intersection(names):
                raise RuntimeError(
                    f"the gradient of {names[0]} was removed during backward, before it was exchanged; let the "
                    "optimizer step after backward"
                )
        left = [names for _, names in self.parts[self.sent :]]
        for names in left if self.options.scope == "bucket" else [list(self.layout.names)]:
            self._send(this, names)
        fresh, self.round = self._fresh(), None
        # A rank without a gradient of its own gets the mean of the others in new memory.
        new = {name: torch.zeros_like(t) for name, t in self.tensors.items() if name not in fresh}
        this.finish(new | {name: _local(cast(Tensor, self.parameters[name].grad)) for name in fresh})
        for name, gradient in new.items():
            parameter = self.parameters[name]
            if name in this.used or name in this.held or self.skipping:
                old = 0.0 if parameter.grad is None else _local(parameter.grad)
                parameter.grad = _like(parameter, gradient + old)
            elif name in self._zeros:
                parameter.grad = self._zeros[name]
        self._deferred.clear()
        self.end_round()


class Sharded(checkpoint.Sharded):
    """A state whose residuals are DTensors under the replica's key, so that DCP can shard them anew."""

    state: State

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's state; the ranks of a site give their shards of it."""
        state = self.state.state_dict()
        memory = {
            kind: {name: _like(self.state.parameters[name], part) for name, part in parts.items()}
            for kind, parts in state["memory"].items()
        }
        kept = {name: state[name] for name in ("seed", "step", "epoch")}
        return {self._key: {**kept, "format": " ".join([str(checkpoint.FORMAT), *memory]), "memory": memory}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from this replica's state."""
        part = dict(self._part(state))
        memory = {
            kind: {name: _local(tensor) for name, tensor in tensors.items()}
            for kind, tensors in part["memory"].items()
        }
        self._expect_kinds(self._told(part), memory)
        if part["seed"] != self.state.options.seed:
            raise StateError(f"the state is of seed {part['seed']}, this job has {self.state.options.seed}")
        self.state.load_state_dict({**self.state.state_dict(), **part, "memory": memory})


def _parts(model: nn.Module, names: Mapping[int, str]) -> list[tuple[FSDPModule, list[str]]]:
    """Return what FSDP reduces at once, each as a module to hook and the names of its trainable parameters.

    Modules that were sharded together, `fully_shard([a, b])`, are one part: they share FSDP's state, and its hook.
    """
    owners: dict[str, FSDPModule] = {}
    for module in model.modules():  # from the outside in: the innermost stays
        if isinstance(module, FSDPModule):
            owners |= {names[id(p)]: module for p in cast(nn.Module, module).parameters() if id(p) in names}
    parts: dict[int, tuple[FSDPModule, list[str]]] = {}
    for name, owner in owners.items():
        parts.setdefault(id(owner._get_fsdp_state()), (owner, []))[1].append(name)
    return list(parts.values())


def _group(module: FSDPModule) -> Any:
    """Return what FSDP knows of the parameters that it reduces with a module."""
    return module._get_fsdp_state()._fsdp_param_groups[0]


def _local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, which changes with the tensor."""
    with torch.no_grad():
        return cast(DTensor, tensor).to_local()


def _like(parameter: Tensor, shard: Tensor) -> DTensor:
    """Return a shard as a part of a tensor that lies on the ranks like a parameter."""
    like = cast(DTensor, parameter)
    return DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
