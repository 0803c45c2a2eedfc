"""The one training loop: n nodes, rounds, payloads.

Distributed: in a round every node takes the gradient of one batch at the common weights; the mean of the
decoded payloads is the gradient of the optimizer at the centre. Federated: every node trains on its own for
an epoch (or `local_steps`) from the common weights and sends how far it went; the centre follows by the mean.

The nodes of a process share one model and hold one memory each. Buffers (BatchNorm statistics) belong to the
node: they are never sent, each node's forward passes update its own, and a model is evaluated with their mean
over the nodes (integers: those of the first node).
"""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rtopk import defaults
from rtopk.exchange import OWNER, AllReduced, Vector, make_exchange
from rtopk.local import CommonWeights
from rtopk.local.outer import SGD
from rtopk.memory import clip, give_back
from rtopk.seed import derive
from rtopk.select import RTopK
from rtopk.sparse import SparseVector
from rtopk.sparsifier import Sparsifier
from rtopk.studies.config import ADDED, Config
from rtopk.studies.tasks import Task, load
from rtopk.studies.tasks.objectives import Batch, Shard
from rtopk.studies.train.powersgd import LowRank, LowRankNode, Matrices
from rtopk.transport import InProcess, Transport


class Diverged(Exception):  # noqa: N818 -- nothing is wrong with the program
    """The loss is no longer a finite number; the weights are those of the round before."""


