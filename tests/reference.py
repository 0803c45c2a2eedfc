"""Algorithm 1 of the paper and Deep Gradient Compression, slow and obvious, on lists of numpy fp32 numbers.

Nothing of the library is used but the source of randomness: which k of the r positions are drawn. That this
draw is uniform is tested on its own (test_select.py).
"""

import math

import numpy as np

from rtopk.seed import generator
from rtopk.select import draw


def rtop_k(vector, k, r, rng):
    """The paper's Definition 3: k drawn from the r positions of largest magnitude, lower index first on ties."""
    order = sorted(range(len(vector)), key=lambda j: (-abs(vector[j]), j))
    considered = sorted(order[:r])
    if r == k:
        return considered
    return [considered[position] for position in draw(r, k, rng).tolist()]


class Node:
    """Lines "On Nodes" of Algorithm 1, with the gradient given."""

    def __init__(self, number, size, k, r, seed, memory=True):
        self.number, self.k, self.r, self.seed, self.memory = number, k, r, seed, memory
        self.m = [np.float32(0)] * size

    def step(self, gradient, t):
        g = [np.float32(x) + m for x, m in zip(gradient, self.m, strict=True)]
        kept = rtop_k(g, self.k, self.r, generator(self.seed, self.number, t))
        sent = {j: g[j] for j in kept}
        if self.memory:
            self.m = [np.float32(0) if j in sent else g[j] for j in range(len(g))]
        return sent


class DGCNode:
    """DGC's Algorithm 2: momentum correction, local clipping, momentum factor masking."""

    def __init__(self, number, size, k, r, seed, momentum, clip_norm=None, masking=True):
        self.number, self.k, self.r, self.seed = number, k, r, seed
        self.momentum, self.clip_norm, self.masking = np.float32(momentum), clip_norm, masking
        self.u = [np.float32(0)] * size
        self.v = [np.float32(0)] * size

    def step(self, gradient, t):
        g = [np.float32(x) for x in gradient]
        if self.clip_norm is not None:
            norm = math.sqrt(sum(float(x) ** 2 for x in g))
            if norm > self.clip_norm:
                g = [x * np.float32(self.clip_norm / norm) for x in g]
        self.u = [self.momentum * u + x for u, x in zip(self.u, g, strict=True)]
        self.v = [v + u for v, u in zip(self.v, self.u, strict=True)]
        kept = rtop_k(self.v, self.k, self.r, generator(self.seed, self.number, t))
        sent = {j: self.v[j] for j in kept}
        for j in kept:
            self.v[j] = np.float32(0)
            if self.masking:
                self.u[j] = np.float32(0)
        return sent


def centre(sent, size, mean):
    """The mean of what the nodes sent: over all nodes (Algorithm 1) or over those that sent (Section IV)."""
    result = []
    for j in range(size):
        total, count = np.float32(0), 0
        for node in sent:
            if j in node:
                total, count = total + node[j], count + 1
        divisor = len(sent) if mean == "nodes" else max(count, 1)
        result.append(total / np.float32(divisor))
    return result
