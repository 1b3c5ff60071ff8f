"""Layouts of a sequence: the positions that each rank holds.

A layout cuts the sequence over the ring ranks first, then what a ring rank holds over the ranks of
its Ulysses group, in order: an all-to-all among these gives the group its tokens in that order.

- *contiguous*: ring rank r of n holds the r-th part of n.
- *zigzag*: of 2 n parts, ring rank r holds the r-th and the r-th from the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gulliver.layout import Interval, deal, intervals

LayoutName = Literal["contiguous", "zigzag"]


# [Note: zigzag] Under a causal mask the tokens of part p see p parts before and half of their own.
# In the contiguous layout the last rank so computes 2 n - 1 times what the first does, and in every
# step of the ring but the first some compute a full block while others wait. Parts r and 2 n - 1 -
# r together see ``r + 1/2 + 2 n - 1 - r + 1/2 = 2 n`` parts whatever r is, and it is even step by
# step: with any other rank's two parts exactly two of the four pairs of parts are allowed, and with
# its own one whole pair and two halves. (The problem is described by Brandon et al., Striped
# Attention, 2023, arXiv 2311.09431; the form is that of Llama 3's context parallelism, 2024, arXiv
# 2407.21783.)
#
# Lengths that do not divide give the first parts one token more; nothing is padded.
@dataclass(frozen=True)
class Layout:
    """The sharding of a sequence of one length over a ring and its Ulysses groups."""

    length: int  # Tokens of the whole sequence
    ring: int = 1  # Size of the ring, outer and inner together
    ulysses: int = 1  # Ranks of each Ulysses group
    name: LayoutName = "contiguous"  # Name of the layout, contiguous or zigzag

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.ring * self.ulysses

    def of_place(self, place: int) -> tuple[Interval, ...]:
        """Returns the positions that a ring rank holds, in the order in which it holds them."""
        if self.name == "contiguous":
            return _joined([intervals(deal(self.length, self.ring))[place]])
        parts = intervals(deal(self.length, 2 * self.ring))
        return _joined([parts[place], parts[2 * self.ring - 1 - place]])

    def of_rank(self, rank: int) -> tuple[Interval, ...]:
        """Returns the positions that a rank holds; ranks of a Ulysses group follow each other."""
        place, member = divmod(rank, self.ulysses)
        held = self.of_place(place)
        return part_of(held, *intervals(deal(size_of(held), self.ulysses))[member])

    def sizes(self) -> list[int]:
        """Returns the number of tokens of each rank."""
        return [size_of(self.of_rank(rank)) for rank in range(self.degree)]

    def place_sizes(self) -> list[int]:
        """Returns the number of tokens of each ring rank."""
        return [size_of(self.of_place(place)) for place in range(self.ring)]

    def positions(self, rank: int) -> Tensor:
        """Returns the positions that a rank holds, ``[local length]``, int64."""
        return positions_of(self.of_rank(rank))

    def order(self) -> Tensor:
        """Returns the positions of all ranks' tokens, rank after rank, ``[length]``, int64."""
        return torch.cat([self.positions(rank) for rank in range(self.degree)])


def size_of(held: tuple[Interval, ...]) -> int:
    """Returns the number of positions in intervals."""
    return sum(stop - start for start, stop in held)


def positions_of(held: tuple[Interval, ...]) -> Tensor:
    """Returns the positions in intervals, int64."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(*i) for i in held)])


def _joined(parts: list[Interval]) -> tuple[Interval, ...]:
    """Drops empty intervals and joins neighbours."""
    joined: list[Interval] = []
    for start, stop in parts:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def part_of(held: tuple[Interval, ...], first: int, last: int) -> tuple[Interval, ...]:
    """Returns the positions of the local tokens from `first` (inclusive) to `last` (exclusive)."""
    found, at = [], 0
    for start, stop in held:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return tuple(found)


@dataclass(frozen=True)
class Tail:
    """The sharding of the last tokens of a sequence, numbered from the first of them."""

    whole: Layout
    count: int  # Number of the tokens, at most its length

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.whole.degree

    @property
    def length(self) -> int:
        """Number of the tokens."""
        return self.count

    def of_rank(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Returns the intervals of them that a rank holds."""
        first = self.whole.length - self.count
        held = ((max(a, first), b) for a, b in self.whole.of_rank(rank) if b > first)
        return tuple((a - first, b - first) for a, b in held)

    def sizes(self) -> list[int]:
        """Returns the number of them that each rank holds."""
        return [sum(b - a for a, b in self.of_rank(rank)) for rank in range(self.degree)]

    def order(self) -> Tensor:
        """Returns their numbers, rank after rank."""
        runs = [torch.arange(a, b) for rank in range(self.degree) for a, b in self.of_rank(rank)]
        return torch.cat(runs)

    def local(self, rank: int) -> Tensor:
        """Returns their local indices on a rank."""
        positions = self.whole.positions(rank)
        return (positions >= self.whole.length - self.count).nonzero().squeeze(1)
