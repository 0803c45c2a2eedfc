"""The server: FedAvg. The one line that is not ordinary Flower is the strategy's wrapper."""

import json
import os
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from flowerapp import task
from rtopk.flower import RTopKStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and say what they cost."""
    strategy = RTopKStrategy(FedAvg(), downlink_density=0.01)
    result = strategy.start(
        grid,
        ArrayRecord.from_torch_state_dict(task.make_model().state_dict()),
        num_rounds=context.run_config["num-server-rounds"],
    )
    model = task.make_model()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    summary = {
        "accuracy": task.accuracy(model, *task.points(owner=-1, count=2000)),
        "bytes": {number: entry.total for number, entry in strategy.ledger.rounds.items()},
    }
    print(json.dumps(summary))
    if "SUMMARY" in os.environ:
        Path(os.environ["SUMMARY"]).write_text(json.dumps(summary))
