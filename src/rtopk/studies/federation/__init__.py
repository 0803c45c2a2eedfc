"""All that decides a federated run on Flower."""

import dataclasses
import json
from dataclasses import dataclass

from rtopk.local.outer import by_name
from rtopk.memory import Memory
from rtopk.studies.config import Config, option


@dataclass(frozen=True, kw_only=True)
class Federation:
    """All that decides a federated run on Flower, and where it leaves its result."""

    config: Config
    compressed: bool = True  # False is Flower alone: dense FedAvg
    downlink_density: float = option(1.0, "Part of the entries that the server sends.")
    downlink_values: str = option("fp32", "How values go down; fp32 at density 1 is exact.")
    outer: str = option("sgd", "At the centre: sgd, nesterov or sparseloco.")
    anchor_every: int = 0
    initial_known: bool = option(True, "Clients make the first model from the seed.")
    store: str = ""  # folder of the clients' states; empty: Flower's context
    result: str = ""  # file
    timeout: float = 600.0  # seconds a round
    watched: bool = False  # after each round wait until whoever counts bytes has looked

    def __post_init__(self) -> None:
        if self.config.setting != "federated":
            raise ValueError(f"setting must be federated, got {self.config.setting!r}")
        self.config.require_common("Flower")
        rule = None if self.config.method == "powersgd" else self.config.make_selector()
        if rule is None or rule.keeps_state or rule.needs_all_nodes or not rule.sends_k:
            raise ValueError(
                "under Flower, where clients come and go, method must be one of dense, top-k, random-k and rtop-k, "
                f"got {self.config.method!r}"
            )
        by_name(self.outer)

    def to_json(self) -> str:
        """Write it for the processes of a run."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Federation":
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "config": Config(**values["config"])})

    def make_memory(self) -> Memory:
        """Build a client's memory."""
        own = by_name(self.outer).memory
        return self.config.make_memory() if own is None else own()
