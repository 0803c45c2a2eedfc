"""A federation in one process: real apps, mods and strategies of Flower, and a grid that can misbehave."""

from collections.abc import Callable

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid:
    """Deliver messages to client apps in this process; `deliver` may drop, repeat or damage them."""

    def __init__(self, apps, node_configs=None, deliver=None, run_config=None):
        # Flower sets these in the process of a task; here the test is the task.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.apps = dict(enumerate(apps, start=101))  # node id -> app
        configs = node_configs or [{"partition-id": n} for n in range(len(apps))]
        self.contexts = {
            node: Context(1, node, config, RecordDict(), run_config or {})
            for node, config in zip(self.apps, configs, strict=True)
        }
        self.deliver = deliver or (lambda grid, message: [grid.call(message)])
        self.sent = []

    def get_node_ids(self):
        return list(self.apps)

    def call(self, message):
        node = message.metadata.dst_node_id
        wire = message.content
        copy = Message(RecordDict(dict(wire)), message_type=message.metadata.message_type, dst_node_id=node)
        try:
            return self.apps[node](copy, self.contexts[node])
        except Exception as error:
            return Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)

    def send_and_receive(self, messages, timeout=None):
        replies = []
        for message in messages:
            self.sent.append(message)
            replies += self.deliver(self, message)
        return replies


def move(arrays, shift):
    """Return where a client goes from here: a tenth of the way to its own optimum; integers count up."""
    return {
        name: value + 0.1 * (shift + torch.linspace(-1, 1, value.numel()).view(value.shape) - value)
        if value.is_floating_point()
        else value + 1
        for name, value in arrays.items()
    }


def tensors(record):
    """Copy the arrays of a record."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def quadratic_app(mod, shift: float, log: list | None = None, fail: Callable[[int], bool] = lambda r: False):
    """A client that moves a tenth of the way to its own optimum; what it moved is appended to `log`."""
    app = ClientApp(mods=[mod])

    @app.train()
    def train(message, context):
        arrays = tensors(message.content["arrays"])
        server_round = message.content["config"]["server-round"]
        if fail(server_round):
            raise RuntimeError("training failed")
        own = move(arrays, shift)
        if log is not None:
            log.append((server_round, {n: arrays[n] - own[n] for n in own}))
        metrics = MetricRecord(
            {"num-examples": 10, "loss": float(sum(v.float().square().sum() for v in own.values()))}
        )
        reply = RecordDict({"arrays": ArrayRecord.from_torch_state_dict(own), "metrics": metrics})
        return Message(reply, reply_to=message)

    @app.evaluate()
    def evaluate(message, context):
        total = float(
            sum(np.square(a.numpy().astype(float)).sum() for a in message.content["arrays"].values())
        )
        return Message(
            RecordDict({"metrics": MetricRecord({"num-examples": 10, "norm": total})}), reply_to=message
        )

    return app


def initial(counter: bool = False):
    rng = torch.Generator().manual_seed(3)
    arrays = {"w": torch.randn(20, 14, generator=rng), "b": torch.randn(20, generator=rng)}
    if counter:
        arrays["count"] = torch.tensor(5, dtype=torch.int64)
        arrays["wide"] = torch.randn(3, generator=rng, dtype=torch.float64)
    return ArrayRecord.from_torch_state_dict(arrays)
