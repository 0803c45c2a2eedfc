"""Draw k of r ranks uniformly without replacement: as bits of words, or as numbers if k is far below r.

A seed gives a stream of numbers (splitmix64); the first k distinct ones are drawn or, if k is more than half of
r, the first r - k are left out. Time and memory depend only on r and k.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtopk.kernels.jit import Array, entry, inlined
from rtopk.kernels.simd import high, lowest, ones

_ONE = np.uint64(1)


def draw_words(r: int, k: int, seed: int) -> Any:
    """Return r bits, in words of 64, k of them set: a uniform k-subset of the ranks."""
    if k == r:
        return every_bit(r)
    words = np.zeros(r // 64 + 2, np.uint64)  # `pick` reads the word after the last
    if 2 * k <= r:
        _draw_words(words, r, k, seed)
        return words
    _draw_words(words, r, r - k, seed)  # draw what stays out
    return every_bit(r) & ~words


def draw_few(r: int, k: int, seed: int) -> Tensor:
    """Return the subset that `draw_words` draws, ascending, in O(k) memory."""
    table = np.full(1 << (2 * k).bit_length(), -1, np.int64)
    drawn = np.empty(k, np.int64)
    _draw_few(table, drawn, r, seed)
    drawn.sort()
    return torch.from_numpy(drawn)


def every_bit(r: int) -> Any:
    """Return words of 64 bits, the first r bits set."""
    words = np.full(r // 64 + 2, 0xFFFFFFFFFFFFFFFF, np.uint64)
    words[-2:] = (1 << r % 64) - 1, 0
    return words


def set_bits(words: Any, k: int) -> Tensor:
    """Return the positions of the k set bits, ascending."""
    out = torch.empty(k, dtype=torch.int64)
    if ones_before(words, 64 * (words.size - 1)) != k:  # the word after the last is empty
        raise AssertionError(f"{ones_before(words, 64 * (words.size - 1))} bits are set where k={k}")
    write_set_bits(words, out.numpy())
    return out


@entry
def ones_before(words: Array, end: int) -> int:
    """Count the set bits among the first `end`."""
    count: int = 0
    for i in range(end >> 6):
        count += ones(words[i])
    count += ones(words[end >> 6] & ((_ONE << np.uint64(end & 63)) - _ONE))
    return count


@inlined
def _below(state: np.uint64, size: np.uint64, reject: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return the next state of splitmix64 and a number below `size`, uniform (Lemire's rejection)."""
    while True:
        state += np.uint64(0x9E3779B97F4A7C15)
        z = state
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        if z * size >= reject:
            return state, high(z, size)


@entry
def _draw_words(words: Array, r: int, k: int, seed: int) -> None:
    """Set k of the first r bits: the first k distinct numbers of the stream of a seed."""
    state, size = np.uint64(seed), np.uint64(r)
    reject = (np.uint64(0) - size) % size
    while k > 0:
        state, number = _below(state, size, reject)
        bit = _ONE << (number & np.uint64(63))
        word = words[number >> np.uint64(6)]
        k -= (word & bit) == np.uint64(0)
        words[number >> np.uint64(6)] = word | bit


@entry
def _draw_few(table: Array, out: Array, r: int, seed: int) -> None:
    """Write the same numbers if k is far below r; `table` is a hash set of 2 ** n places, all -1."""
    state, size = np.uint64(seed), np.uint64(r)
    reject = (np.uint64(0) - size) % size
    mask = np.uint64(table.size - 1)
    count = 0
    while count < out.size:
        state, number = _below(state, size, reject)
        place = (number * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(20) & mask
        while table[place] != -1 and table[place] != np.int64(number):
            place = (place + _ONE) & mask
        if table[place] == -1:
            table[place] = np.int64(number)
            out[count] = np.int64(number)
            count += 1


@entry
def write_set_bits(words: Array, out: Array) -> None:
    """Write the positions of the set bits, ascending."""
    count = 0
    for w in range(words.size):
        word = words[w]
        while word:
            out[count] = w * 64 + lowest(word)
            count += 1
            word &= word - _ONE
