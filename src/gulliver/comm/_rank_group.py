"""Ranks in a row, with the group that they alone belong to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch.distributed as dist

from gulliver.precision.wire import IDENTITY, WireFormat


@dataclass(frozen=True)
class RankGroup:
    """Ranks that follow each other, the last one followed by the first."""

    # Ranks of the world, in the order of the group.
    ranks: tuple[int, ...] = (0,)
    # Number of this process among them.
    rank: int = 0
    # Process group that they all belong to; None for a group of one rank, and for the whole world.
    process_group: dist.ProcessGroup | None = None
    # Format in which activations are shared among them, and their gradients; who shares what must
    # be exact, such as a sum of losses, does not look at it.
    wire: WireFormat = IDENTITY
    # Groups live as long as the rank groups that they were made for: see `_groups.py`.
    _origin: RankGroup | None = field(default=None, compare=False, repr=False)

    def packed(self, wire: WireFormat) -> RankGroup:
        """The same ranks, which share activations in another format."""
        return self if wire == self.wire else replace(self, wire=wire, _origin=self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def group_order(self) -> list[int]:
        """Ranks of this group, in the order in which the process group numbers them."""
        members = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        return [self.ranks.index(member) for member in members]


def rank_group_of(group: dist.ProcessGroup | None) -> RankGroup:
    """The ranks of a group, as it numbers them."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return RankGroup(tuple(ranks), dist.get_rank(group), group)


ALONE = RankGroup()
"""A rank group of one rank."""
