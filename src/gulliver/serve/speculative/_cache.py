"""`DraftCache`: which keys and values of sequences a draft model has in its own pages.

A draft model runs ahead of the text; what it computed for tokens that did not come is forgotten by
moving a sequence's length back. Where blocks run out, the sequences that waited longest lose theirs
and are computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gulliver.serve._blocks import BlockPool


@dataclass
class Cached:
    """Tokens whose keys and values lie in blocks."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class DraftCache:
    """Sequences and their blocks."""

    def __init__(self, blocks: int, size: int) -> None:
        """Makes an empty cache."""
        self.pool = BlockPool(blocks, size)
        self._kept: OrderedDict[int, Cached] = OrderedDict()

    def valid(self, sequence: int, tokens: Sequence[int], known: int) -> int:
        """Length of the beginning of a text that is cached; what differs is forgotten."""
        kept = self._kept.setdefault(sequence, Cached())
        self._kept.move_to_end(sequence)
        end = min(len(kept.tokens), len(tokens) - 1)
        same = min(known, end)
        while same < end and kept.tokens[same] == tokens[same]:
            same += 1
        del kept.tokens[same:]
        return same

    def extend(self, sequence: int, tokens: Sequence[int], others: Collection[int]) -> bool:
        """Makes room for more tokens of a sequence."""
        kept = self._kept[sequence]
        lacking = -(-(len(kept.tokens) + len(tokens)) // self.pool.size) - len(kept.blocks)
        while lacking > self.pool.free:
            victim = next((n for n in self._kept if n != sequence and n not in others), None)
            if victim is None:
                return False
            self.drop(victim)
        kept.blocks += self.pool.take(max(0, lacking)) or []
        kept.tokens += tokens
        return True

    def blocks(self, sequence: int) -> list[int]:
        """Block table of a sequence."""
        return self._kept[sequence].blocks

    def drop(self, sequence: int) -> None:
        """Forgets a sequence."""
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            self.pool.release(kept.blocks)
