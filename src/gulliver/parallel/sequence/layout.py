"""Layouts of a sequence: assign token positions to ranks.

A layout first shards the sequence over the ring ranks, then each ring rank's tokens over its
Ulysses group, in order, so an all-to-all within the group restores that order.

- *contiguous*: ring rank r of n holds part r of n.
- *zigzag*: the sequence has 2 n parts; ring rank r holds parts r and 2 n - 1 - r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm.groups import ALONE, RankGroup, shared_rank_group
from gulliver.errors import GulliverError, nearest
from gulliver.layout.even import Interval, intervals, split_evenly
from gulliver.precision.wire.formats import IDENTITY, WireFormat

LayoutName = Literal["contiguous", "zigzag"]


# [Note: zigzag] Under a causal mask, the tokens of part p see p earlier parts and half of their
# own. So in the contiguous layout, the last rank computes 2 n - 1 times as much as the first, and
# in every step of the ring except the first, some ranks compute a full block while others wait.
# Parts r and 2 n - 1 - r together see ``r + 1/2 + 2 n - 1 - r + 1/2 = 2 n`` parts for any r, and
# each step is balanced: with another rank's two parts, exactly two of the four pairs of parts are
# visible, and with a rank's own parts, one full pair and two halves. (The problem is described by
# Brandon et al., Striped Attention, 2023, arXiv 2311.09431; the form is that of Llama 3's context
# parallelism, 2024, arXiv 2407.21783.)
#
# Lengths that do not divide give the first parts one token more; nothing is padded.
@dataclass(frozen=True)
class Layout:
    """The sharding of a sequence over a ring and its Ulysses groups."""

    length: int  # Tokens of the whole sequence
    ring: int = 1  # Size of the ring: outer times inner
    ulysses: int = 1  # Ranks of each Ulysses group
    name: LayoutName = "contiguous"  # Name of the layout, contiguous or zigzag

    @property
    def degree(self) -> int:
        return self.ring * self.ulysses

    def of_place(self, place: int) -> tuple[Interval, ...]:
        if self.name == "contiguous":
            return _joined([intervals(split_evenly(self.length, self.ring))[place]])
        parts = intervals(split_evenly(self.length, 2 * self.ring))
        return _joined([parts[place], parts[2 * self.ring - 1 - place]])

    def of_rank(self, rank: int) -> tuple[Interval, ...]:
        place, member = divmod(rank, self.ulysses)
        held = self.of_place(place)
        return part_of(held, *intervals(split_evenly(size_of(held), self.ulysses))[member])

    def sizes(self) -> list[int]:
        return [size_of(self.of_rank(rank)) for rank in range(self.degree)]

    def place_sizes(self) -> list[int]:
        return [size_of(self.of_place(place)) for place in range(self.ring)]

    def positions(self, rank: int) -> Tensor:
        return torch.cat(
            [torch.empty(0, dtype=torch.int64), *(torch.arange(*i) for i in self.of_rank(rank))]
        )

    def order(self) -> Tensor:
        """Returns the positions of all tokens, rank by rank, ``[length]`` int64."""
        return torch.cat([self.positions(rank) for rank in range(self.degree)])


def size_of(held: tuple[Interval, ...]) -> int:
    return sum(stop - start for start, stop in held)


def _joined(parts: list[Interval]) -> tuple[Interval, ...]:
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
    found, at = [], 0
    for start, stop in held:
        low, high = max(first - at, 0), min(last - at, stop - start)
        if low < high:
            found.append((start + low, start + high))
        at += stop - start
    return tuple(found)


@dataclass(frozen=True)
class Tail:
    """The sharding of the last `count` tokens of a sequence, which are numbered from 0."""

    whole: Layout
    count: int  # Number of the tokens, at most its length

    @property
    def degree(self) -> int:
        return self.whole.degree

    @property
    def length(self) -> int:
        return self.count

    def of_rank(self, rank: int) -> tuple[tuple[int, int], ...]:
        first = self.whole.length - self.count
        held = ((max(a, first), b) for a, b in self.whole.of_rank(rank) if b > first)
        return tuple((a - first, b - first) for a, b in held)

    def sizes(self) -> list[int]:
        return [sum(b - a for a, b in self.of_rank(rank)) for rank in range(self.degree)]

    def order(self) -> Tensor:
        runs = [torch.arange(a, b) for rank in range(self.degree) for a, b in self.of_rank(rank)]
        return torch.cat(runs)

    def local(self, rank: int) -> Tensor:
        positions = self.whole.positions(rank)
        return (positions >= self.whole.length - self.count).nonzero().squeeze(1)


# Plans of sequence parallelism, and the rank groups for them.
#
#     plan = SequencePlan(ulysses=2, inner=2, layout="zigzag")
#     groups = make_groups(plan)                     # once; every rank of the world calls it
#
# The ranks of a sequence are numbered with the ring's outer axis first, its inner axis next and
# the Ulysses group innermost: the rank of number ``(outer * I + inner) * U + member``.
# Neighboring numbers should have the fastest links, because Ulysses' exchanges are exposed, whereas
# the outer ring's hops overlap with a full turn of the inner ring.


@dataclass(frozen=True)
class SequencePlan:
    """Sizes of Ulysses groups and a two-level ring, whose product is the degree.

    Attributes:
        ulysses: ranks of a Ulysses group, which exchange tokens for heads (Jacobs et al., 2023).
        outer: size of the outer ring, which uses the slower links.
        inner: size of each inner ring; use ``inner=N`` for a single-level ring.
        layout: name of the layout, contiguous or zigzag.
        wire: wire format of queries, keys, values, outputs and gradients.
    """

    ulysses: int = 1
    outer: int = 1
    inner: int = 1
    layout: LayoutName = "contiguous"
    wire: WireFormat = IDENTITY

    def __post_init__(self) -> None:
        for name in ("ulysses", "outer", "inner"):
            if getattr(self, name) < 1:
                raise GulliverError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.layout not in get_args(LayoutName):
            known = get_args(LayoutName)
            raise GulliverError(f"unknown layout {self.layout!r}: {nearest(self.layout, known)}")

    @property
    def ring(self) -> int:
        return self.outer * self.inner

    @property
    def degree(self) -> int:
        return self.ring * self.ulysses

    def lay(self, length: int) -> Layout:
        return Layout(length, self.ring, self.ulysses, self.layout)

    def __str__(self) -> str:
        return (
            f"Ulysses {self.ulysses} x ring {self.outer} x {self.inner}, {self.layout}"
            f" ({self.degree} ranks)"
        )


@dataclass(frozen=True, eq=False)
class SequenceGroups:
    """The process groups of this rank."""

    plan: SequencePlan
    all: RankGroup = ALONE  # Group of all ranks of the sequence
    ulysses: RankGroup = ALONE  # Group within which this rank exchanges heads
    inner: RankGroup = ALONE
    outer: RankGroup = ALONE
    sequences: Sequence[Sequence[int]] = ((0,),)  # Ranks of every sequence of the world

    @property
    def rank(self) -> int:
        return self.all.rank

    @property
    def place(self) -> int:
        return self.outer.rank * self.inner.size + self.inner.rank


def make_groups(
    plan: SequencePlan, sequences: Sequence[Sequence[int]] | None = None
) -> SequenceGroups:
    """Creates the process groups of a plan once (collective over the world).

    Args:
        plan: plan that applies to each sequence.
        sequences: world ranks that share each sequence, in the plan's order; None for consecutive
            ranks.

    Raises:
        GulliverError: the plan's degree does not divide the world size, or the sequences do not
            contain each rank exactly once.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    members = [list(ranks) for ranks in sequences] if sequences is not None else None
    if members is None:
        if world % plan.degree:
            raise GulliverError(
                f"{plan} does not divide the world size {world}: ulysses x outer x inner must be "
                f"one of {', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}"
            )
        members = [list(range(n, n + plan.degree)) for n in range(0, world, plan.degree)]
    return make_mixed_groups([plan] * len(members), members)


