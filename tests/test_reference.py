"""The library does what the paper's Algorithm 1 and DGC say, over 100 steps of a real descent."""

import numpy as np
import pytest
import torch

import reference
from rtopk import (
    Codec,
    ErrorFeedback,
    InProcess,
    MomentumCorrection,
    NoMemory,
    RandomK,
    RTopK,
    Sparsifier,
    TopK,
    average,
)

NODES, SIZE, STEPS, SEED = 3, 60, 100, 7
K = 6
SELECTORS = {"top-k": (TopK(), K), "rtop-k": (RTopK(nodes=NODES), NODES * K), "random-k": (RandomK(), SIZE)}
MEMORIES = {
    "none": (NoMemory, lambda i, r: reference.Node(i, SIZE, K, r, SEED, memory=False)),
    "error feedback": (ErrorFeedback, lambda i, r: reference.Node(i, SIZE, K, r, SEED)),
    "momentum correction": (
        lambda: MomentumCorrection(0.9),
        lambda i, r: reference.DGCNode(i, SIZE, K, r, SEED, 0.9),
    ),
    "momentum correction, clipped, unmasked": (
        lambda: MomentumCorrection(0.9, clip_norm=3.0, masking=False),
        lambda i, r: reference.DGCNode(i, SIZE, K, r, SEED, 0.9, clip_norm=3.0, masking=False),
    ),
}


@pytest.mark.parametrize("mean", ["nodes", "received"])
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("selector", SELECTORS)
def test_equals_the_paper(selector, memory, mean):
    selector_, r = SELECTORS[selector]
    make_memory, make_reference = MEMORIES[memory]
    library = [Sparsifier(selector_, K / SIZE, make_memory(), seed=SEED, node=i) for i in range(NODES)]
    slow = [make_reference(i, r) for i in range(NODES)]
    transport, codec = InProcess(NODES), Codec()
    random = np.random.default_rng(1)
    problem = random.standard_normal((NODES, 40, SIZE)).astype(np.float32)  # least squares, own data per node
    target = random.standard_normal((NODES, 40)).astype(np.float32)
    weights = np.zeros(SIZE, np.float32)

    for t in range(STEPS):
        noise = random.standard_normal((NODES, SIZE)).astype(np.float32)
        gradients = [
            problem[i].T @ (problem[i] @ weights - target[i]) / np.float32(40) + noise[i]
            for i in range(NODES)
        ]
        payloads = transport.exchange(
            [node.compress(torch.from_numpy(g), step=t) for node, g in zip(library, gradients, strict=True)]
        )
        vectors = [codec.decode(payload) for payload in payloads]
        update = average(vectors, mean=mean)
        sent = [node.step(g, t) for node, g in zip(slow, gradients, strict=True)]

        for vector, expected in zip(vectors, sent, strict=True):
            assert vector.indices.tolist() == sorted(expected)
        expected = np.array(reference.centre(sent, SIZE, mean))
        if "momentum" in memory:  # a fused multiply-add rounds once where numpy rounds twice
            np.testing.assert_allclose(update.numpy(), expected, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(update.numpy(), expected)
        weights = weights - np.float32(0.02) * update.numpy()

    for node, expected in zip(library, slow, strict=True):
        state = node.memory.state_dict()
        if isinstance(expected, reference.DGCNode):
            np.testing.assert_allclose(state["residual"].numpy(), expected.v, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(state["velocity"].numpy(), expected.u, rtol=1e-4, atol=1e-5)
        elif memory == "error feedback":
            np.testing.assert_array_equal(state["residual"].numpy(), np.array(expected.m))
