"""What must hold for every selector, memory and codec, as plain functions.

test_laws.py runs them over every variant; test_mutants.py breaks the library on purpose and sees them fail.
"""

import functools
import itertools

import torch

from rtopk import (
    Codec,
    Dealt,
    DecayedErrorFeedback,
    ErrorFeedback,
    MomentumCorrection,
    NoMemory,
    RAgeK,
    Sparsifier,
    TopK,
    rtop_k,
)
from rtopk.seed import generator
from rtopk.select import METHODS

# Every rule that there is, by the name of its class; a new one is among them as soon as it is imported.
SELECTORS = {
    rule.__name__: functools.partial(rule.for_run, nodes=4, threshold=8.0) for rule in METHODS.values()
}
MEMORIES = {
    "NoMemory": NoMemory,
    "ErrorFeedback": ErrorFeedback,
    "DecayedErrorFeedback, no decay": lambda: DecayedErrorFeedback(1.0),
    "MomentumCorrection": MomentumCorrection,
    "MomentumCorrection, unmasked": lambda: MomentumCorrection(masking=False),
}
CODECS = {
    "fp32": Codec,
    "4bit": lambda: Codec("4bit"),
    "int8, stochastic": lambda: Codec("int8", "stochastic"),
}
LOSSLESS = ("fp32",)


def gradients(size, steps, seed, dtype=torch.float32):
    """Heavy-tailed gradients whose scale moves."""
    for step in range(steps):
        rng = generator("gradients", seed, step)
        yield (torch.randn(size, generator=rng) ** 3 * 2.0 ** (step % 5 - 2)).to(dtype)


def nothing_lost(selector, memory, codec, size=200, steps=12, density=0.05, seed=0):
    """Sent + residual = what came in, whatever the codec rounded away.

    With momentum correction what comes in is the velocity. Sums are taken in fp64; what is left is the rounding
    of the fp32 additions, at most 2^-23 of the largest partial sum for each step.
    """
    node = Sparsifier(selector, density, memory, codec, seed)
    came, sent, scale = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    velocity = torch.zeros(size, dtype=torch.float64)
    for step, gradient in enumerate(gradients(size, steps, seed)):
        if isinstance(memory, MomentumCorrection):
            velocity = memory.momentum * velocity + gradient.double()
            came += velocity
        else:
            came += gradient.double()
        vector = codec.decode(node.compress(gradient, step))
        sent[vector.indices] += vector.values.double()
        scale = torch.maximum(scale, came.abs() + sent.abs())
        if isinstance(memory, MomentumCorrection) and memory.masking:
            velocity[vector.indices] = 0.0
    residual = memory.residual.double()
    assert bool(((sent + residual - came).abs() <= 4 * steps * 2.0**-23 * (scale + 1.0)).all())


def draws_without_replacement(size=64, k=16, r=32, seed=0):
    """Exactly k different positions, all among the r largest, every one of those r drawn at some time."""
    vector = torch.arange(1.0, size + 1)  # the r largest are the last r
    met = set()
    for i in range(60):
        indices = rtop_k(vector, k, r, generator(seed, i)).tolist()
        assert len(set(indices)) == k
        assert min(indices) >= size - r
        met |= set(indices)
    # One given position is missed 60 times with probability 2^-60.
    assert met == set(range(size - r, size))


def density_1_is_the_identity(selector, memory, codec, size=97):
    """Everything is sent, nothing stays."""
    node = Sparsifier(selector, 1.0, memory, codec)
    gradient = next(gradients(size, 1, 0))
    assert torch.equal(codec.decode(node.compress(gradient, 0)).to_dense(), gradient)
    if not isinstance(memory, NoMemory):
        assert not memory.residual.any()


def arguments_untouched(selector, memory, codec):
    """Compress changes neither the gradient nor the global generator."""
    node = Sparsifier(selector, 0.1, memory, codec)
    gradient = next(gradients(100, 1, 0))
    before, rng = gradient.clone(), torch.get_rng_state()
    payload = node.compress(gradient, 0)
    kept = payload.clone()
    codec.decode(payload)
    assert torch.equal(gradient, before)
    assert torch.equal(payload, kept)
    assert torch.equal(torch.get_rng_state(), rng)


def masked_velocity_is_forgotten():
    """An entry that was sent starts again with no velocity: its next step is its next gradient."""
    memory = MomentumCorrection(0.9)
    node = Sparsifier(TopK(), 0.5, memory)
    node.compress(torch.tensor([8.0, 1.0]), 0)
    node.compress(torch.tensor([0.0, 0.0]), 1)
    assert memory.velocity[0] == 0.0
    assert memory.residual[0] == 0.0


def quantisation_error_stays(size=50):
    """What a coarse codec cannot say stays in the residual."""

    class Coarse(Codec):
        """Sends only whole numbers."""

        def encode_with_decoded(self, vector, rng=None):
            rounded = type(vector)(vector.indices, vector.values.round(), vector.size)
            return super().encode_with_decoded(rounded, rng)

    nothing_lost(TopK(), ErrorFeedback(), Coarse(), size)


def nobody_is_dealt_the_same(nodes=4, size=400, k=20, rounds=6):
    """In no round do two nodes send the same entry, and every entry comes to every node in time."""
    sent = [set() for _ in range(nodes)]
    for seed in (0, 7):
        team = [Sparsifier(Dealt(nodes), k / size, NoMemory(), seed=seed, node=i) for i in range(nodes)]
        for step in range(rounds):
            gradient = next(gradients(size, 1, seed))
            chosen = [set(Codec().decode(node.compress(gradient, step)).indices.tolist()) for node in team]
            assert [len(c) for c in chosen] == [k] * nodes
            assert len(set().union(*chosen)) == k * nodes
            for mine, now in zip(sent, chosen, strict=True):
                mine |= now
    largest = int(next(gradients(size, 1, 7)).abs().argmax())
    # With the same deal in every round one node would have sent the largest entry, always the same one.
    assert sum(largest in mine for mine in sent) > 1


def who_was_not_sent_waits_on():
    """Ages begin anew where an entry was received, not where it was only chosen."""

    class HalfArrives(Codec):
        """Leaves out every second entry, as a payload of fixed size may."""

        def encode_with_decoded(self, vector, rng=None):
            kept = type(vector)(vector.indices[::2], vector.values[::2], vector.size)
            return super().encode_with_decoded(kept, rng)

    node = Sparsifier(RAgeK(r_over_k=1.0), 1.0, NoMemory(), HalfArrives())
    node.compress(torch.ones(6), 4)
    assert node.state_dict()["seat"]["last"].tolist() == [5, 0, 5, 0, 5, 0]


def every_variant():
    """All selectors x memories x codecs."""
    return list(itertools.product(SELECTORS, MEMORIES, CODECS))
