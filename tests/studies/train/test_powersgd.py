"""PowerSGD against the paper's Algorithms 1 and 2, written slowly, and against what they promise."""

import numpy as np
import pytest
import torch

from rtopk import Codec, ErrorFeedback, Layout, NoMemory
from rtopk.seed import generator
from rtopk.studies.train.powersgd import LowRank, LowRankNode

SHAPES = {"conv": (6, 3, 2, 2), "weight": (8, 6), "thin": (2, 2), "bias": (8,)}
LAYOUT = Layout(tuple(SHAPES), tuple(SHAPES.values()), 0)


def team(nodes, rank, codec=None, memory=ErrorFeedback, seed=0):
    shared = LowRank(LAYOUT, rank, codec or Codec(), seed)
    return shared, [LowRankNode(shared, memory()) for _ in range(nodes)]


def exchange(shared, nodes, gradients, step=0):
    """One round; return the mean, and the bytes of all messages."""
    first = [node.compress(g, step) for node, g in zip(nodes, gradients, strict=True)]
    left = shared.agree(first)
    second = [node.answer(left) for node in nodes]
    return shared.finish(left, second), sum(p.numel() for p in first + second)


def gradients(nodes, step, seed=0):
    return [torch.randn(LAYOUT.size, generator=generator(seed, step, node)) for node in range(nodes)]


def test_small_tensors_are_sent_whole():
    shared, _ = team(1, rank=2)
    assert shared.sizes == ({"conv": (6, 12), "weight": (8, 6)}, ("thin", "bias"))
    assert LowRank(LAYOUT, 1, Codec()).sizes[1] == ("thin", "bias")  # rank 1 of 2 x 2 saves nothing


class Slow:
    """Algorithms 1 and 2 of Vogels et al. for one matrix, numpy, fp64; Gram-Schmidt as they write it."""

    def __init__(self, rows, columns, q, nodes):
        self.q = q
        self.errors = [np.zeros((rows, columns)) for _ in range(nodes)]

    def step(self, matrices):
        deltas = [m + e for m, e in zip(matrices, self.errors, strict=True)]
        p = np.mean([delta @ self.q for delta in deltas], axis=0)
        for column in range(p.shape[1]):
            for earlier in range(column):
                p[:, column] -= (p[:, earlier] @ p[:, column]) * p[:, earlier]
            p[:, column] /= np.linalg.norm(p[:, column])
        own = [delta.T @ p for delta in deltas]
        self.q = np.mean(own, axis=0)
        self.errors = [delta - p @ q.T for delta, q in zip(deltas, own, strict=True)]
        return p @ self.q.T


@pytest.mark.parametrize("rank", [1, 2])
def test_equals_the_algorithm_of_the_paper(rank):
    nodes = 3
    shared, workers = team(nodes, rank)
    slow = {
        name: Slow(*shape, shared.right[name].double().numpy(), nodes)
        for name, shape in shared.matrices.items()
    }
    for step in range(6):
        now = gradients(nodes, step)
        mean, _ = exchange(shared, workers, now, step)
        found, parts = LAYOUT.unflatten(mean), [LAYOUT.unflatten(g) for g in now]
        for name, reference in slow.items():
            matrices = [part[name].reshape(shared.matrices[name]).double().numpy() for part in parts]
            expected = reference.step(matrices)
            # QR may turn a column round; the product does not notice.
            np.testing.assert_allclose(
                found[name].reshape(expected.shape).numpy(), expected, rtol=1e-3, atol=1e-4
            )
        for name in ("thin", "bias"):
            expected = torch.stack([part[name] for part in parts]).mean(0)
            torch.testing.assert_close(found[name], expected)


def test_n_nodes_are_one_node_with_the_mean_gradient():
    """Linearity, the paper's Lemma 3: the mean of the factors is the factor of the mean."""
    many, workers = team(4, rank=2)
    one, worker = team(1, rank=2)
    for step in range(5):
        now = gradients(4, step)
        mean, _ = exchange(many, workers, now, step)
        alone, _ = exchange(one, worker, [torch.stack(now).mean(0)], step)
        torch.testing.assert_close(mean, alone, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("values", ["fp32", "4bit"])
def test_nothing_is_lost(values):
    """Mean of what came in = sum of the means + mean residual, whatever the codec rounds away."""
    shared, workers = team(3, rank=1, codec=Codec(values))
    came, applied = torch.zeros(LAYOUT.size), torch.zeros(LAYOUT.size)
    for step in range(8):
        now = gradients(3, step)
        came += torch.stack(now).mean(0)
        applied += exchange(shared, workers, now, step)[0]
    residual = torch.stack([node.memory.residual for node in workers]).mean(0)
    torch.testing.assert_close(applied + residual, came, rtol=1e-4, atol=1e-4)
    assert float(residual.norm()) > 0.1


def test_a_gradient_of_that_rank_is_sent_exactly():
    shared, workers = team(2, rank=2)
    factors = torch.randn(8, 2, generator=generator("left")), torch.randn(2, 6, generator=generator("right"))
    gradient = LAYOUT.flatten(
        {name: torch.zeros(shape) for name, shape in SHAPES.items()} | {"weight": factors[0] @ factors[1]}
    )
    mean, _ = exchange(shared, workers, [gradient, gradient])
    torch.testing.assert_close(mean, gradient, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(workers[0].memory.residual, torch.zeros(LAYOUT.size), atol=1e-5, rtol=0)
    # A gradient of zero leaves right factors of zero; the next round must still be able to say something.
    exchange(shared, workers, [torch.zeros(LAYOUT.size)] * 2, 1)
    found = sum(exchange(shared, workers, [gradient, gradient], 2 + i)[0] for i in range(4))
    torch.testing.assert_close(found, 4 * gradient, atol=1e-3, rtol=1e-3)


def test_warm_start_closes_in_on_the_best_rank_1():
    """Without memory and with the same gradient, rounds are power iterations."""
    shared, workers = team(1, rank=1, memory=NoMemory)
    gradient = gradients(1, 0)[0]
    for step in range(200):
        mean, _ = exchange(shared, workers, [gradient], step)
    u, s, v = torch.linalg.svd(LAYOUT.unflatten(gradient)["weight"])
    best = s[0] * u[:, :1] @ v[:1]
    torch.testing.assert_close(LAYOUT.unflatten(mean)["weight"], best, atol=1e-3, rtol=1e-3)


def test_bytes_are_those_of_the_messages():
    shared, workers = team(2, rank=2)
    _, sent = exchange(shared, workers, gradients(2, 0))
    entries = 2 * ((6 + 12) + (8 + 6)) + 4 + 8
    assert sent == 2 * (4 * entries + 2 * 40)
    assert workers[0].density(0) == entries / LAYOUT.size


def test_state_continues_and_refuses_other_shapes():
    shared, workers = team(2, rank=1)
    exchange(shared, workers, gradients(2, 0))
    states = [node.state_dict() for node in workers]
    expected, _ = exchange(shared, workers, gradients(2, 1), 1)
    again, others = team(2, rank=1, seed=9)
    for node, state in zip(others, states, strict=True):
        node.load_state_dict(state)
    assert torch.equal(exchange(again, others, gradients(2, 1), 1)[0], expected)
    with pytest.raises(ValueError, match="right factors must have shapes"):
        team(1, rank=2)[1][0].load_state_dict(states[0])
    with pytest.raises(RuntimeError, match="call compress first"):
        workers[0].answer({})
    with pytest.raises(ValueError, match="matrix_rank must be at least 1, got 0"):
        LowRank(LAYOUT, 0, Codec())
