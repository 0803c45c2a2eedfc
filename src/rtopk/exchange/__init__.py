"""How the payloads of all nodes become one mean: `exchange="all-gather"` or `"all-reduce"`.

All-gather: every node receives every payload and averages them itself, (n - 1) k entries. All-reduce: every node
owns one n-th of the entries. It receives the others' chosen entries of its share, averages them, and passes on the
largest; the rest stays in its own residual. A node receives about 2 k entries however many nodes there are:

    scatter   part j of every payload goes to node j
    reduce    node j averages the parts in node order, adds its residual, selects, encodes
    gather    what the owners pass on goes to all nodes

Nothing is lost: applied + the nodes' residuals + the owners' residuals = what came in. Replicas stay bit-identical,
because all decode the same payloads of the owners.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from rtopk.codec import Codec
from rtopk.exchange.gathered import AllGathered, Gathering
from rtopk.exchange.reduced import NOTE_BYTES, AllReduced, OwnerDensity, Reducing
from rtopk.exchange.vector import OWNER, Message, Spans, Traffic, Vector
from rtopk.schedule import Schedule, check_density
from rtopk.transport import Transport, wait_for

__all__ = [
    "NOTE_BYTES",
    "OWNER",
    "AllGathered",
    "AllReduced",
    "Exchange",
    "ExchangeName",
    "Message",
    "OwnerDensity",
    "Spans",
    "Traffic",
    "Vector",
    "arrive",
    "check_exchange",
    "make_exchange",
    "send",
]

ExchangeName = Literal["all-gather", "all-reduce", "auto"]  # what "auto" is, `defaults` says
Exchange = AllGathered | AllReduced


def check_exchange(name: str, owner_density: OwnerDensity | None) -> None:
    """Raise ValueError for options of an exchange that make no sense."""
    if name not in get_args(ExchangeName):
        raise ValueError(f"exchange must be one of {get_args(ExchangeName)}, got {name!r}")
    if owner_density is None:
        return
    if name != "all-reduce":
        raise ValueError(f"owner_density is for exchange='all-reduce', got {owner_density!r} with {name!r}")
    if isinstance(owner_density, str) and owner_density != "all":
        raise ValueError(f"owner_density must be in (0, 1], a schedule or 'all', got {owner_density!r}")
    if not isinstance(owner_density, str) and not callable(owner_density):
        check_density(owner_density, "owner_density")


def make_exchange(
    name: str,
    transport: Transport,
    vector: Vector,
    codec: Codec,
    density: Schedule,
    owner_density: OwnerDensity | None = None,
) -> Exchange:
    """Make the exchange of one vector, by the name of its kind."""
    check_exchange(name, owner_density)
    if name == "all-reduce":
        return AllReduced(transport, vector, codec, density, owner_density)
    return AllGathered(transport, vector, codec)


def send(
    exchanges: Sequence[Exchange], header: Tensor, flags: Tensor, payloads: Sequence[Tensor], step: int
) -> Message:
    """Send the payloads of some vectors, whose exchanges are of one kind, in one message."""
    gathered = [exchange for exchange in exchanges if isinstance(exchange, AllGathered)]
    reduced = [exchange for exchange in exchanges if isinstance(exchange, AllReduced)]
    if gathered:
        return Gathering(gathered, header, flags, payloads)
    return Reducing(reduced, header, flags, payloads, step)


def arrive(messages: Sequence[Message]) -> None:
    """Wait for messages, in their order; the host waits for a card once, however many there are."""
    wait_for([message.work for message in messages if isinstance(message, Gathering)])
