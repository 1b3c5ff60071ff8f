"""Ranks in a row, with the group that they alone belong to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import is_gloo
from gulliver.precision.wire import IDENTITY, WireFormat


@dataclass(frozen=True)
class RankGroup:
    """Ranks in a ring order, with the process group that they belong to."""

    ranks: tuple[int, ...] = (0,)  # Ranks of the world, in the order of the group
    rank: int = 0
    # Process group that they all belong to; None for a group of one rank, and for the whole world.
    process_group: dist.ProcessGroup | None = None
    # Format in which activations are shared among them, and their gradients; who shares what must
    # be exact, such as a sum of losses, does not look at it.
    wire: WireFormat = IDENTITY
    # Groups live as long as the rank groups that they were made for: see `_groups.py`.
    _origin: RankGroup | None = field(default=None, compare=False, repr=False)

    def packed(self, wire: WireFormat) -> RankGroup:
        """The same ranks with another wire format for activations."""
        return self if wire == self.wire else replace(self, wire=wire, _origin=self)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def group_order(self) -> list[int]:
        """Ranks of this group, in the order in which the process group numbers them."""
        members = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        return [self.ranks.index(member) for member in members]


class _Place(NamedTuple):
    """This process's place in a group."""

    rank: int
    ranks: tuple[int, ...]
    gloo: bool


# Asked once for each group: torch takes dozens of calls to tell it, in every collective.
_places: WeakKeyDictionary[Any, _Place] = WeakKeyDictionary()


def _place(group: dist.ProcessGroup | None) -> _Place:
    key = group or dist.group.WORLD
    found = _places.get(key)
    if found is None:
        gloo = is_gloo(group, torch.device("cpu"))
        ranks = tuple(dist.get_process_group_ranks(key))
        found = _places[key] = _Place(dist.get_rank(group), ranks, gloo)
    return found


def rank_group_of(group: dist.ProcessGroup | None) -> RankGroup:
    """The ranks of a group, as it numbers them."""
    place = _place(group)
    return RankGroup(place.ranks, place.rank, group)


def sends_directly(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether tensors like this one use our point-to-point collectives (gloo on the CPU)."""
    return tensor.device.type == "cpu" and _place(group).gloo


ALONE = RankGroup()
"""A rank group of one rank."""
