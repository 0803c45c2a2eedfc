"""No mass is lost and none counted twice, whatever happens to messages, replies and processes."""

import io

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rtopk import Codec, ErrorFeedback, MomentumCorrection, NoMemory, Sparsifier, TopK
from rtopk.codec import PayloadError
from rtopk.flower.transaction import NOTHING, Acknowledgement, Freshness, Transaction

D = 8
UPDATES = st.lists(st.integers(-9, 9), min_size=D, max_size=D)


def make(memory=ErrorFeedback, values="fp32"):
    return Transaction(Sparsifier(TopK(), 0.25, memory(), Codec(values)))


def reload(transaction):
    """Through bytes, as a process that ends and starts again."""
    buffer = io.BytesIO()
    torch.save(transaction.state_dict(), buffer)
    buffer.seek(0)
    fresh = make(type(transaction.sparsifier.memory))
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    return fresh


class Federation(RuleBasedStateMachine):
    """One client, one server, and a network that drops, repeats and reorders.

    Updates are small whole numbers, so sums are exact and the law can be checked with ==.
    """

    def __init__(self):
        super().__init__()
        self.disk = make()
        self.came_in = torch.zeros(D)  # updates that entered the memory
        self.applied = torch.zeros(D)  # what the server used
        self.session, self.clock, self.round, self.accepted = 1, 0, -1, NOTHING
        self.messages, self.replies, self.open = [], [], False

    @rule()
    def server_starts_round(self):
        self.round += 1
        self.clock += 1
        self.open = True
        self.messages.append(("train", Acknowledgement(self.session, self.clock, self.accepted), self.round))

    @precondition(lambda self: self.round >= 0)
    @rule()
    def server_asks_for_evaluation(self):
        self.clock += 1
        self.open = False  # what was not accepted when the server spoke again never is
        self.messages.append(
            ("evaluate", Acknowledgement(self.session, self.clock, self.accepted), self.round)
        )

    @precondition(lambda self: self.messages)
    @rule(
        data=st.data(),
        update=UPDATES,
        fate=st.sampled_from(["answered", "crash before save", "reply lost"]),
    )
    def client_gets_a_message(self, data, update, fate):
        """Any message that was ever sent, so also old ones and those that came before."""
        kind, message, round_ = data.draw(st.sampled_from(self.messages))
        client = reload(self.disk)
        freshness = client.settle(message)
        if freshness is Freshness.STALE:
            return
        if freshness is Freshness.DUPLICATE:
            if kind == "train" and client.pending is not None:
                self.replies.append((client.pending.round, client.pending.payload))
            return
        vector = torch.tensor(update, dtype=torch.float32)
        if kind == "train":
            payload = client.produce(vector, round_)
            client.hold(round_, payload, b"reply")
        if fate == "crash before save":
            return
        self.disk = client
        if kind == "train":
            self.came_in += vector
            if fate == "answered":
                self.replies.append((round_, payload))

    @precondition(lambda self: self.replies)
    @rule(data=st.data())
    def server_gets_a_reply(self, data):
        """Any reply ever sent: the server takes only one of its current round."""
        round_, payload = data.draw(st.sampled_from(self.replies))
        if self.open and round_ == self.round and self.accepted < round_:
            self.applied += Codec().decode(payload).to_dense()
            self.accepted = round_

    @invariant()
    def nothing_lost_nothing_twice(self):
        memory = self.disk.sparsifier.memory
        kept = torch.zeros(D) if memory.residual is None else memory.residual.clone()
        pending = self.disk.pending
        if pending is not None and pending.round != self.accepted:
            kept += Codec().decode(pending.payload).to_dense()
        assert torch.equal(self.applied + kept, self.came_in)


TestFederation = Federation.TestCase
TestFederation.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def say(transaction, clock, accepted=NOTHING, session=1):
    return transaction.settle(Acknowledgement(session, clock, accepted))


def test_a_client_away_for_ten_rounds():
    client = make()
    say(client, 1)
    update = torch.arange(1.0, D + 1)
    client.hold(0, client.produce(update, 0), b"")
    client = reload(client)
    assert say(client, 12, accepted=NOTHING) is Freshness.NEW  # round 0 never arrived
    assert torch.equal(client.sparsifier.memory.residual, update)


