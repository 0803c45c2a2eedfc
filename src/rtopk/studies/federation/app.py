"""The project's tasks as Flower apps: the clients run the one training loop's local training, to the bit.

Arrays are the model's parameters (they compete as `Config` says) and its buffers (sent whole). Data order,
draws and initial weights come from the seed, so simulation, deployment and the in-process loop end with the
same weights if all clients take part and the downlink is lossless.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import Tensor

from rtopk.flower import RTopKMod, RTopKStrategy
from rtopk.flower.records import data_bytes
from rtopk.local.outer import by_name
from rtopk.select import Selector
from rtopk.state_file import write_atomically
from rtopk.studies.federation import Federation
from rtopk.studies.train.loop import Run, seeded
from rtopk.studies.train.records import digest


class _OneNode:
    """The nodes of a process that is one client: itself."""

    def __init__(self, nodes: int, number: int) -> None:
        self.nodes = nodes
        self.local = range(number, number + 1)

    def exchange(self, payloads: Any) -> list[Tensor]:
        """Refuse: Flower carries the payloads."""
        raise RuntimeError("a Flower client cannot exchange payloads by itself: Flower carries them")

    def swap(self, parts: Any) -> list[list[Tensor]]:
        """Refuse, too."""
        return [self.exchange(parts)]


def arrays_of(run: Run) -> ArrayRecord:
    """Return parameters and buffers of a run's model."""
    return ArrayRecord.from_torch_state_dict({n: t.detach() for n, t in _tensors(run).items()})


def _tensors(run: Run) -> dict[str, Tensor]:
    return {**dict(run.model.named_parameters()), **dict(run.model.named_buffers())}


@torch.no_grad()
def load_arrays(run: Run, arrays: ArrayRecord) -> None:
    """Put arrays into a run's model."""
    received = arrays.to_torch_state_dict()
    for name, tensor in _tensors(run).items():
        tensor.copy_(received[name])


