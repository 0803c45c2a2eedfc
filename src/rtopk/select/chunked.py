"""Choose within chunks of the vector, each its share of the k entries (SparseLoCo: 64 of every 4,096)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rtopk.select.rule import Rule


@dataclass(frozen=True)
class Chunked(Rule, method="chunked-k"):
    """Send the largest of each chunk of `size` entries, or a draw from the r_over_k times as many largest.

    Chunks get shares of k that differ by one at most, so that k entries are sent in all, and no chunk is left out.
    Of equal magnitudes the lower index counts as larger.
    """

    size: int = 4096
    r_over_k: float = 1.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        if not self.r_over_k >= 1.0:
            raise ValueError(f"r_over_k must be at least 1, got {self.r_over_k}")

    @classmethod
    def for_run(cls, nodes: int, r_over_k: float = 0.0, threshold: float = 0.0) -> "Chunked":
        """Make the rule for a run."""
        return cls(r_over_k=r_over_k or 1.0)

    def select(self, vector: Tensor, k: int, rng: torch.Generator) -> Tensor:
        """Return k ascending positions."""
        d = vector.numel()
        rows = -(-d // self.size)
        magnitudes = torch.full((rows * self.size,), -1.0, dtype=vector.dtype, device=vector.device)
        magnitudes[:d] = vector.abs()
        magnitudes = magnitudes.view(rows, -1)  # (rows, size); places after the end are never chosen
        ends = torch.arange(1, rows + 1).mul_(self.size).clamp_(max=d)
        before = torch.cat([ends.new_zeros(1), ends]) * k // d  # entries of the chunks before each
        share = before.diff().to(vector.device)  # (rows,)
        room = torch.cat([ends.new_zeros(1), ends]).diff().to(vector.device)
        among = torch.minimum((share * self.r_over_k).ceil().long(), room)
        chosen = _largest(magnitudes, among)
        if self.r_over_k > 1.0:
            keys = torch.rand(magnitudes.shape, generator=rng).to(vector.device)
            chosen = _largest(keys.masked_fill_(~chosen, -1.0), share)
        return chosen.view(-1).nonzero().view(-1)


def _largest(values: Tensor, counts: Tensor) -> Tensor:
    """Mark the `counts` largest values of each row, of equal ones those to the left."""
    most = int(counts.max())
    if not most:
        return torch.zeros_like(values, dtype=torch.bool)
    top = values.topk(most, dim=1).values  # (rows, most), descending
    last = top.gather(1, (counts - 1).clamp_(min=0)[:, None])  # the smallest that is chosen
    above, equal = values > last, values == last
    left = counts[:, None] - above.sum(1, keepdim=True)
    return (above | (equal & (equal.cumsum(1) <= left))) & (counts[:, None] > 0)
