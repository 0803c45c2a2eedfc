"""Several ascending lists of positions -> their union, and the place of each position in it.

Each list is marked in a bitmap of d bits. Counting the set bits word by word then gives the union, in order, and
every position's place in it, without sorting: O(d / 64 + positions).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.kernels.draws import write_set_bits
from rtopk.kernels.jit import Array, entry
from rtopk.kernels.simd import ones

_ONE = np.uint64(1)
_WORD = np.int64(63)


def union(lists: Sequence[Tensor], size: int) -> tuple[Tensor, list[Tensor]]:
    """Return the union of ascending positions below `size`, and for each list its places in the union."""
    words = np.zeros((size + 63) // 64, dtype=np.uint64)
    arrays = [positions.numpy() for positions in lists]
    for array in arrays:
        if not mark(words, array, size):
            raise ValueError(f"positions must lie in [0, {size}), got {array.min()} to {array.max()}")
    before = np.empty(len(words), dtype=np.int64)  # set bits in the words before
    joint = np.empty(count(words, before), dtype=np.int64)
    write_set_bits(words, joint)
    places = []
    for array in arrays:
        place = np.empty(len(array), dtype=np.int64)
        rank(words, before, array, place)
        places.append(torch.from_numpy(place))
    return torch.from_numpy(joint), places


@entry
def mark(words: Array, positions: Array, size: int) -> bool:
    """Set the bit of each position; return whether all were within the size."""
    for i in range(len(positions)):
        p = positions[i]
        if p < 0 or p >= size:
            return False
        words[p >> 6] |= _ONE << np.uint64(p & _WORD)
    return True


@entry
def count(words: Array, before: Array) -> Any:
    """Write how many bits are set before each word; return how many there are."""
    total = np.int64(0)
    for w in range(len(words)):
        before[w] = total
        total += np.int64(ones(words[w]))
    return total


@entry
def rank(words: Array, before: Array, positions: Array, places: Array) -> None:
    """Write how many set bits lie before each position."""
    for i in range(len(positions)):
        p = positions[i]
        below = (_ONE << np.uint64(p & _WORD)) - _ONE
        places[i] = before[p >> 6] + np.int64(ones(words[p >> 6] & below))