def client_app(federation: Federation | None = None) -> ClientApp:
    """Make the client; without a federation it is read from the run's config."""
    app = ClientApp(mods=[_mod(federation)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        run = _run(_federation(federation, context), context)
        node = run.nodes[0]
        run.round = int(str(message.content["config"]["server-round"])) - 1
        load_arrays(run, message.content.array_records["arrays"])
        node.buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
        config = run.config
        with run.at(node), seeded(config.seed, "forward", node.number, run.round):
            loss = run.train_node(node, config.rate(run.round))
        metrics = MetricRecord({"num-examples": len(node.shard), "loss": loss})
        return Message(RecordDict({"arrays": arrays_of(run), "metrics": metrics}), reply_to=message)

    return app


def _mod(federation: Federation | None) -> Any:
    def mod(message: Message, context: Context, call_next: Any) -> Message:
        chosen = _federation(federation, context)
        if not chosen.compressed:
            return cast(Message, call_next(message, context))
        config = chosen.config
        inner = RTopKMod(
            config.make_density(),
            selector=cast(Selector, config.make_selector()),
            memory=chosen.make_memory,
            values=config.values,
            seed=config.seed,
            store=chosen.store or None,
            initial=lambda context: arrays_of(_run(chosen, context)),
        )
        return inner(message, context, call_next)

    return mod


_runs: dict[str, Run] = {}  # a simulated client's process serves many messages: data and model are made once


def _run(federation: Federation, context: Context) -> Run:
    torch.set_num_threads(1)
    config, number = federation.config, int(str(context.node_config["partition-id"]))
    key = f"{config.key}-{number}"
    if key not in _runs:
        _runs[key] = Run(config, transport=_OneNode(config.nodes, number))
    return _runs[key]


def _federation(federation: Federation | None, context: Context) -> Federation:
    return federation or Federation.from_json(bytes.fromhex(str(context.run_config["federation"])).decode())


def server_app(federation: Federation | None = None) -> ServerApp:
    """Make the server; without a federation it is read from the run's config."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        serve(_federation(federation, context), grid)

    return app


def serve(federation: Federation, grid: Grid) -> dict[str, Any]:
    """Run the rounds, evaluate, write the result."""
    config = federation.config
    run = Run(config, transport=_OneNode(config.nodes, 0))
    strategy = make_strategy(federation, run)
    curve: list[dict[str, float]] = []
    started = time.monotonic()
    progress = Path(federation.result + ".progress") if federation.result else None

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if progress is not None:
            write_atomically(progress, str(server_round).encode())
            wait_until_seen(federation, server_round)
        due = server_round % config.evaluate_every == 0 or server_round == config.rounds
        if not due or not server_round:
            return None
        load_arrays(run, arrays)
        scores = run.scores()
        sent, received = sent_and_received(strategy, run, server_round)
        seconds = round(time.monotonic() - started, 3)
        curve.append(
            {
                "round": server_round,
                "sent_bytes": sent,
                "received_bytes": received,
                "seconds": seconds,
                **scores,
            }
        )
        return MetricRecord(dict(scores))

    result = strategy.start(
        grid, arrays_of(run), num_rounds=config.rounds, timeout=federation.timeout, train_config=ConfigRecord(),
        evaluate_fn=evaluate,
    )  # fmt: skip
    if isinstance(strategy, RTopKStrategy) and not strategy.intake.accepted:
        raise RuntimeError(f"no reply was accepted in {config.rounds} rounds: {strategy.refusals[:3]}")
    load_arrays(run, result.arrays)
    record = {
        "kind": "federated",
        "key": f"flower-{config.key}",
        "config": config.to_dict(),
        "compressed": federation.compressed,
        "weights": digest(run.vector()),
        "parameters": run.layout.size,
        "metric": run.task.metric,
        "curve": curve,
        "final": curve[-1],
        "sent_bytes_per_round": curve[-1]["sent_bytes"] / config.rounds,
        "received_bytes_per_round": curve[-1]["received_bytes"] / config.rounds,
        "seconds": round(time.monotonic() - started, 3),
    }
    if isinstance(strategy, RTopKStrategy):
        record["ledger"] = strategy.ledger.to_dict()
        record["refused"] = [dataclasses.asdict(refusal) for refusal in strategy.refusals]
    if federation.result:
        write_atomically(Path(federation.result), json.dumps(record, indent=1).encode())
    return record


def sent_and_received(strategy: Strategy, run: Run, rounds: int) -> tuple[float, float]:
    """Return the bytes of payloads that a client has sent and received so far, on average."""
    if isinstance(strategy, RTopKStrategy):
        entries = strategy.ledger.rounds.values()
        sent, received = sum(e.up_payload for e in entries), sum(e.down_payload for e in entries)
        return sent / run.config.nodes, received / run.config.nodes
    model = data_bytes(RecordDict({"arrays": arrays_of(run)}))  # FedAvg sends it both ways
    return float(rounds * model), float(rounds * model)


def wait_until_seen(federation: Federation, server_round: int, seconds: float = 30.0) -> None:
    """Let the watcher read its counters before the next round's messages flow; go on if there is none."""
    seen, deadline = Path(federation.result + ".seen"), time.monotonic() + seconds
    while federation.watched and time.monotonic() < deadline:
        if seen.exists() and int(seen.read_text()) >= server_round:
            return
        time.sleep(0.01)


def make_strategy(federation: Federation, run: Run) -> Strategy:
    """Build FedAvg over all clients, with or without compression."""
    config = federation.config
    inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=config.nodes, min_available_nodes=config.nodes)
    if not federation.compressed:
        return inner
    buffers = {name for name, _ in run.model.named_buffers()}
    dense = {
        n for n, at in zip(run.layout.names, run.layout.offsets, strict=False) if at >= run.layout.sparse_size
    }
    return RTopKStrategy(
        inner,
        mean=config.mean,
        weighted=config.weighted,
        dense=lambda name, shape: name in dense or name in buffers,
        outer=by_name(federation.outer).outer,
        downlink_density=federation.downlink_density,
        downlink_values=federation.downlink_values,
        anchor_every=federation.anchor_every,
        initial_known=federation.initial_known,
    )
