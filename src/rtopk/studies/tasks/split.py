"""Divide a training set among nodes: alike (i.i.d.), in order, by own mixes of classes, or classes apart."""

import numpy as np
import torch
from torch import Tensor

from rtopk.seed import derive, generator


def split(targets: Tensor, nodes: int, kind: str, alpha: float, seed: int) -> list[Tensor]:
    """Return the positions of each node's examples; every example goes to exactly one node."""
    if nodes > len(targets):
        raise ValueError(f"{len(targets)} examples cannot be divided among {nodes} nodes")
    if kind == "iid":
        order = torch.randperm(len(targets), generator=generator(seed, "split"))
        return list(order.tensor_split(nodes))
    if kind == "contiguous":
        return list(torch.arange(len(targets)).tensor_split(nodes))
    if kind == "class":  # in the order of the classes, cut into equal parts: few classes a node
        order = torch.randperm(len(targets), generator=generator(seed, "split"))
        return list(order[targets[order].argsort(stable=True)].tensor_split(nodes))
    return _dirichlet(targets, nodes, alpha, seed)


def _dirichlet(targets: Tensor, nodes: int, alpha: float, seed: int) -> list[Tensor]:
    """Divide each class by shares drawn from a symmetric Dirichlet distribution (Yurochkin et al., 2019)."""
    rng = np.random.default_rng(derive(seed, "dirichlet"))
    parts: list[list[Tensor]] = [[] for _ in range(nodes)]
    for label in torch.unique(targets):
        members = (targets == label).nonzero()[:, 0]
        members = members[torch.from_numpy(rng.permutation(len(members)))]
        cuts = (np.cumsum(rng.dirichlet([alpha] * nodes))[:-1] * len(members)).astype(int)
        for part, piece in zip(parts, members.tensor_split(torch.from_numpy(cuts)), strict=True):
            part.append(piece)
    return [torch.cat(pieces) for pieces in parts]
