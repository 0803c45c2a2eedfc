"""A Flower app whose network misbehaves, for both real engines: the server's grid drops, repeats and reorders.

Clients are `kind-store`: "faulty-file" keeps its state in a file, "faulty-context" in Flower's context;
"away-..." is out of reach for ten rounds. Each client appends what it moved to a log; at the end the server
asks all clients for their state and writes down what it accepted, so that a test can do the books.
"""

import os
import sys
import time
from copy import copy
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from harness import initial, move, tensors

from rtopk.flower import RTopKMod, RTopKStrategy
from rtopk.flower.intake import Intake
from rtopk.flower.records import HEADER
from rtopk.flower.store import FILE

CLIENTS = ["faulty-file", "faulty-context", "away-file", "away-context"]
ROUNDS = 14
AWAY = range(3, 13)  # ten rounds
EXCEPTION, DROPPED, DUPLICATE, STALE, LATE = 3, 5, 7, 9, 11  # rounds of the faulty clients; LATE and the next


def folder() -> Path:
    return Path(os.environ["RTOPK_TEST_FOLDER"])


def name_of(context) -> str:
    return str(context.node_config.get("client-id") or CLIENTS[int(context.node_config["partition-id"])])


def breaking(message, context, call_next):
    """Fail after the state was changed: this mod is outside RTopKMod."""
    reply = call_next(message, context)
    header = message.content.config_records.get(HEADER)
    if header and header["round"] + 1 == EXCEPTION and name_of(context).startswith("faulty"):
        raise RuntimeError("after the change")
    return reply


def compressing(message, context, call_next):
    store = folder() / "clients" if name_of(context).endswith("file") else None
    return RTopKMod(0.1, store=store, client_id=name_of)(message, context, call_next)


def client_app() -> ClientApp:
    app = ClientApp(mods=[breaking, compressing])

    @app.train()
    def train(message, context):
        torch.set_num_threads(1)
        client, arrays = name_of(context), tensors(message.content["arrays"])
        round_ = message.content["config"]["server-round"]
        hang = folder() / f"hang-{client}-{round_}"
        if hang.exists():  # until somebody kills this process
            hang.rename(hang.with_name(f"hangs-{client}"))
            time.sleep(3600)
        own = move(arrays, float(len(client)))
        log = folder() / "moved" / client
        log.mkdir(parents=True, exist_ok=True)
        torch.save({n: arrays[n] - own[n] for n in own}, log / f"{round_}-{time.time_ns()}.pt")
        metrics = MetricRecord({"num-examples": 10})
        return Message(
            RecordDict({"arrays": ArrayRecord.from_torch_state_dict(own), "metrics": metrics}),
            reply_to=message,
        )

    @app.query()
    def query(message, context):
        """Return this client's name and state."""
        record = context.state[HEADER]
        data = record["state"].data if isinstance(record, ArrayRecord) else Path(record["path"]).read_bytes()
        array = Array(dtype="uint8", shape=(len(data),), stype="state", data=data)
        return Message(
            RecordDict(
                {"who": ConfigRecord({"client": name_of(context)}), "state": ArrayRecord({"s": array})}
            ),
            reply_to=message,
        )

    return app


class FaultyGrid:
    """The engine's grid, with bad luck in between."""

    def __init__(self, grid, strategy):
        self.grid, self.strategy = grid, strategy
        self.history = {}  # (client, round) -> content, reply

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def send_and_receive(self, messages, timeout=None):
        """Deliver the messages of a round, more or less."""
        replies, good = [], []
        for message in messages:
            client = self.strategy.roster.clients.get(message.metadata.dst_node_id, "")
            round_ = message.content[HEADER]["round"] + 1
            self.history[client, round_] = message.content
            if client.startswith("away") and round_ in AWAY:
                continue
            if client.startswith("faulty") and round_ == LATE:
                continue
            good.append((client, round_, message))
        for reply in self.grid.send_and_receive([m for *_, m in good], timeout=timeout):
            client = self.strategy.roster.clients.get(reply.metadata.src_node_id, "")
            if client.startswith("faulty"):
                replies += self._after(client, good[0][1], reply)
            else:
                replies.append(reply)
        return replies

    def _after(self, client, round_, reply):
        """Return what becomes of a reply of an unlucky client."""
        node = reply.metadata.src_node_id
        if round_ == DROPPED:
            return []
        if round_ == DUPLICATE:  # delivered again, and its reply counted again
            return [reply, self._send(node, self.history[client, round_])]
        if round_ == STALE:  # a message and a reply from long ago
            old = copy(reply)
            old.content = self.history["reply", client]
            return [reply, self._send(node, self.history[client, 2]), old]
        if round_ == LATE + 1:  # the message of the round before comes after this one
            return [reply, self._send(node, self.history[client, LATE])]
        if round_ == 2:
            self.history["reply", client] = reply.content
        return [reply]

    def _send(self, node, content):
        copy = Message(RecordDict(dict(content)), message_type=MessageType.TRAIN, dst_node_id=node)
        return next(iter(self.grid.send_and_receive([copy], timeout=60)))


def server_app(faults: bool = True, rounds: int = ROUNDS, clients: int = len(CLIENTS)) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid, context):
        torch.set_num_threads(1)
        accepted = {}
        commit = Intake.commit

        def spy(self, taken, round_):
            for offer in taken:
                vector = self.decode(offer).to_dense().double()
                accepted[offer.client] = accepted.get(offer.client, 0) + vector
            commit(self, taken, round_)

        Intake.commit = spy
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=clients)
        strategy = RTopKStrategy(inner, on_round=mark)
        timeout = float(os.environ.get("RTOPK_TEST_TIMEOUT", "120"))
        chosen = FaultyGrid(grid, strategy) if faults else grid
        strategy.start(chosen, initial(), num_rounds=rounds, timeout=timeout)
        wanted = [
            Message(RecordDict(), message_type=MessageType.QUERY, dst_node_id=n) for n in grid.get_node_ids()
        ]
        replies = [r for r in grid.send_and_receive(wanted, timeout=timeout) if r.has_content()]
        states = {
            r.content["who"]["client"]: FILE.unpack(r.content["state"]["s"].data, "reply")["transaction"]
            for r in replies
        }
        result = {
            "accepted": accepted,
            "states": states,
            "rounds": dict(strategy.intake.accepted),
            "refusals": [(r.round, r.client, r.reason) for r in strategy.refusals],
            "layout": strategy.model.to_json(),
        }
        torch.save(result, folder() / "draft.pt")
        (folder() / "draft.pt").rename(folder() / "result.pt")

    return app


def mark(round_, strategy):
    """Say which round is done; wait if the test wants to do something in between."""
    (folder() / f"round-{round_}").touch()
    while (folder() / f"wait-{round_}").exists():
        time.sleep(0.1)


def simulate() -> None:
    """Run it in Flower's simulation."""
    from flwr.simulation import run_simulation

    run_simulation(
        server_app(),
        client_app(),
        len(CLIENTS),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": 2, "log_to_driver": False, "include_dashboard": False},
        },
    )


if __name__ == "__main__":
    sys.exit(simulate())
