"""Seconds and bytes of micro-batches of 1, 2, ... samples of one shape, with blocks kept or not.

A backward computes every block again, or what a block's forward saved is kept. `BatchCosts` begins
with all blocks computed again; `keep_blocks` then spends the memory that is left on keeping those
that save most. Blocks of one kind are alike, so the choice is a bounded knapsack over counts, and
it is solved exactly, in bytes: what a sample keeps grows in proportion to the samples, so one front
of (bytes, seconds) answers for every size of batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class BlockKind:
    """Blocks of a model that are alike."""

    # Name of them, such as ``spatial``.
    name: str
    # Number of them.
    count: int
    # Bytes of a token that a kept block holds more than a recomputed one.
    kept_bytes: float
    # Share of the repeated forwards' seconds that all of them take together.
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1 or not self.kept_bytes > 0 or not 0 <= self.share <= 1:
            raise GulliverError(
                f"blocks {self.name!r}: give a count and bytes above 0, and a share of 0 to 1"
            )


@dataclass(frozen=True)
class BatchCosts:
    """What micro-batches of one shape cost on a group of ranks: entry b - 1 is for b samples."""

    # Seconds of forward and backward with what is sent: [B]; B is the largest batch that fits, 0
    # where not even one sample does.
    seconds: np.ndarray
    # Bytes of a rank: [B].
    bytes: np.ndarray
    # Seconds of those in which ranks of the group wait for messages: [B].
    communication: np.ndarray
    # Seconds of those in which forwards are repeated: [B].
    recomputing: np.ndarray
    # Recomputed blocks of each kind: [B, kinds].
    recomputed: np.ndarray

    def __len__(self) -> int:
        return len(self.seconds)

    def first(self, batches: int) -> BatchCosts:
        """Costs of batches of at most so many samples."""
        return BatchCosts(*(getattr(self, f.name)[:batches] for f in fields(self)))


def keep_blocks(
    costs: BatchCosts, tokens: float, memory: float, kinds: Sequence[BlockKind]
) -> BatchCosts:
    """Keeps the activations that save most seconds in what is left of the memory."""
    if not len(costs) or not kinds:
        return costs
    weights, shares, kept = kept_front(kinds)
    batches = np.arange(1, len(costs) + 1)
    spare = np.maximum(0.0, memory - costs.bytes) / (tokens * batches)
    # A hair of slack: sums of the same bytes in another order may differ in the last digit.
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
    """All choices of kept blocks that no other beats in both bytes and seconds."""
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
