"""Blocks that are kept, computed again or moved to the host, so that a micro-batch takes least.

Blocks of one kind are alike, so a choice is how many of each kind are kept and how many moved. Of
a micro-batch it has three figures: bytes kept on the device, bytes moved, and the share of the
repeated forwards that it saves. Seconds follow from those, as `gulliver.solve.PassCosts` has them:

    max(forward, moved / write rate) + max(backward + recomputed, moved / read rate)

with the forward of all blocks R, a backward of 2 R, and R less what is saved computed again. What
else a micro-batch takes hides no moves here. What is on its way takes room on the device: that of
the largest block that is moved, besides the one that runs, which costs count already.

`choice_front` has all choices that no other beats in all three figures; `place_blocks` takes the
best of them for every size of batch: exact, in bytes of both memories.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from gulliver.errors import GulliverError
from gulliver.hardware._batch_costs import BatchCosts, BlockKind, keep_blocks
from gulliver.hardware._offload import TierRates

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