class Node:
    """What belongs to one node, and is saved with it."""

    def __init__(self, run: "Run", number: int, shard: Shard) -> None:
        self.number = number
        self.shard = shard
        self.buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
        config = run.config
        self.sparsifier: Sparsifier | LowRankNode
        if run.low_rank is not None:
            self.sparsifier = LowRankNode(run.low_rank, config.make_memory())
        else:
            self.sparsifier = Sparsifier(
                config.make_selector(run.layout),
                config.make_density(),
                config.make_memory(),
                run.codec,
                config.seed,
                node=0 if config.same_draws else number,
                layout=run.layout,
            )

    def answer(self, left: Matrices) -> Tensor:
        """Return PowerSGD's second message."""
        assert isinstance(self.sparsifier, LowRankNode)
        return self.sparsifier.answer(left)

    def residual_norm(self) -> float:
        """Return the norm of the residual; 0 where nothing is kept."""
        residual = getattr(self.sparsifier.memory, "residual", None)
        return 0.0 if residual is None else float(torch.linalg.vector_norm(residual))

    def state_dict(self) -> dict[str, Any]:
        """Return the node's part of a checkpoint."""
        return {"sparsifier": self.sparsifier.state_dict(), "buffers": self.buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.sparsifier.load_state_dict(state["sparsifier"])
        self.buffers = {name: value.clone() for name, value in state["buffers"].items()}


class Run:
    """The state of a run between two rounds, and the way from one round to the next."""

    def __init__(self, config: Config, task: Task | None = None, transport: Transport | None = None) -> None:
        self.config = config
        self.task = load(config) if task is None else task
        self.transport = InProcess(config.nodes) if transport is None else transport
        self.device = device()
        with seeded(config.seed, "weights"):
            self.model = self.task.make_model()
        self.model.to(self.device)
        self.layout = config.make_layout(self.model)
        self.parameters = dict(self.model.named_parameters())
        self.centre = CommonWeights(self.model, self.layout, SGD(config.centre_rate))
        shards = self.task.shards(config)
        self.weights = [float(len(shard)) for shard in shards] if config.weighted else None
        self.exchange = make_exchange(
            defaults.exchange(config.nodes, config.exchange),
            self.transport,
            Vector(
                self.layout.size,
                self.layout.dense_size,
                config.mean,
                self.weights,
                config.keeps and config.owner_rule != "intersection",
                config.seed,
            ),
            config.make_codec(self.layout.fingerprint),
            config.make_density(),
            config.make_owner_density(),
        )
        self.codec = self.exchange.codec
        if config.owner_rule == "rtop-k":
            assert isinstance(self.exchange, AllReduced)
            for owner in self.exchange.owners:
                owner.sparsifier.rule = RTopK(r_over_k=2)
        self.optimizer = config.make_optimizer(self.model.parameters())
        self.low_rank = (
            LowRank(self.layout, config.matrix_rank, self.codec, config.seed)
            if config.method == "powersgd"
            else None
        )
        self.nodes = [Node(self, number, shards[number]) for number in self.transport.local]
        self.round = 0
        self.sent = 0  # bytes, mean over the local nodes
        self.received = 0
        self.loss = math.nan  # of the last round, mean over the local nodes
        self.overlap = math.nan  # of what the nodes chose before the last evaluation, where all are here
        self.spent = dict.fromkeys(("gradient", "compress", "exchange", "apply"), 0.0)  # seconds, all rounds

    @property
    def leads(self) -> bool:
        """Say whether this process writes files and talks."""
        return True

    def anyone(self, *wishes: bool) -> list[bool]:
        """Say of each wish whether any process has it, so that all act alike."""
        return list(wishes)

    def advance(self) -> None:
        """Do one round."""
        config = self.config
        rate = config.rate(self.round)
        work = self.gradient if config.setting == "distributed" else self._update
        payloads, losses = [], []
        for node in self.nodes:
            with (
                self.spend("gradient"),
                self.at(node),
                seeded(config.seed, "forward", node.number, self.round),
            ):
                vector, loss = work(node, rate)
            finite = math.isfinite(loss) and bool(vector.isfinite().all())
            if any(self.anyone(not finite)):
                raise Diverged(f"round {self.round}: loss {loss} at node {node.number}")
            with self.spend("compress"):
                payloads.append(node.sparsifier.compress(vector, self.round))
            losses.append(loss)
        with self.spend("apply"):
            self._apply(self._mean(payloads).to(self.device), rate)
        self.loss = sum(losses) / len(losses)
        self.round += 1

    def batch(self, node: Node, step: int) -> Batch:
        """Return a node's batch where the model is."""
        return tuple(part.to(self.device) if isinstance(part, Tensor) else part for part in node.shard[step])

    def gradient(self, node: Node, rate: float) -> tuple[Tensor, float]:
        """Return the gradient of the node's batch, clipped if asked, and its loss."""
        loss = self.task.loss(self.model, self.batch(node, self.round))
        gradients = torch.autograd.grad(loss, list(self.parameters.values()))
        vector = self.layout.flatten(dict(zip(self.parameters, gradients, strict=True)))
        if self.config.clip_norm:
            # The mean over n nodes of independent gradients is sqrt(n) times shorter than each of them, so a
            # bound on the mean is a wider bound on a node. DGC's N^(-1/2) is the same rule for gradients that
            # are summed and carry their factor 1/N already.
            vector = clip(vector, self.config.clip_norm * math.sqrt(self.config.nodes))
        return vector, float(loss.detach())

    def _update(self, node: Node, rate: float) -> tuple[Tensor, float]:
        """Train on the node's data from the common weights; return common - own weights and the mean loss."""
        loss = self.train_node(node, rate)
        update = self.centre.update()
        self.centre.restore()
        return update, loss

    def train_node(self, node: Node, rate: float) -> float:
        """Do a node's local training of this round; the model is left at its own weights."""
        config = self.config
        optimizer = torch.optim.SGD(
            self.model.parameters(), rate, momentum=config.momentum, weight_decay=config.weight_decay
        )
        steps = config.local_steps or node.shard.steps_per_epoch
        total = 0.0
        for step in range(self.round * steps, (self.round + 1) * steps):
            loss = self.task.loss(self.model, self.batch(node, step))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if config.clip_norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
            optimizer.step()
            total += float(loss.detach())
        self.model.zero_grad()
        return total / steps

    def _apply(self, mean: Tensor, rate: float) -> None:
        if self.config.setting == "federated":
            self.centre.follow(mean)
            return
        for name, gradient in self.layout.unflatten(mean).items():
            self.parameters[name].grad = gradient
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    def _mean(self, payloads: list[Tensor]) -> Tensor:
        """Exchange the local nodes' payloads, and what the method sends in answer; return the mean of all."""
        if self.low_rank is None:
            with self.spend("exchange"):
                mean, traffic = self.exchange.mean(payloads, self.round)
            if self.config.nodes == len(payloads) > 1 and self.config.evaluates(self.round + 1):
                self.overlap = self._overlap(payloads)
            if self.config.owner_rule == "intersection":
                self._keep_refused(payloads, mean)
            self.sent += round(traffic.sent)
            self.received += round(traffic.received)
            return mean
        left = self.low_rank.agree(self._exchange(payloads), self.weights)
        with self.spend("compress"):
            answers = [node.answer(left) for node in self.nodes]
        return self.low_rank.finish(left, self._exchange(answers), self.weights)

    def _overlap(self, payloads: list[Tensor]) -> float:
        """Return how far the nodes chose the same entries: 1 is all alike, 0 is none in common, NaN none at all."""
        chosen = torch.cat([self.codec.decode(payload).indices for payload in payloads])
        union = torch.zeros(self.layout.size, dtype=torch.bool)
        union[chosen] = True
        n, total = len(payloads), chosen.numel()
        return n * (total - int(union.sum())) / ((n - 1) * total) if total else math.nan

    def _keep_refused(self, payloads: list[Tensor], mean: Tensor) -> None:
        """Give back to the nodes' memories what they sent and no owner passed on."""
        for node, payload in zip(self.nodes, payloads, strict=True):
            sent = self.codec.decode(payload)
            refused = mean[sent.indices] == 0
            give_back(
                node.sparsifier.memory,
                SparseVector(sent.indices[refused], sent.values[refused], sent.size),
            )

    def _exchange(self, payloads: list[Tensor]) -> list[Tensor]:
        """Return the payloads of all nodes, and count their bytes."""
        with self.spend("exchange"):
            everyone = self.transport.exchange(payloads)
        sent = sum(payload.numel() for payload in payloads)
        total = sum(payload.numel() for payload in everyone)
        self.sent += round(sent / len(payloads))
        self.received += round(total - sent / len(payloads))
        return everyone

    def vector(self) -> Tensor:
        """Return a copy of the weights as one flat vector."""
        return self.centre.vector()

    @contextmanager
    def spend(self, stage: str) -> Iterator[None]:
        """Add the time that the block takes to a stage of the round, without that of stages inside it."""
        started, before = time.perf_counter(), sum(self.spent.values())
        yield
        inside = sum(self.spent.values()) - before
        self.spent[stage] += time.perf_counter() - started - inside

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Put the node's buffers into the model, and what has become of them back."""
        buffers = dict(self.model.named_buffers())
        for name, value in node.buffers.items():
            buffers[name].copy_(value)
        yield
        node.buffers = {name: buffer.clone() for name, buffer in buffers.items()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the task's scores of the common weights."""
        for name, buffer in self.model.named_buffers():
            values = [node.buffers[name] for node in self.nodes]
            buffer.copy_(torch.stack(values).mean(0) if buffer.is_floating_point() else values[0])
        return self.scores()

    @torch.no_grad()
    def scores(self) -> dict[str, float]:
        """Return the task's scores of the model as it is."""
        self.model.eval()
        try:
            return self.task.evaluate(self.model)
        finally:
            self.model.train()

    def residual_norm(self) -> float:
        """Return the mean norm of what the nodes keep back."""
        norms = [node.residual_norm() for node in self.nodes]
        return sum(norms) / len(norms)

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next round depends on: tensors and plain values only."""
        return {
            "config": self.config.to_dict(),
            "round": self.round,
            "sent": self.sent,
            "received": self.received,
            "loss": self.loss,
            "weights": self.vector(),
            "optimizer": self.optimizer.state_dict(),
            **self.exchange.state(),
            "nodes": {node.number: node.state_dict() for node in self.nodes},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the same configuration."""
        own = self.config.to_dict()
        other = {name: (state["config"].get(name, ADDED.get(name)), own[name]) for name in own}
        differing = [f"{name}: {was!r}, now {now!r}" for name, (was, now) in other.items() if was != now]
        if differing:
            raise ValueError(f"checkpoint is of another configuration ({'; '.join(differing)})")
        for node in self.nodes:
            node.load_state_dict(state["nodes"][node.number])
        self.exchange.load({OWNER: state[OWNER]} if OWNER in state else {})
        self.centre.common = state["weights"]
        self.centre.restore()
        self.optimizer.load_state_dict(state["optimizer"])
        self.round, self.sent = state["round"], state["sent"]
        self.received, self.loss = state["received"], state["loss"]


def device() -> torch.device:
    """Return where models are trained: RTOPK_DEVICE, by default the CPU; under torchrun a GPU for each process."""
    chosen = torch.device(os.environ.get("RTOPK_DEVICE", "cpu"))
    if chosen.type == "cuda" and chosen.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return chosen


@contextmanager
def seeded(*key: int | str) -> Iterator[None]:
    """Seed torch's global generator inside the block and leave it as it was: for layers that draw from it."""
    # Not torch.manual_seed: for devices that are not there it formats a stack trace, a millisecond per call.
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(derive(*key))
    gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # dropout on a GPU draws from the GPU's own
    if gpu:
        gpu_state = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(derive(*key))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        if gpu:
            torch.cuda.set_rng_state(gpu_state)
