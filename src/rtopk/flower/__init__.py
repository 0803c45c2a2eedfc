"""Federated training on Flower with compressed messages both ways: two lines for a Flower app.

`ClientApp(mods=[RTopKMod(density=0.01)])` on the clients, `RTopKStrategy(FedAvg(...))` on the server. The
names are imported lazily, so that the parts without Flower (transaction, downlink, intake) can
be used and tested without flwr.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtopk.flower.mod import RTopKMod
    from rtopk.flower.strategy import RTopKStrategy

__all__ = ["RTopKMod", "RTopKStrategy"]
_HOME = {"RTopKMod": "rtopk.flower.mod", "RTopKStrategy": "rtopk.flower.strategy"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rtopk.flower' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        raise ModuleNotFoundError(f"{name} needs Flower: pip install 'rtopk[flower]'", name="flwr") from error
