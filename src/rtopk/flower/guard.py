"""Protect a round from the inner strategy: replies that make it fail are left out, and the round continues."""

import logging
from collections.abc import Callable, Hashable, Sequence
from traceback import format_tb
from typing import TypeVar

import numpy as np
from flwr.serverapp.strategy import Strategy

from rtopk.flower.inner import snapshot, undo
from rtopk.flower.refusal import reason_of

log = logging.getLogger("rtopk.flower")
Reply = TypeVar("Reply", bound=Hashable)
Result = TypeVar("Result")


def aggregate(
    action: Callable[[Sequence[Reply]], Result],
    replies: Sequence[Reply],
    inner: Strategy,
    refuse: Callable[[Reply, str], None],
    fatal: bool = False,
) -> Result | None:
    """Return `action(replies)`; if it fails, leave out the replies on which it fails alone.

    Return None, with the strategy unchanged, if that fails too or singles nobody out. With `fatal`, an action
    that fails on each of several replies raises: then the clients are not the cause.
    """
    before = snapshot(inner)

    def attempt(chosen: Sequence[Reply]) -> Result | Exception:
        try:
            with np.errstate(all="ignore"):  # what is not finite afterwards is an error of its own
                return action(chosen)
        except Exception as error:
            undo(inner, before)
            return error

    result = attempt(replies)
    if not isinstance(result, Exception):
        return result
    failed = {}
    for reply in replies if len(replies) > 1 else ():
        alone = attempt([reply])
        undo(inner, before)
        if isinstance(alone, Exception):
            failed[reply] = reason_of(alone)
    rest = [reply for reply in replies if reply not in failed]
    if fatal and failed and not rest:
        raise result
    if failed and rest:
        for reply, reason in failed.items():
            refuse(reply, f"aggregation fails with it: {reason}")
        log.warning(
            "aggregation failed with all replies, and is tried with %d of %d", len(rest), len(replies)
        )
        result = attempt(rest)
        if not isinstance(result, Exception):
            return result
    where = "".join(format_tb(result.__traceback__))  # not the whole exception: its text may be a client's
    log.error(
        "aggregation failed: %s; the model stays as it was, the round ends without it\n%s",
        reason_of(result),
        where,
    )
    return None
