"""The k-bit encoder in the proof of Theorem 1, to the bit.

A 0/1 (or signed) sample becomes: (i) the number of its ones; (ii), (iii) a codeword for at most k' of them,
drawn uniformly if there are more. That draw is the library's own `rtop_k`: of a 0/1 vector the ones are the r
largest entries. The paper writes "log d bits" for the number of ones; it takes d + 1 values, so whole bits
are ceil(log2(d + 1)).

The codebook numbers the subsets of {0, ..., d-1} with at most k' elements: smaller ones first, and among those of
one size by the combinatorial number system, in which {c_1 < ... < c_m} has the number sum of C(c_i, i). With
marks = 2 every element also carries one of two marks (its sign). Integers are exact, of any length.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from rtopk.select import draw


def codebook_size(d: int, ones: int, marks: int = 1) -> int:
    """Count the subsets with at most `ones` elements, each element with one of `marks` marks.

    >>> codebook_size(4, 2), codebook_size(4, 4), codebook_size(4, 1, marks=2)
    (11, 16, 9)
    """
    total = term = 1
    for j in range(1, ones + 1):
        term = term * (d - j + 1) * marks // j
        total += term
    return total


@lru_cache(maxsize=4096)
def capacity(d: int, bits: int, marks: int = 1) -> int:
    """Return k': the most ones for which every subset still has a codeword of this many bits.

    >>> [capacity(4, bits) for bits in (0, 2, 3, 4)]
    [0, 0, 1, 4]
    """
    if d < 1 or bits < 0:
        raise ValueError(f"need d >= 1 and bits >= 0, got d={d}, bits={bits}; give the node more bits")
    if bits >= d and (1 + marks) ** d <= 1 << bits:
        return d
    # j ones need at least j bits unless all d fit, so no more than this many can.
    j = np.arange(1, min(d, bits) + 1, dtype=np.float64)
    sizes = np.logaddexp2.accumulate(np.concatenate([[0.0], np.cumsum(np.log2((d - j + 1) * marks / j))]))
    margin = 1e-3  # bits; far above the rounding of the sums, so only exact arithmetic decides within it
    kept: int = max(int(np.searchsorted(sizes, bits - margin, side="right")) - 1, 0)
    last = int(np.searchsorted(sizes, bits + margin, side="right")) - 1
    if last <= kept:
        return kept
    size, term = codebook_size(d, kept, marks), math.comb(d, kept) * marks**kept
    while kept < last:
        term = term * (d - kept) * marks // (kept + 1)
        size += term
        if size > 1 << bits:
            break
        kept += 1
    return kept


def rank(support: Sequence[int], d: int, marks: int = 1, marking: int = 0) -> int:
    """Return the number of a subset (ascending), whose marks are the digits of `marking` in base `marks`."""
    m = len(support)
    before = codebook_size(d, m - 1, marks) if m else 0
    among = sum(math.comb(c, i) for i, c in enumerate(support, start=1))
    return before + among * int(marks**m) + marking


def unrank(number: int, d: int, marks: int = 1) -> tuple[list[int], int]:
    """Return the subset (ascending) and the marking of a number; the inverse of `rank`."""
    m, term = 0, 1
    while number >= term:
        number -= term
        m += 1
        if m > d:
            raise ValueError(
                f"there are only {codebook_size(d, d, marks)} subsets of {d}; the number is larger"
            )
        term = term * (d - m + 1) * marks // m
    among, marking = divmod(number, marks**m)
    support: list[int] = []
    c = d - 1
    binomial = math.comb(c, m)  # C(c, i) all the way down, one small step at a time
    for i in range(m, 0, -1):
        while binomial > among:
            binomial = binomial * (c - i) // c
            c -= 1
        support.append(c)
        among -= binomial
        binomial = binomial * i // c if c else 0  # C(c - 1, i - 1)
        c -= 1
    return support[::-1], marking


@dataclass(frozen=True)
class Message:
    """What a node sends: `length` bits, most significant first, padded with zeros to whole bytes."""

    data: bytes
    length: int

    def __post_init__(self) -> None:
        if len(self.data) != (self.length + 7) // 8:
            raise ValueError(f"{self.length} bits need {(self.length + 7) // 8} bytes, got {len(self.data)}")

    @classmethod
    def of(cls, number: int, length: int) -> "Message":
        """Write a number in exactly `length` bits; one that does not fit is refused."""
        if number >> length:
            raise ValueError(f"a number of {number.bit_length()} bits does not fit into {length}")
        size = (length + 7) // 8
        return cls((number << (8 * size - length)).to_bytes(size, "big"), length)

    def number(self) -> int:
        """Read the bits back as a number."""
        return int.from_bytes(self.data, "big") >> (8 * len(self.data) - self.length)

    def __str__(self) -> str:
        return f"{self.number():0{self.length}b}" if self.length else ""


@dataclass(frozen=True, eq=False)
class Received:
    """What the centre reads from a message: how many ones there were, and which of them were kept."""

    count: int
    support: NDArray[np.int64]  # (min(count, k'),) ascending
    signs: NDArray[np.int64]  # of the same shape, +1 or -1

    def inverse_fraction(self) -> float:
        """Return 1 / S: by what a kept one counts in the unbiased estimator."""
        return self.count / len(self.support) if self.count else 1.0


@dataclass(frozen=True)
class Encoder:
    """Encode samples of d entries in at most k bits.

    >>> encoder = Encoder(d=10, k=12)
    >>> encoder.header, encoder.kept, encoder.length
    (4, 3, 12)
    >>> from rtopk.seed import generator
    >>> message = encoder.encode(np.array([2, 7]), generator(0))
    >>> str(message), encoder.decode(message).support
    ('001000100010', array([2, 7]))
    """

    d: int
    k: int
    signed: bool = False

    def __post_init__(self) -> None:
        if self.d < 1:
            raise ValueError(f"d must be at least 1, got {self.d}")
        least = self.header + (self.d * self.marks).bit_length()
        if self.k < least:
            raise ValueError(
                f"k must be at least {least} bits to name one of d={self.d} entries, got {self.k}; raise k"
            )

    @property
    def marks(self) -> int:
        """The number of values that a nonzero entry can take."""
        return 2 if self.signed else 1

    @property
    def header(self) -> int:
        """Bits of the number of ones, which is 0 to d."""
        return self.d.bit_length()

    @property
    def kept(self) -> int:
        """k': how many ones a message can name."""
        return capacity(self.d, self.k - self.header, self.marks)

    @cached_property
    def length(self) -> int:
        """Bits of a message: at most k, fewer where the codebook leaves a whole bit unused."""
        return self.header + self._body

    @cached_property
    def _body(self) -> int:
        return (codebook_size(self.d, self.kept, self.marks) - 1).bit_length()

    def encode(
        self, support: NDArray[np.int64], rng: torch.Generator, signs: NDArray[np.int64] | None = None
    ) -> Message:
        """Encode the positions of a sample's nonzero entries (ascending), with their signs if signed."""
        count = len(support)
        if count and (support[0] < 0 or support[-1] >= self.d or (np.diff(support) <= 0).any()):
            raise ValueError(f"positions must be ascending, unique and in [0, {self.d}); sort them first")
        if self.signed != (signs is not None):
            raise ValueError(f"an encoder with signed={self.signed} was given signs: {signs is not None}")
        chosen = np.arange(count) if count <= self.kept else draw(count, self.kept, rng).numpy()
        marking = 0
        if signs is not None:
            for negative in (signs[chosen] < 0).tolist():
                marking = 2 * marking + negative
        number = rank(support[chosen].tolist(), self.d, self.marks, marking)
        return Message.of(count << self._body | number, self.length)

    def decode(self, message: Message) -> Received:
        """Read a message; ValueError on one that this encoder cannot have written."""
        if message.length != self.length:
            raise ValueError(f"message must have {self.length} bits, got {message.length}")
        count, number = divmod(message.number(), 1 << self._body)
        if number >= codebook_size(self.d, self.kept, self.marks):
            raise ValueError(f"codeword {number} is beyond the codebook of at most {self.kept} ones")
        support, marking = unrank(number, self.d, self.marks)
        if count > self.d or len(support) != min(count, self.kept):
            raise ValueError(f"message claims {count} ones and names {len(support)} of at most {self.kept}")
        m = len(support)
        signs = [1 - 2 * (marking >> (m - 1 - i) & 1) for i in range(m)] if self.signed else [1] * m
        return Received(count, np.array(support, dtype=np.int64), np.array(signs, dtype=np.int64))
