"""Seconds and bytes of micro-batches of 1, 2, ... equal samples, with recomputation.

`BatchCosts` starts with all blocks recomputed; `keep_blocks` then keeps the activations that save
the most time in the remaining memory. Blocks of one kind are equal, so this is a bounded knapsack
over counts. Kept bytes are proportional to the number of samples, so one exact Pareto front of
(bytes, seconds) serves all batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class BlockKind:
    """Identical blocks of a model."""

    # Name, such as ``spatial``.
    name: str
    # Number of them.
    count: int
    # Additional bytes per token of a kept block compared with a recomputed one.
    kept_bytes: float
    # Their fraction of the recomputation time of all blocks.
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1 or not self.kept_bytes > 0 or not 0 <= self.share <= 1:
            raise GulliverError(
                f"blocks {self.name!r} have invalid sizes; use a count and bytes above 0, and a "
                "share from 0 to 1"
            )


@dataclass(frozen=True)
class BatchCosts:
    """Costs of micro-batches of one shape on a group of ranks; entry b - 1 is for b samples."""

    # Seconds of forward and backward including communication: [B]; B is the largest batch that
    # fits, 0 if not even one sample does.
    seconds: np.ndarray
    # Bytes per rank: [B].
    bytes: np.ndarray
    # Exposed communication seconds among them: [B].
    communication: np.ndarray
    # Recomputation seconds among them: [B].
    recomputing: np.ndarray
    # Recomputed blocks of each kind: [B, kinds].
    recomputed: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)

    def first(self, batches: int) -> BatchCosts:
        return BatchCosts(*(getattr(self, f.name)[:batches] for f in fields(self)))


def keep_blocks(
    costs: BatchCosts, tokens: float, memory: float, kinds: Sequence[BlockKind]
) -> BatchCosts:
    """Keeps the activations that save the most time in the remaining memory."""
    if not len(costs) or not kinds:
        return costs
    weights, shares, kept = kept_front(kinds)
    batches = np.arange(1, len(costs) + 1)
    spare = np.maximum(0.0, memory - costs.bytes) / (tokens * batches)
    # Small tolerance: sums of the same bytes in another order may differ in the last digit.
    chosen = np.searchsorted(weights, spare * (1 + 1e-12), side="right") - 1
    saved = costs.recomputing * shares[chosen]
    return replace(
        costs,
        seconds=costs.seconds - saved,
        bytes=costs.bytes + weights[chosen] * tokens * batches,
        recomputing=costs.recomputing - saved,
        recomputed=np.array([kind.count for kind in kinds]) - kept[chosen],
    )


def kept_front(kinds: Sequence[BlockKind]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pareto front of bytes and seconds saved by keeping blocks."""
    weights, shares = np.zeros(1), np.zeros(1)
    kept = np.zeros((1, 0), dtype=np.int64)
    for kind in kinds:
        counts = np.arange(kind.count + 1)
        weights = np.add.outer(weights, counts * kind.kept_bytes).ravel()
        shares = np.add.outer(shares, counts * (kind.share / kind.count)).ravel()
        kept = np.column_stack((np.repeat(kept, len(counts), 0), np.tile(counts, len(kept))))
        order = np.lexsort((-shares, weights))
        best = np.maximum.accumulate(shares[order])
        first = np.concatenate(([True], best[1:] > best[:-1]))
        order = order[first]
        weights, shares, kept = weights[order], shares[order], kept[order]
    return weights, shares, kept