def make_mixed_groups(
    plans: Sequence[SequencePlan], sequences: Sequence[Sequence[int]]
) -> SequenceGroups:
    """Creates the process groups of sequences with several plans (collective)."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    members = [list(ranks) for ranks in sequences]
    degrees = [plan.degree for plan in plans]
    named = sorted(r for ranks in members for r in ranks) == list(range(world))
    if not named or [len(ranks) for ranks in members] != degrees:
        each = degrees[0] if len(set(degrees)) == 1 else degrees
        raise GulliverError(
            f"the sequences {members} must have each of {world} ranks once, {each} per sequence"
        )
    if world == 1:
        return SequenceGroups(plans[0])
    # By axis name; an axis's groups over all sequences contain each rank once.
    rows: dict[str, list[list[int]]] = {}
    for ranks, plan in zip(members, plans, strict=True):
        for name, row in _axes(ranks, plan):
            rows.setdefault(name, []).append(row)
    me = dist.get_rank()
    mine = next(plan for ranks, plan in zip(members, plans, strict=True) if me in ranks)
    made = {n: shared_rank_group(r, "sequence").packed(mine.wire) for n, r in rows.items()}
    return SequenceGroups(mine, sequences=members, **made)


def _axes(ranks: list[int], plan: SequencePlan) -> list[tuple[str, list[int]]]:
    u, inner, ring = plan.ulysses, plan.inner, plan.ring
    lines = [("all", ranks)]
    lines += [("ulysses", ranks[p * u : (p + 1) * u]) for p in range(ring)]
    for member in range(u):
        places = ranks[member::u]
        lines += [("inner", places[o * inner : (o + 1) * inner]) for o in range(plan.outer)]
        lines += [("outer", places[i::inner]) for i in range(inner)]
    return lines
