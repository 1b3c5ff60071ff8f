"""Ranks in a row, with the group that they alone belong to."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Line:
    """Ranks that follow each other, the last one followed by the first.

    Attributes:
        ranks: ranks of the world.
        place: number of this process among them.
        group: process group that they all belong to; None for a line of one, and for the whole
            world.
    """

    ranks: tuple[int, ...] = (0,)
    place: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.ranks)

    def group_order(self) -> list[int]:
        """Places in this line, in the order in which the group numbers its ranks."""
        members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        return [self.ranks.index(member) for member in members]


def line_of(group: dist.ProcessGroup | None) -> Line:
    """The ranks of a group, as it numbers them."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return Line(tuple(ranks), dist.get_rank(group), group)


ALONE = Line()
"""A line of one rank."""
