"""What users get who name none: the only place. docs/decisions.md says why."""

from rtopk.aggregate import Mean
from rtopk.exchange import ExchangeName, OwnerDensity, check_exchange
from rtopk.memory import Memory
from rtopk.select import METHODS, RTopK, Selector, TopK, as_rule


def selector(nodes: int, memory: Memory, given: Selector | str | None = None) -> Selector:
    """Return the rule that is given, perhaps by its name; raise ValueError for anything else.

    Given none: the k largest; without a memory, k of the 2 k largest, so that nodes send different ones.
    The paper's r = n k is `RTopK(nodes=n)`, or "rtop-k".
    """
    if isinstance(given, str):
        if given not in METHODS:
            raise ValueError(
                f"selector must be one of {tuple(METHODS)} or an object such as rtopk.TopK(), got {given!r}"
            )
        try:
            return METHODS[given].for_run(nodes)
        except ValueError as error:
            raise ValueError(
                f"selector {given!r} needs more than its name ({error}); give an object of "
                f"rtopk.{METHODS[given].__name__}"
            ) from error
    if given is not None:
        as_rule(given)  # refuses what cannot select
        return given
    return TopK() if keeps(memory) or nodes == 1 else RTopK(r_over_k=2)


def memory(momentum_can_move: bool) -> str:
    """Return the name of the memory: momentum correction where it can take the optimizer's momentum over."""
    return "momentum-correction" if momentum_can_move else "error-feedback"


def exchange(nodes: int, name: ExchangeName) -> ExchangeName:
    """Return the exchange that "auto" stands for: an all-reduce where an all-gather brings four times its bytes.

    An all-gather brings n - 1 payloads to every node, an all-reduce about 2 (n - 1) / n.
    """
    if name != "auto":
        return name
    return "all-reduce" if nodes >= 8 else "all-gather"


def owner_density(nodes: int, name: ExchangeName, given: OwnerDensity | None) -> OwnerDensity | None:
    """Return what owners pass on, as given; None where "auto" is an all-gather, which has no owners."""
    if name != "auto" or exchange(nodes, name) == "all-reduce":
        return given
    check_exchange("all-reduce", given)
    return None


def mean(memory: Memory) -> Mean:
    """Return the mean: over all nodes, or over those that sent an entry.

    Without a memory, what is divided by nodes that did not send it is lost.
    """
    return "nodes" if keeps(memory) else "received"


def keeps(memory: Memory) -> bool:
    """Say whether a memory keeps what is not sent."""
    return getattr(memory, "keeps", True)
