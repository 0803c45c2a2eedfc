"""A client id belongs to a node: nobody answers in another's name, and a node that restarts gets its id back."""

import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp.strategy import FedAvg
from harness import LocalGrid, initial, quadratic_app

from rtopk.flower import RTopKMod, RTopKStrategy
from rtopk.flower.intake import RefusedError
from rtopk.flower.roster import Roster

FEW = {"min_train_nodes": 1, "min_available_nodes": 1, "fraction_evaluate": 0.0}


def round_of(strategy, grid, number, arrays, change=lambda replies: replies):
    replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
    replies.sort(key=lambda reply: reply.metadata.src_node_id)
    return strategy.aggregate_train(number, change(replies))[0]


def federation(**options):
    names = [{"client-id": name} for name in ("a", "b", "c")]
    grid = LocalGrid([quadratic_app(RTopKMod(0.1), n) for n in range(3)], names)
    return RTopKStrategy(FedAvg(**FEW), **options), grid


def as_other(replies, node, client):
    """Let a node answer as another client."""
    for reply in replies:
        if reply.metadata.src_node_id == node:
            reply.content["rtopk"]["client"] = client
    return replies


@pytest.mark.parametrize("first", [0, 1, 2])
def test_nobody_answers_for_another(first):
    """In round 2 node 103 says it is "a", and is heard first; round 3 is as if it had said nothing."""
    strategy, grid = federation()
    honest, same = federation()
    arrays, expected = round_of(strategy, grid, 1, initial()), round_of(honest, same, 1, initial())

    def lie(replies):
        lied = as_other(replies, 103, "a")
        return [lied[2], *lied[:2]] if first == 0 else [lied[0], lied[2], lied[1]] if first == 1 else lied

    arrays = round_of(strategy, grid, 2, arrays, lie)
    expected = round_of(honest, same, 2, expected, lambda replies: replies[:2])
    assert [(r.client, r.node) for r in strategy.refusals] == [("c", 103)]
    assert "node 103 is client 'c' and answers as 'a'" in strategy.refusals[0].reason
    assert {n: a.data for n, a in arrays.items()} == {n: a.data for n, a in expected.items()}
    assert strategy.intake.accepted == {"a": 1, "b": 1, "c": 0}
    round_of(strategy, grid, 3, arrays)
    assert strategy.intake.accepted == {"a": 2, "b": 2, "c": 2}


def test_a_stranger_cannot_take_an_id_while_its_node_is_there():
    strategy, grid = federation()
    arrays = round_of(strategy, grid, 1, initial())
    stranger = quadratic_app(RTopKMod(0.1, client_id="a"), 9)
    grid.apps[104], grid.contexts[104] = stranger, Context(1, 104, {}, RecordDict(), {})
    arrays = round_of(strategy, grid, 2, arrays, lambda replies: replies[::-1])  # it is the first to answer
    assert [r.node for r in strategy.refusals] == [104]
    assert "client 'a' is node 101, not 104; rebind='gone'" in strategy.refusals[0].reason
    assert strategy.roster.clients == {101: "a", 102: "b", 103: "c"}


@pytest.mark.parametrize(("rebind", "accepted"), [("gone", 1), ("always", 1), ("never", 0)])
def test_a_node_that_comes_back_under_a_new_id(rebind, accepted):
    strategy, grid = federation(rebind=rebind)
    arrays = round_of(strategy, grid, 1, initial())
    grid.apps[201], grid.contexts[201] = grid.apps.pop(101), grid.contexts.pop(101)
    grid.contexts[201].state = RecordDict()
    round_of(strategy, grid, 2, arrays)
    assert strategy.intake.accepted["a"] == accepted
    assert [r.node for r in strategy.refusals] == ([] if accepted else [201])
    assert (101 in strategy.roster.clients) != bool(accepted)


def test_bindings_survive_the_server():
    strategy, grid = federation()
    arrays = round_of(strategy, grid, 1, initial())
    again, _ = federation()
    again.load_state_dict(strategy.state_dict())
    round_of(again, grid, 1, arrays, lambda replies: as_other(replies, 103, "a"))
    assert [r.node for r in again.refusals] == [103]
    assert again.intake.accepted == {"a": 1, "b": 1, "c": 0}


def test_ids_that_are_given_stand_over_those_of_a_state():
    roster = Roster(clients={1: "a", 2: "b"})
    roster.load_state_dict({"clients": {1: "c", 3: "b", 4: "d"}})
    assert roster.clients == {1: "a", 2: "b", 4: "d"}


def test_ids_can_be_given_beforehand():
    """Then not even the first to answer can take one."""
    strategy, grid = federation(clients={101: "a", 103: "c"})
    round_of(strategy, grid, 1, initial(), lambda replies: as_other(replies, 102, "a")[::-1])
    assert [r.node for r in strategy.refusals] == [102]
    with pytest.raises(ValueError, match="a client id of its own"):
        Roster(clients={1: "a", 2: "a"})
    with pytest.raises(ValueError, match="rebind must be one of"):
        Roster(rebind="sometimes")


def test_a_node_is_one_client():
    roster = Roster()
    roster.bind(1, "a", list)
    roster.bind(1, "a", list)
    with pytest.raises(RefusedError, match="node 1 is client 'a' and answers as 'b'"):
        roster.bind(1, "b", list)
    free = Roster(rebind="always")
    free.bind(1, "a", list)
    free.bind(2, "b", list)
    free.bind(1, "b", list)  # takes b over, leaves a
    assert free.clients == {1: "b"}
    free.bind(2, "a", list)
    assert free.clients == {1: "b", 2: "a"}
