"""Compressed DiLoCo and local SGD on torchft, which trains through failures: quorums, healing, commits.

    pg = rtopk.torchft.ProcessGroup(ProcessGroupGloo())         # around torchft's own
    manager = Manager(pg=pg, use_async_quorum=False, ...)
    with rtopk.torchft.DiLoCo(manager, [model], inner, outer, sync_every=100, density=0.01):
        ...

Everything else is torchft's: fragments, delay, outer optimizers, recovery. What another replica hands over when one
heals never holds a residual: residuals belong to the replica that has them, and are in its own checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

try:
    import torchft.process_group as theirs
    from torchft.manager import Manager

    from torchft import local_sgd
except ImportError as error:
    raise ImportError("rtopk.torchft needs torchft: pip install 'rtopk[torchft]'") from error

from rtopk.replicas.control import hash_weights
from rtopk.torchft.books import Books, Compression

__all__ = ["Compression", "DiLoCo", "LocalSGD", "ProcessGroup"]
OWN = {field.name for field in fields(Compression)}
BOOKS = "rtopk_books"  # attribute of a tensor that is to be sent compressed
KEY = "rtopk"  # of what a replica that heals takes over


class ProcessGroup(theirs.ProcessGroupWrapper):  # type: ignore[misc]
    """A process group of torchft, in which fragments of our `DiLoCo` send compressed. All else is as before."""

    def __init__(self, pg: theirs.ProcessGroup) -> None:
        super().__init__(pg=pg)

    def allreduce(self, tensors: list[Tensor], opts: object) -> dist.Work:
        """Reduce compressed what comes with books, everything else as the wrapped group does."""
        books: Books | None = getattr(tensors[0], BOOKS, None)
        if books is None:
            found: dist.Work = super().allreduce(tensors, opts)
            return found
        return books.allreduce(tensors[0], self.parent)

    def errored(self) -> Exception | None:
        """Return what went wrong in the wrapped group."""
        found: Exception | None = self.parent.errored()
        return found

    def abort(self, errored: bool = True) -> None:
        """Abort what is under way; the group can be configured again."""
        self.parent.abort()


class Fragment(local_sgd._StreamingDiLoCoFragment):  # type: ignore[misc]
    """A fragment of torchft's that sends its pseudo-gradients as one compressed vector."""

    books: Books

    def _average_grads(self) -> None:
        layout = self.books.lay_out(self._grads)
        update = layout.flatten({name: grad.float() for name, grad in self._grads.items()})
        setattr(update, BOOKS, self.books)
        self.books.weights = hash_weights(self.original_parameters.values())
        work = self._manager.allreduce(update, should_quantize=False)

        def write(done: object) -> list[Tensor]:
            for name, mean in layout.unflatten(update).items():
                self._grads[name].copy_(mean)
            return [update]

        work.get_future().then(write)
        self._allreduce_work.append(work)

    def _merge_parameters(self) -> None:
        if self._fragment_update_alpha and self.books.finite:  # mixing in nothing of a NaN makes a NaN
            super()._merge_parameters()

    def perform_sync(self) -> bool:
        """Wait, and take the outer step if the round is committed; note in the books whether it was."""
        committed = bool(super().perform_sync())
        self.books.end(committed)
        return committed


class DiLoCo(local_sgd.DiLoCo):  # type: ignore[misc]
    """torchft's DiLoCo with compressed pseudo-gradients; the same arguments, and those of `Compression`.

    density: share of the entries to send, besides dense tensors, or a schedule of the manager's step.
    selector: which entries to send; by default the k largest.
    memory: a function that makes a memory: ErrorFeedback (default), DecayedErrorFeedback (SparseLoCo's), NoMemory.
    values: "fp32", or rounded to "fp16", "bf16", "int8", "4bit", "2bit".
    mean: over the replicas that sent something ("nodes"), or for each entry over those that sent it ("received").
    dense: which tensors are sent in full; one-dimensional ones by default.
    seed: of the draws.

    A replica that healed in this round, or whose update is not finite, sends nothing, and the mean is over the
    others. Save `state_dict()` with each replica's own checkpoint, beside the manager's.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: list[nn.Module],
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | list[Optimizer],
        sync_every: int,
        **options: Any,
    ) -> None:
        how = Compression(**{name: options.pop(name) for name in OWN & set(options)})
        if options.get("should_quantize"):
            raise ValueError("should_quantize is torchft's fp8; use values='int8' or another form instead")
        _check_group(manager)
        super().__init__(
            manager, model_fragments, inner_optimizer, outer_optimizer, sync_every, **options
        )  # fmt: skip
        for number, fragment in enumerate(self._fragments):
            fragment.__class__ = Fragment  # torchft makes its fragments by itself
            fragment.books = Books(manager, how, number)
        manager.register_state_dict_fn(KEY, self._heal, self._receipts)

    @property
    def books(self) -> list[Books]:
        """The books of each fragment."""
        return [fragment.books for fragment in self._fragments]

    def _receipts(self) -> dict[str, Any]:
        return {"receipts": [list(books.receipts) for books in self.books]}

    def _heal(self, state: Mapping[str, Any]) -> None:
        for books, receipts in zip(self.books, state["receipts"], strict=True):
            books.heal(receipts)

    def state_dict(self) -> dict[str, Any]:
        """Return this replica's residuals: tensors only."""
        return {"memories": [books.state_dict() for books in self.books]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with this replica's residuals. They are dropped if the others turn out to be ahead of them.

        A state that does not fit changes nothing. One that is loaded before the first round is compared there.
        """
        if "memories" not in state:
            raise ValueError(f"state must hold 'memories', as state_dict() makes it, got {sorted(state)}")
        memories: Sequence[Mapping[str, Tensor]] = state["memories"]
        if len(memories) != len(self.books):
            raise ValueError(f"state is of {len(memories)} fragments, this model has {len(self.books)}")
        made = [books.made(memory) for books, memory in zip(self.books, memories, strict=True)]
        for books, memory, own in zip(self.books, memories, made, strict=True):
            books.load(memory, own)


class LocalSGD(DiLoCo):
    """torchft's LocalSGD, compressed: replicas average how far they went: DiLoCo with an outer rate of 1."""

    def __init__(
        self, manager: Manager, model: nn.Module, optimizer: Optimizer, sync_every: int, **options: Any
    ) -> None:
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        super().__init__(manager, [model], optimizer, outer, sync_every, **options)


def _check_group(manager: Manager) -> None:
    """Raise ValueError if a manager's process group would send everything uncompressed."""
    group = outermost = getattr(manager, "_pg", None)
    while group is not None and not isinstance(group, ProcessGroup):
        group = getattr(group, "_pg", None)
    if outermost is not None and group is None:
        raise ValueError(
            f"the manager has the process group {type(outermost).__name__}, which sends everything; make it "
            "with Manager(pg=rtopk.torchft.ProcessGroup(ProcessGroupGloo()), ...)"
        )
