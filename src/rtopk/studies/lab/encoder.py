"""The k-bit encoder in the proof of Theorem 1, to the bit.

A 0/1 (or signed) sample becomes: (i) the number of its ones; (ii), (iii) a codeword for at most k' of them,
drawn uniformly if there are more. That draw is the library's own `rtop_k`: of a 0/1 vector the ones are the r
largest entries. The paper writes "log d bits" for the number of ones; it takes d + 1 values, so whole bits
are ceil(log2(d + 1)).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from rtopk.select import draw
from rtopk.studies.lab.enumerative import capacity, codebook_size, rank, unrank


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
