"""Seconds and bytes of micro-batches of 1, 2, ... samples of one shape, with blocks kept or not.

A backward computes every block again, or what a block's forward saved is kept. `BatchCosts` begins
with all blocks computed again; `keep_blocks` then spends the memory that is left on keeping those
that save most. Blocks of one kind are alike, so the choice is a bounded knapsack over counts, and
it is solved exactly, in bytes: what a sample keeps grows in proportion to the samples, so one front
of (bytes, seconds) answers for every size of batch. Where there is host memory behind the device,
`batch_costs.py` decides of each block which of three ways it goes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from gulliver.errors import GulliverError
from gulliver.hardware.offload import TierRates


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


def _nothing() -> np.ndarray:
    return np.zeros(0)


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
    # Blocks of each kind whose activations move to the host: [B, kinds].
    offloaded: np.ndarray = field(default_factory=_nothing)
    # Seconds of those in which nothing is done but wait for such moves: [B].
    moving: np.ndarray = field(default_factory=_nothing)
    # Bytes of a rank that lie in the host's memory: [B].
    host_bytes: np.ndarray = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        for name, like in (
            ("offloaded", self.recomputed),
            ("moving", self.seconds),
            ("host_bytes", self.seconds),
        ):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.zeros_like(like))

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


# Blocks that are kept, computed again or moved to the host, so that a micro-batch takes least.
#
# Blocks of one kind are alike, so a choice is how many of each kind are kept and how many moved.
# Of a micro-batch it has three figures: bytes kept on the device, bytes moved, and the share of
# the repeated forwards that it saves. Seconds follow from those, as
# `gulliver.solve.activations.PassCosts` has
# them:
#
#     max(forward, moved / write rate) + max(backward + recomputed, moved / read rate)
#
# with the forward of all blocks R, a backward of 2 R, and R less what is saved computed again.
# What else a micro-batch takes hides no moves here. What is on its way takes room on the device:
# that of the largest block that is moved, besides the one that runs, which costs count already.
#
# `choice_front` has all choices that no other beats in all three figures; `place_blocks` takes the
# best of them for every size of batch: exact, in bytes of both memories.


NEAR = 8
"""Sizes of batch within an eighth of each other are looked at together."""
PAGES = 17 / 16
"""Memory for each byte that moves: tensors begin on a page, and the least has sixteen of them."""
SLACK = 1 + 1e-12
"""Sums of the same bytes in another order may differ in the last digit."""


@dataclass(frozen=True)
class HostRoom:
    """Host memory that activations of a rank may move to.

    Attributes:
        bytes: bytes of it that they may take at once.
        rates: link to it, such as of `host_rates`.
    """

    bytes: float
    rates: TierRates

    @classmethod
    def within(cls, limit: float, rates: TierRates) -> HostRoom:
        """Room in so many bytes of locked memory: a sixteenth is for ends of pages."""
        return cls(limit / PAGES, rates)

    @property
    def locked(self) -> int:
        """Bytes of memory whose pages are locked for it."""
        return math.ceil(self.bytes * PAGES)

    def __post_init__(self) -> None:
        given = self.bytes, self.rates.write_rate, self.rates.read_rate
        if not all(0 < value < math.inf for value in given):
            raise GulliverError(
                "host memory for activations needs bytes and rates above 0, and finite: "
                f"{self.bytes} bytes, {self.rates.write_rate} bytes/s to it, "
                f"{self.rates.read_rate} bytes/s from it"
            )


@dataclass(frozen=True)
class ChoiceFront:
    """Choices of which no other is as good in bytes on the device, bytes moved and share saved.

    Attributes:
        device: bytes of a token on the device beyond those of recomputed blocks, with what is on
            its way: [F].
        moved: bytes of a token that move to the host: [F], ascending.
        saved: share of the repeated forwards that is saved: [F].
        kept: kept blocks of each kind: [F, kinds].
        offloaded: moved blocks of each kind: [F, kinds].
    """

    device: np.ndarray
    moved: np.ndarray
    saved: np.ndarray
    kept: np.ndarray
    offloaded: np.ndarray

    def at(self, places: np.ndarray) -> ChoiceFront:
        """Choices at some places."""
        arrays = (self.device, self.moved, self.saved, self.kept, self.offloaded)
        return ChoiceFront(*(array[places] for array in arrays))


def place_blocks(
    costs: BatchCosts,
    tokens: float,
    memory: float,
    kinds: Sequence[BlockKind],
    host: HostRoom | None,
) -> BatchCosts:
    """Keeps or moves what saves most seconds, in what is left of both memories.

    Args:
        costs: costs with every block recomputed.
        tokens: tokens of one sample on a rank.
        memory: bytes of a rank.
        kinds: kinds of blocks.
        host: host memory of a rank; None: nothing moves.

    Returns:
        The costs with the best choice for every size of batch, exact in bytes.
    """
    if host is None or not len(costs) or not kinds:
        return keep_blocks(costs, tokens, memory, kinds)
    unit = tokens * np.arange(1, len(costs) + 1)
    write, read = unit / host.rates.write_rate, unit / host.rates.read_rate
    forward = costs.recomputing
    front = choice_front(tuple(kinds))
    spare = np.maximum(0.0, memory - costs.bytes) / unit * SLACK
    best = _best(front, forward, write, read, spare, host.bytes / unit * SLACK)
    saving, moved = forward * best.saved, best.moved
    exposed = np.maximum(0.0, write * moved - forward)
    exposed = exposed + np.maximum(0.0, read * moved - (3 * forward - saving))
    counts = np.array([kind.count for kind in kinds])
    return replace(
        costs,
        seconds=costs.seconds - saving + exposed,
        bytes=costs.bytes + best.device * unit,
        recomputing=forward - saving,
        recomputed=counts - best.kept - best.offloaded,
        offloaded=best.offloaded,
        moving=exposed,
        host_bytes=moved * unit,
    )


def _best(
    front: ChoiceFront,
    forward: np.ndarray,
    write: np.ndarray,
    read: np.ndarray,
    spare: np.ndarray,
    room: np.ndarray,
) -> ChoiceFront:
    """The best choice for every size of batch: B of them.

    [Note: few of many] Two kinds of blocks have tens of thousands of choices. For sizes of batch
    that lie together, what is too large for the roomiest is left out, and so is what would take
    longer at the fastest link of them than the best that fits the tightest takes at the slowest.

    Args:
        front: choices.
        forward: seconds of a forward of all blocks: [B], as all that follows.
        write: seconds in which a byte of every token moves to the host.
        read: seconds in which it moves back.
        spare: bytes of a token that are left on the device.
        room: bytes of a token that are left in the host's memory.
    """
    chosen = np.zeros(len(forward), dtype=np.int64)
    forward = np.maximum(forward, 1e-290)  # where there is nothing to save, moves take for ever
    out, back = write / forward, read / forward
    # All computed again take four forwards; many choices take longer whatever the size of batch.
    front = front.at(_passes(front.moved, front.saved, out.min(), back.min()) <= 4 * SLACK)
    start = 0
    while start < len(forward):
        rows = slice(start, start + 1 + start // NEAR)
        start = rows.stop
        fits = np.flatnonzero(
            (front.device <= spare[rows].max()) & (front.moved <= room[rows].max())
        )
        device, moved, saved = front.device[fits], front.moved[fits], front.saved[fits]
        always = (device <= spare[rows].min()) & (moved <= room[rows].min())
        most = _passes(moved[always], saved[always], out[rows].max(), back[rows].max()).min()
        near = _passes(moved, saved, out[rows].min(), back[rows].min()) <= most * SLACK
        device, moved, saved = device[near], moved[near], saved[near]
        seconds = _passes(moved, saved, out[rows, None], back[rows, None])
        seconds[(device > spare[rows, None]) | (moved > room[rows, None])] = math.inf
        chosen[rows] = fits[near][seconds.argmin(axis=1)]
    return front.at(chosen)


def _passes(moved: np.ndarray, saved: np.ndarray, write: Any, read: Any) -> np.ndarray:
    """Time of forward and backward of all blocks, in forwards of them; links in such, too."""
    return np.maximum(1.0, write * moved) + np.maximum(3 - saved, read * moved)


@lru_cache(maxsize=32)
def choice_front(kinds: tuple[BlockKind, ...]) -> ChoiceFront:
    """All choices of kept and moved blocks that no other beats.

    Args:
        kinds: kinds of blocks.
    """
    size = np.array([kind.kept_bytes for kind in kinds])
    share = np.array([kind.share / kind.count for kind in kinds])
    ranges = [range(kind.count + 1) for kind in kinds]
    every = np.array(list(itertools.product(*ranges)), dtype=np.int64)
    order = np.lexsort((-(every @ share), every @ size))
    best, found = _Stairs(), list[tuple[np.ndarray, ...]]()
    for away in every[order]:  # ascending in bytes moved
        kept = every[(every <= every[-1] - away).all(axis=1)]
        coming = float(size[away > 0].max(initial=0.0))
        device, saved = kept @ size + coming, (kept + away) @ share
        new = best.better(device, saved)
        if len(new):
            rows = len(new)
            moved = np.full(rows, float(away @ size))
            found.append((device[new], moved, saved[new], kept[new], np.tile(away, (rows, 1))))
    return ChoiceFront(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


class _Stairs:
    """The most that is saved with so many bytes, of all that was seen: both ascend."""

    def __init__(self) -> None:
        self._bytes, self._saved = np.zeros(0), np.zeros(0)

    def better(self, size: np.ndarray, saved: np.ndarray) -> np.ndarray:
        """Places of those that nothing seen beats, nor each other; they are seen from now on."""
        order = np.lexsort((-saved, size))
        before = np.concatenate(([-math.inf], self._saved))
        known = before[np.searchsorted(self._bytes, size[order], side="right")]
        most = np.maximum.accumulate(np.maximum(known, saved[order]))
        order = order[(saved[order] > known) & (np.diff(most, prepend=-math.inf) > 0)]
        size = np.concatenate((self._bytes, size[order]))
        saved = np.concatenate((self._saved, saved[order]))
        place = np.lexsort((-saved, size))
        rises = np.diff(np.maximum.accumulate(saved[place]), prepend=-math.inf) > 0
        self._bytes, self._saved = size[place][rises], saved[place][rises]
        return order
