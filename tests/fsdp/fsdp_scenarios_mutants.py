"""Bugs that an engine for sharded models could have, put into ours: each runs the scenario that must notice."""

from typing import Any
from unittest import mock

import fsdp_scenarios as scenarios
from ddp_worker import Place

from rtopk.fsdp import State, shards


def shards_skip_alone(at: Place) -> dict[str, Any]:
    """A NaN in one shard stops only the replicas of that shard."""
    with mock.patch.object(State, "settle", lambda own, refusal, error: (refusal, error)):
        return scenarios.not_finite(at)


def shards_draw_alike(at: Place) -> dict[str, Any]:
    """All shards draw the same ranks."""
    with mock.patch.object(State, "seed", property(lambda own: own.options.seed)):
        return scenarios.equals_reference(at)


def earlier_means_sent_again(at: Place) -> dict[str, Any]:
    """What an earlier backward of the step has exchanged is taken for a gradient."""
    with mock.patch.object(State, "_set_aside"):
        return scenarios.against_native(at, {"global, twice": {"loss": scenarios.twice}})


def idle_layers_drained(at: Place) -> dict[str, Any]:
    """A layer that took no part sends its residual, and nobody applies it."""

    def all_take_part(own: State) -> set[str]:
        for parameter in own.parameters.values():
            if parameter.grad is None:
                parameter.grad = parameter.detach() * 0.0
        return set(own.parameters)

    with mock.patch.object(State, "_fresh", all_take_part):
        return scenarios.idle(at)


def only_the_last_of_modules_sharded_together(at: Place) -> dict[str, Any]:
    """Modules that share FSDP's hook are taken for two, and the second hook replaces the first."""
    parts = shards._parts

    def split(model: Any, names: Any) -> Any:
        return [(module, [name]) for module, together in parts(model, names) for name in together]

    with mock.patch.object(shards, "_parts", split):
        return scenarios.dense_is_native(at)
