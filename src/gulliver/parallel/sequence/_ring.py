"""Ring exchange of one or two levels: which rank has which block in which step.

Rank (o, i) begins with its own block. In step (a, b) it has the block of rank (o - a, i - b): the
inner ring turns fully for each hop of the outer ring, and the block of the next hop is on its way
meanwhile, so each block crosses the slow links once per outer hop. This is the double ring of
LoongTrain (Gu et al., 2024, arXiv 2406.18485) for any two sizes.

`turn` brings the blocks. `round_trip` brings them and takes home what was gathered for each (the
gradients of keys and values in a backward).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from gulliver.comm import IDENTITY, Flight, RankGroup, WireFormat, shift
from gulliver.parallel.sequence._plan import SequenceGroups

BLOCK_TAG, GATHERED_TAG = 100, 200
"""Message tags, plus the number of the piece: of blocks that go round, and of what is gathered."""
Count = Callable[[int, int], int]
"""Returns the elements of a message, by ring rank and number of the piece."""


# [Note: gradients go round] Every rank has a share of the gradient of every block of keys and
# values. Collecting these at the end, in buffers of the full length, would cost the memory that
# sharding the sequence saves, and an all-reduce that nothing hides. So a block's gradient travels
# behind the block: a rank computes its share for the block that it has, adds what the rank before
# has gathered for that block, and sends the sum after the block. Its own block's share stays where
# it is, so that sums make as many hops as blocks, N - 1, and not one more. With two levels the sum
# of an inner turn ends at the rank that brought the block into this inner ring, and goes on along
# the outer ring from there. The order of the additions is that of the ring, so the bits do not
# depend on timing.
#
# The share of the own block is computed in two halves, one while the first block is on its way
# here, one while the last sum is on its way home: nothing but the pipeline's first and last step
# waits.
#
# [Note: what is kept] Every rank has the tensors of its own block anyway: the packed copy that
# travels is freed when it has left, and visits of the own block may carry nothing.
#
# [Note: pieces] A long block travels as pieces, which take turns: each goes on as soon as it is its
# turn again, so that the link has something to carry all the time, and the last step that nothing
# can hide is that of one piece. What is sent is the same.
@dataclass(frozen=True)
class Visit:
    """A piece of a block that has arrived."""

    place: int  # Ring rank that the block belongs to
    piece: int
    block: Tensor  # Flat content; for the own block it may be empty
    half: int | None = None  # Half of the rows to compute, 0 or 1; None for all


class _RingChannel:
    """Hops of one piece of each block along one ring, arriving in two buffers in turn."""

    def __init__(self, rank_group: RankGroup, piece: int, largest: int) -> None:
        self._rank_group, self._piece, self._largest = rank_group, piece, largest
        self._buffers: list[Tensor | None] = [None, None]
        self._hops = 0

    def send_on(self, block: Tensor, count: int) -> Flight:
        """Begins to send a block on and to receive the next one, of `count` elements."""
        # The buffer of two hops ago is free: its block was waited for, and so was sending it on.
        which = self._hops % 2
        buffer = self._buffers[which]
        if buffer is None:
            # Fresh memory is slow to touch: two buffers serve all hops.
            buffer = self._buffers[which] = block.new_empty(self._largest)
        self._hops += 1
        return shift(self._rank_group, block, buffer[:count], BLOCK_TAG + self._piece)


class _TwoLevelRing:
    """Both levels of the ring, for one piece of each block."""

    def __init__(self, groups: SequenceGroups, piece: int, count: Count) -> None:
        self._groups, self._piece, self._count = groups, piece, count
        largest = max(count(place, piece) for place in range(groups.plan.ring))
        self._slow = _RingChannel(groups.outer, piece, largest)
        self._fast = _RingChannel(groups.inner, piece, largest)

    def origin(self, a: int, b: int) -> int:
        """Returns the ring rank whose block is here in step (a, b)."""
        outer, inner = self._groups.outer, self._groups.inner
        return (outer.rank - a) % outer.size * inner.size + (inner.rank - b) % inner.size

    def visit(self, a: int, b: int, block: Tensor, half: int | None = None) -> Visit:
        """Returns the visit of step (a, b)."""
        return Visit(self.origin(a, b), self._piece, block, half)

    def outwards(self, a: int, held: Tensor) -> Flight | None:
        """Sends a block along the outer ring in step (a, 0), unless it was the last one's turn."""
        if a + 1 == self._groups.outer.size:
            return None
        return self._slow.send_on(held, self._count(self.origin(a + 1, 0), self._piece))

    def inwards(self, a: int, b: int, block: Tensor) -> Flight | None:
        """Sends a block along the inner ring in step (a, b), unless it was the last one's turn."""
        if b + 1 == self._groups.inner.size:
            return None
        return self._fast.send_on(block, self._count(self.origin(a, b + 1), self._piece))


