"""The one type that crosses stages: k of the d entries of a vector, with their positions.

A selector decides the positions, a codec turns the vector into a payload and back, aggregation adds
several of them into one dense vector.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SparseVector:
    """Hold k entries of a vector of `size` entries; the others are zero.

    >>> SparseVector(torch.tensor([1, 3]), torch.tensor([0.5, -2.0]), size=5).to_dense()
    tensor([ 0.0000,  0.5000,  0.0000, -2.0000,  0.0000])
    """

    indices: Tensor  # (k,) int64, ascending, unique
    values: Tensor  # (k,) floating point
    size: int  # d
    # The same indices and values in host memory, if these are on a device and somebody has waited for them already.
    here: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.indices.dtype != torch.int64 or self.indices.dim() != 1:
            raise ValueError(
                f"indices must be a 1-D int64 tensor, got {self.indices.dim()}-D {self.indices.dtype}"
            )
        if not self.values.is_floating_point() or self.values.shape != self.indices.shape:
            raise ValueError(
                "values must be a floating-point tensor of the shape of indices "
                f"{tuple(self.indices.shape)}, got {self.values.dtype} {tuple(self.values.shape)}"
            )
        if len(self) > self.size:
            raise ValueError(f"a vector of size {self.size} cannot hold {len(self)} entries")

    def __len__(self) -> int:
        return self.indices.numel()

    @property
    def at_hand(self) -> Tensor:
        """The values, in host memory if they are there."""
        return self.values if self.here is None else self.here[1]

    @classmethod
    def gather(cls, vector: Tensor, indices: Tensor) -> "SparseVector":
        """Take the entries of a dense vector at these positions."""
        return cls(indices, vector[indices], vector.numel())

    def to_dense(self) -> Tensor:
        """Return the vector with its zeros written out."""
        dense = self.values.new_zeros(self.size)
        dense[self.indices] = self.values
        return dense

    def check(self) -> "SparseVector":
        """Raise ValueError unless indices are ascending, unique and within the size; return self.

        This reads every index. The stages keep the order by construction and do not call it; call it on indices
        from outside.
        """
        if len(self):
            low, high = int(self.indices[0]), int(self.indices[-1])
            if low < 0 or high >= self.size:
                raise ValueError(f"indices must lie in [0, {self.size}), got {low} to {high}")
            if not bool((self.indices[1:] > self.indices[:-1]).all()):
                raise ValueError("indices must be ascending and unique")
        return self
