"""The client: trains on its own points. The one line that is not ordinary Flower is `mods=`."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flowerapp import task
from rtopk.flower import RTopKMod

app = ClientApp(mods=[RTopKMod(density=0.01, store="client-state")])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's points."""
    model = task.make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = task.points(int(context.node_config["partition-id"]))
    loss = task.train(
        model, inputs, labels, context.run_config["local-steps"], context.run_config["learning-rate"]
    )
    metrics = MetricRecord({"num-examples": len(labels), "loss": loss})
    arrays = ArrayRecord.from_torch_state_dict(model.state_dict())
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on this client's points."""
    model = task.make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = task.points(int(context.node_config["partition-id"]))
    metrics = MetricRecord({"num-examples": len(labels), "accuracy": task.accuracy(model, inputs, labels)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