def turn(own: Sequence[Tensor], count: Count, groups: SequenceGroups) -> Iterator[Visit]:
    """Yields the blocks of all ring ranks piece by piece, the own first, while the next travel."""
    pieces = [_turn(_TwoLevelRing(groups, p, count), block, groups) for p, block in enumerate(own)]
    # So that a generator alone holds its block, and frees it when it has left.
    del own
    for _ in range(groups.plan.ring):
        for piece in pieces:
            yield next(piece)


def _turn(ring: _TwoLevelRing, own: Tensor, groups: SequenceGroups) -> Iterator[Visit]:
    """Yields one piece of each block; waits happen when it is this piece's turn again."""
    # So the other pieces' computation lies between posting a hop and waiting for it.
    ahead: Flight | None = Flight(None, own)
    del own
    for a in range(groups.outer.size):
        assert ahead is not None
        block = ahead.wait()
        ahead = ring.outwards(a, block)
        for b in range(groups.inner.size):
            following = ring.inwards(a, b, block)
            yield ring.visit(a, b, block)
            if following is not None:
                block = following.wait()


def round_trip(
    own: Sequence[Tensor],
    count: Count,
    gathered_count: Count,
    groups: SequenceGroups,
    compute: Callable[[Visit], Tensor],
    add: Callable[[Tensor, Tensor, Visit], Tensor],
    wire: WireFormat = IDENTITY,
) -> list[Tensor]:
    """Sends every block around the ring; returns what all ranks gathered for the own pieces."""
    trips = [
        _Trip(_TwoLevelRing(groups, p, count), p, gathered_count, groups, add, wire).steps(block)
        for p, block in enumerate(own)
    ]
    del own
    totals: dict[int, Tensor] = {}
    while len(totals) < len(trips):
        for number, trip in enumerate(trips):
            visit = next(trip)
            assert visit is not None
            try:
                # It sends the part on, and waits for its next block when it is its turn again.
                trip.send(compute(visit))
            except StopIteration as end:
                totals[number] = end.value
    return [totals[number] for number in range(len(trips))]


_Steps = Generator[Visit | None, Tensor, Tensor]
"""Yields a visit and is sent its part, then yields None when others may have their turn."""


@dataclass
class _Trip:
    """The round trip of one piece."""

    # A generator, so that the pieces take turns in one thread without a state machine by hand.

    ring: _TwoLevelRing
    piece: int
    gathered_count: Count
    groups: SequenceGroups
    add: Callable[[Tensor, Tensor, Visit], Tensor]
    wire: WireFormat = IDENTITY

    def steps(self, own: Tensor) -> _Steps:
        """Goes through both rings; returns the sum for the own block."""
        if self.groups.plan.ring == 1:
            return (yield self.ring.visit(0, 0, own))
        ring, outer = self.ring, self.groups.outer
        nothing = own.new_empty(0)
        held, home, home_flight, flight = own, None, None, None
        del own
        for a in range(outer.size):
            ahead = ring.outwards(a, held)
            steps = self._inner_turn(a, held)
            if a == 0:
                held = nothing
            first, arriving = yield from steps
            if a == 0:
                home, home_flight = first, arriving
            else:
                total = yield from self._rest(ring.visit(a, 0, held, 1), first, arriving)
                if flight is not None:
                    total = self.add(total, flight.wait(), ring.visit(a, 0, held))
                flight = self._send_home(outer, total, ring.origin(a + 1, 0))
                yield None
            if ahead is not None:
                held = ahead.wait()
        assert home is not None
        visit = ring.visit(0, 0, nothing, 1)
        total = yield from self._rest(visit, home, home_flight)
        return total if flight is None else self.add(total, flight.wait(), visit)

    def _inner_turn(
        self, a: int, held: Tensor
    ) -> Generator[Visit | None, Tensor, tuple[Tensor, Flight | None]]:
        """Returns the first half for the held block, and the others' sum in flight."""
        ring, inner, block = self.ring, self.groups.inner, held
        del held
        following = ring.inwards(a, 0, block)
        first = yield ring.visit(a, 0, block, 0)
        arriving = None
        for b in range(1, inner.size):
            yield None
            assert following is not None
            block = following.wait()
            following = ring.inwards(a, b, block)
            visit = ring.visit(a, b, block)
            part = yield visit
            if arriving is not None:
                part = self.add(part, arriving.wait(), visit)
            arriving = self._send_home(inner, part, ring.origin(a, b + 1))
        yield None
        return first, arriving

    def _rest(
        self, visit: Visit, first: Tensor, arriving: Flight | None
    ) -> Generator[Visit | None, Tensor, Tensor]:
        """Adds the second half for the held block, and what arrived."""
        total = self.add(first, (yield visit), visit)
        return total if arriving is None else self.add(total, arriving.wait(), visit)

    def _send_home(self, rank_group: RankGroup, gathered: Tensor, origin: int) -> Flight:
        """Sends a sum after its block; what comes in is the sum for the next one."""
        incoming = gathered.new_empty(self.gathered_count(origin, self.piece))
        return shift(rank_group, gathered, incoming, GATHERED_TAG + self.piece, self.wire)
