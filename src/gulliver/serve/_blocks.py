"""`BlockPool`: which blocks of the cache are free, held and shared.

A block is held by any number of sequences. A full one may be *published* under the digest of all
tokens up to its end; it then outlives its holders, and a sequence that begins with the same tokens
takes it as it is. Free blocks are taken in this order: those that say nothing, then the published
one whose last holder left first. No torch here: a block is a number.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0 to `blocks - 1`, with counts of holders and published digests."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self._holders = [0] * blocks
        self._blank = list(range(blocks - 1, -1, -1))
        # Published and held by nobody, the one that was left first in front.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._digest: dict[int, bytes] = {}
        self._block: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Number of blocks that can be taken."""
        return len(self._blank) + len(self._kept)

    @property
    def kept(self) -> int:
        """Number of free blocks whose keys and values can still be found."""
        return len(self._kept)

    def holders(self, block: int) -> int:
        """Number of sequences that hold a block."""
        return self._holders[block]

    def take(self, count: int) -> list[int] | None:
        """Takes blocks for one holder; None, and nothing taken, where too few are free."""
        if count > self.free:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            del self._block[self._digest.pop(block)]
        assert self._holders[block] == 0, f"block {block} is free and held"
        self._holders[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a holder to blocks that are held, or free and published."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._kept[block]
            self._holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Takes a holder from blocks; one that nobody holds is free."""
        # The last of a sequence are released first: beginnings, which others may have in common,
        # stay longer.
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} is released and not held"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._digest:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Publishes a full block for others to find; of equal ones the first stays published."""
        if digest not in self._block and block not in self._digest:
            self._block[digest], self._digest[block] = block, digest

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Returns the published blocks of the longest beginning of `digests`; none is taken."""
        found: list[int] = []
        for digest in digests:
            block = self._block.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that the counts are those of the tables, and that no block is lost."""
        counted = [0] * self.blocks
        for table in tables:
            assert len(set(table)) == len(table), "a sequence has a block twice"
            for block in table:
                counted[block] += 1
        assert counted == self._holders, "a block has another number of holders than it counts"
        idle = [*self._blank, *self._kept]
        assert len(set(idle)) == len(idle), "a block is free twice"
        assert set(idle) == {b for b, count in enumerate(counted) if not count}, "a block is lost"
        assert {d: b for b, d in self._digest.items()} == self._block


def extend_digests(digests: list[bytes], tokens: Sequence[int], size: int) -> None:
    """Appends the digests of the full blocks of `tokens` that `digests` does not have yet."""
    # A digest is that of all tokens up to the block's end, since keys and values depend on them
    # all.
    for number in range(len(digests), len(tokens) // size):
        before = digests[-1] if digests else b""
        block = array("q", tokens[number * size : (number + 1) * size])
        digests.append(hashlib.blake2b(before + block.tobytes(), digest_size=16).digest())
