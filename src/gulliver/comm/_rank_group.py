"""Ranks in a row, with the group that they alone belong to."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class RankGroup:
    """Ranks that follow each other, the last one followed by the first.

    Attributes:
        ranks: ranks of the world.
        place: number of this process among them.
        group: process group that they all belong to; None for a line of one, and for the whole
            world.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    process_group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.ranks)

    def group_order(self) -> list[int]:
        """Places in this line, in the order in which the group numbers its ranks."""
        members = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        return [self.ranks.index(member) for member in members]


def rank_group_of(group: dist.ProcessGroup | None) -> RankGroup:
    """The ranks of a group, as it numbers them."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return RankGroup(tuple(ranks), dist.get_rank(group), group)


ALONE = RankGroup()
"""A line of one rank."""