def test_an_accepted_payload_is_dropped_once():
    client = make()
    say(client, 1)
    client.hold(0, client.produce(torch.arange(1.0, D + 1), 0), b"")
    say(client, 2, accepted=0)
    assert client.pending is None
    assert client.committed == 0
    assert client.sparsifier.memory.residual.tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert say(client, 2, accepted=0) is Freshness.DUPLICATE
    assert say(client, 1) is Freshness.STALE


def test_an_old_copy_of_the_state_is_not_sent_again(caplog):
    client = make()
    say(client, 1)
    client.hold(0, client.produce(torch.ones(D), 0), b"")
    say(client, 2, accepted=7)
    assert client.sparsifier.memory.residual is None
    assert client.committed == 7
    assert "out of date" in caplog.text


def test_a_new_session_starts_over_and_the_old_one_is_stale():
    client = make()
    say(client, 5, session=10)
    client.hold(0, client.produce(torch.ones(D), 0), b"")
    assert say(client, 1, session=11) is Freshness.NEW
    assert client.pending is None
    assert client.sparsifier.memory.residual is None
    assert say(client, 99, session=10) is Freshness.STALE


def test_produce_refuses_while_pending():
    client = make()
    say(client, 1)
    client.hold(0, client.produce(torch.ones(D), 0), b"")
    with pytest.raises(ValueError, match="still pending"):
        client.produce(torch.ones(D), 1)


@pytest.mark.parametrize("memory", [ErrorFeedback, NoMemory, MomentumCorrection])
def test_every_memory_takes_back(memory):
    """What was taken out for a payload is in the residual again, quantised or not."""
    client = make(memory, values="4bit")
    say(client, 1)
    update = torch.linspace(-3, 5, D)
    client.hold(0, client.produce(update, 0), b"")
    say(client, 2)
    if memory is not NoMemory:
        assert torch.allclose(client.sparsifier.memory.residual, update, atol=1e-6)
    assert client.pending is None


class Unreadable(Codec):
    """A codec whose payloads nobody can decode: a defect of the encoder."""

    def encode_with_decoded(self, vector, rng=None):
        payload, sent = super().encode_with_decoded(vector, rng)
        payload[-1] ^= 1  # the checksum is wrong now
        return payload, sent


@pytest.mark.parametrize("memory", [ErrorFeedback, MomentumCorrection])
def test_a_payload_that_cannot_be_decoded_is_given_up_with_its_mass_put_back(memory):
    """It used to stop the client at every message, with that payload on disk for ever."""
    client = Transaction(Sparsifier(TopK(), 0.25, memory(), Unreadable("4bit")))
    say(client, 1)
    update = torch.linspace(-3, 5, D)
    client.hold(0, client.produce(update, 0), b"")
    with pytest.raises(PayloadError):
        client.sparsifier.codec.decode(client.pending.payload)
    client = reload(client)
    say(client, 2)  # the server refused it
    assert client.pending is None
    assert torch.allclose(client.sparsifier.memory.residual, update, atol=1e-6)
    client.hold(1, client.produce(torch.zeros(D), 1), b"")  # and goes on


def test_an_older_state_without_what_was_sent(caplog):
    """A client that is stuck with such a payload on disk gets loose: that payload is lost, and said to be."""
    client = make()
    say(client, 1)
    client.hold(0, client.produce(torch.arange(1.0, D + 1), 0), b"")
    state = client.state_dict()
    del state["pending"]["sent"]
    good, bad = make(), make()
    good.load_state_dict(state)
    say(good, 2)
    assert torch.equal(good.sparsifier.memory.residual, torch.arange(1.0, D + 1))
    state["pending"]["payload"] = state["pending"]["payload"].clone()
    state["pending"]["payload"][-1] ^= 1
    bad.load_state_dict(state)
    say(bad, 2)
    assert bad.pending is None
    assert "cannot be decoded and is lost" in caplog.text
