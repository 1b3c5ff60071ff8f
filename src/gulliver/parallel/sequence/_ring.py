"""The ring of one or two levels: who has which block when.

Rank (o, i) begins with its own block. In step (a, b) it has the block of rank (o - a, i - b): the
inner ring turns fully for each hop of the outer ring, and the block of the next hop is on its way
meanwhile, so each block crosses the slow links once per outer hop. This is the double ring of
LoongTrain (Gu et al., 2024) for any two sizes.

`turn` brings the blocks. `round_trip` brings them and takes home what was gathered for each (the
gradients of keys and values in a backward).

[Note: what is gathered] A rank computes its part for the block that it has, adds what the rank
before has gathered for that block, and sends the sum after the block. Its own block's part stays at
home, so that gathered sums make as many hops as blocks, N - 1, and not one more. With two levels
the sum of an inner turn ends at the rank that brought the block into this inner ring, and goes on
along the outer ring from there.

The part of the own block is computed in two halves, one while the first block is on its way here,
one while the last sum is on its way home: nothing but the pipeline's first and last step waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from gulliver.parallel.sequence._plan import SequenceGroups
from gulliver.parallel.sequence._wire import BLOCK_TAG, GATHERED_TAG, Flight, Line, shift

Count = Callable[[int], int]
"""Elements of a place's block."""


class _Carousel:
    """Blocks along one line, each arriving in one of two buffers."""

    def __init__(self, line: Line, largest: int) -> None:
        self._line, self._largest = line, largest
        self._buffers: list[Tensor | None] = [None, None]
        self._hops = 0

    def send_on(self, block: Tensor, count: int) -> Flight:
        """Begins to send a block on and to receive the next one, of `count` elements.

        A block that arrived in the other buffer has been waited for, sent on and waited for again.
        """
        which = self._hops % 2
        buffer = self._buffers[which]
        if buffer is None:
            # Fresh memory is slow to touch: two buffers serve all hops.
            buffer = self._buffers[which] = block.new_empty(self._largest)
        self._hops += 1
        return shift(self._line, block, buffer[:count], BLOCK_TAG)


def turn(own: Tensor, count: Count, groups: SequenceGroups) -> Iterator[tuple[int, Tensor]]:
    """The blocks of all places, the own first, each with its place; the next travels meanwhile.

    Args:
        own: flat.
        count: elements of each place's block.
        groups: of the ranks.
    """
    inner, outer = groups.inner, groups.outer
    largest = max(count(place) for place in range(groups.plan.ring))
    slow, fast = _Carousel(outer, largest), _Carousel(inner, largest)
    held = own
    for a in range(outer.size):
        ahead = None
        if a + 1 < outer.size:
            ahead = slow.send_on(held, count(_origin(groups, a + 1, 0)))
        block = held
        for b in range(inner.size):
            following = None
            if b + 1 < inner.size:
                following = fast.send_on(block, count(_origin(groups, a, b + 1)))
            yield _origin(groups, a, b), block
            if following is not None:
                block = following.wait()
        if ahead is not None:
            held = ahead.wait()


def round_trip(
    own: Tensor,
    count: Count,
    gathered_count: Count,
    groups: SequenceGroups,
    compute: Callable[[int, Tensor, int | None], Tensor],
    add: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Takes every block round; returns what all places have gathered for the own one.

    Args:
        own: flat.
        count: elements of each place's block.
        gathered_count: elements of what is gathered for it.
        groups: of the ranks.
        compute: of a place, its block and a half (0, 1 or None for both), this rank's part of what
            is gathered, flat and fresh.
        add: of a rank's part and what arrived, the sum; it may be the part itself.
    """
    trip = _Trip(count, gathered_count, groups, compute, add)
    return trip.run(own)


class _Trip:
    """One `round_trip`."""

    def __init__(
        self,
        count: Count,
        gathered_count: Count,
        groups: SequenceGroups,
        compute: Callable[[int, Tensor, int | None], Tensor],
        add: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._count, self._gathered_count, self._groups = count, gathered_count, groups
        self._compute, self._add = compute, add
        largest = max(count(place) for place in range(groups.plan.ring))
        self._slow, self._fast = _Carousel(groups.outer, largest), _Carousel(groups.inner, largest)

    def run(self, own: Tensor) -> Tensor:
        """The sum for the own block."""
        outer = self._groups.outer
        if self._groups.plan.ring == 1:
            return self._compute(self._origin(0, 0), own, None)
        held, home, home_flight, flight = own, None, None, None
        for a in range(outer.size):
            ahead = None
            if a + 1 < outer.size:
                ahead = self._slow.send_on(held, self._count(self._origin(a + 1, 0)))
            first, arriving = self._inner_turn(a, held)
            if a == 0:
                home, home_flight = first, arriving
            else:
                total = self._rest(a, held, first, arriving)
                if flight is not None:
                    total = self._add(total, flight.wait())
                flight = self._send_home(outer, total, self._origin(a + 1, 0))
            if ahead is not None:
                held = ahead.wait()
        assert home is not None
        total = self._rest(0, own, home, home_flight)
        return total if flight is None else self._add(total, flight.wait())

    def _inner_turn(self, a: int, held: Tensor) -> tuple[Tensor, Flight | None]:
        """The first half for the held block, and the other ranks' sum for it on its way here."""
        inner, block, arriving = self._groups.inner, held, None
        first = None
        for b in range(inner.size):
            following = None
            if b + 1 < inner.size:
                following = self._fast.send_on(block, self._count(self._origin(a, b + 1)))
            part = self._compute(self._origin(a, b), block, 0 if b == 0 else None)
            if b == 0:
                first = part
            else:
                if arriving is not None:
                    part = self._add(part, arriving.wait())
                arriving = self._send_home(inner, part, self._origin(a, b + 1))
            if following is not None:
                block = following.wait()
        assert first is not None
        return first, arriving

    def _rest(self, a: int, held: Tensor, first: Tensor, arriving: Flight | None) -> Tensor:
        """The second half for the held block, and what arrived."""
        total = self._add(first, self._compute(self._origin(a, 0), held, 1))
        return total if arriving is None else self._add(total, arriving.wait())

    def _send_home(self, line: Line, gathered: Tensor, origin: int) -> Flight:
        """Sends a sum after its block; what comes in is the sum for the next one."""
        incoming = gathered.new_empty(self._gathered_count(origin))
        return shift(line, gathered, incoming, GATHERED_TAG)

    def _origin(self, a: int, b: int) -> int:
        return _origin(self._groups, a, b)


def _origin(groups: SequenceGroups, a: int, b: int) -> int:
    """The place whose block is here in step (a, b)."""
    outer, inner = groups.outer, groups.inner
    return (outer.place - a) % outer.size * inner.size + (inner.place - b) % inner.size
