"""Generators from keys: the same (seed, node, step, ...) gives the same draws, in any process, in any order.

No global generator is read or seeded anywhere. Each step derives its own generator, so a checkpoint needs no
generator state, only the step.
"""

import hashlib
import json

import torch


def derive(*key: int | str) -> int:
    """Hash a key to a 63-bit seed; keys that differ anywhere give unrelated seeds."""
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: int | str) -> torch.Generator:
    """Make the CPU generator of a key.

    >>> a, b = generator(0, "node", 3), generator(0, "node", 3)
    >>> bool(torch.rand(1, generator=a) == torch.rand(1, generator=b))
    True
    """
    return torch.Generator().manual_seed(derive(*key))
