"""Rank groups: ranks in order, with their process group."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import is_gloo
from gulliver.precision.wire.formats import IDENTITY, WireFormat


@dataclass(frozen=True)
class RankGroup:
    """Ranks in ring order, with their process group."""

    ranks: tuple[int, ...] = (0,)  # World ranks, in the order of the group
    rank: int = 0
    # Process group of these ranks; None for a group of one rank, and for the whole world.
    process_group: dist.ProcessGroup | None = None
    # Wire format of shared activations and their gradients; values that must be exact, such as a
    # sum of losses, ignore it.
    wire: WireFormat = IDENTITY
    # Process groups live as long as the rank groups that they were created for: see `groups.py`.
    _origin: RankGroup | None = field(default=None, compare=False, repr=False)

    def packed(self, wire: WireFormat) -> RankGroup:
        return self if wire == self.wire else replace(self, wire=wire, _origin=self)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def group_order(self) -> list[int]:
        """Returns this group's ranks in the order of the process group."""
        members = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        return [self.ranks.index(member) for member in members]


class _Place(NamedTuple):
    rank: int
    ranks: tuple[int, ...]
    gloo: bool
    # Only of the whole world: caching other groups' rank groups would keep these groups alive.
    world: RankGroup | None


# Cached per group: torch takes dozens of calls to get this, in every collective.
_places: WeakKeyDictionary[Any, _Place] = WeakKeyDictionary()


def _place(group: dist.ProcessGroup | None) -> _Place:
    key = group or dist.group.WORLD
    found = _places.get(key)
    if found is None:
        gloo = is_gloo(group, torch.device("cpu"))
        ranks = tuple(dist.get_process_group_ranks(key))
        rank = dist.get_rank(group)
        world = RankGroup(ranks, rank) if group is None else None
        found = _places[key] = _Place(rank, ranks, gloo, world)
    return found


def rank_group_of(group: dist.ProcessGroup | None) -> RankGroup:
    place = _place(group)
    if group is None and place.world is not None:
        return place.world
    return RankGroup(place.ranks, place.rank, group)


def sends_directly(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether a tensor is sent by our point-to-point collectives (gloo on the CPU)."""
    return tensor.device.type == "cpu" and _place(group).gloo


ALONE = RankGroup()


# Process groups that are created once and shared by all users of the same ranks and purpose.
#
# A gloo group costs three threads, one of which wakes a hundred times per second even if nothing
# arrives, and sockets to every member. So models that are boosted one after another must not create
# their own groups.


Key = tuple[str, tuple[int, ...]]


# [Note: when groups go] torch keeps every group until it is destroyed, and all ranks must agree
# when: a rank on which the last user of a group was collected does not know whether the others
# still send. So a group without users is kept for its next user. At the end of a boost, where the
# ranks meet anyway, they agree on the groups that no rank has requested or uses, and destroy them.
# All others are destroyed with the world.
#
# Callers name the purpose of a group. Concurrent purposes do not share a group, so that the
# messages of one never block those of the other.
@dataclass
class _Shared:
    """A process group and its users, or torch's placeholder on ranks outside the group."""

    group: Any
    # Rank groups of this process that use it, as weak references.
    users: list[weakref.ref[RankGroup]] = field(default_factory=list)
    wanted: bool = True  # Requested since the ranks agreed last
    # Created by its members only, and released by them; other ranks do not know it.
    of_members: bool = False
    # The group was passed on without a rank group, so its users are unknown.
    for_ever: bool = False

    @property
    def used(self) -> bool:
        self.users = [user for user in self.users if user() is not None]
        return self.for_ever or bool(self.users)


# By world, whose end deletes them; ranks that are threads have one world each.
_made: WeakKeyDictionary[Any, dict[Key, _Shared]] = WeakKeyDictionary()


def shared_rank_group(rows: Sequence[Sequence[int]], use: str) -> RankGroup:
    """Returns the row with this rank as a rank group (collective; pass equal rows on all ranks)."""
    me = dist.get_rank()
    # Every rank creates the groups of all ranks, as torch requires.
    made = [(row, _shared(row, use)) for row in rows if len(row) > 1]
    row = next(row for row in rows if me in row)
    shared = next((shared for other, shared in made if other is row), None)
    rank_group = RankGroup(tuple(row), row.index(me), shared.group if shared else None)
    if shared is not None:
        shared.users.append(weakref.ref(rank_group))
    return rank_group


def lasting_group(rank_group: RankGroup) -> dist.ProcessGroup:
    """Returns a process group, even for one rank, that lives as long as the world."""
    groups = _made.setdefault(dist.group.WORLD, {})
    for shared in groups.values():
        if rank_group.process_group is not None and shared.group is rank_group.process_group:
            shared.for_ever = True
    if rank_group.size > 1:
        return rank_group.process_group or dist.group.WORLD  # pyright: ignore[reportReturnType]
    key = "alone", (dist.get_rank(),)
    if key not in groups:
        # No other rank is a member, so none is involved; it does not count when ranks agree.
        alone = dist.new_group(list(key[1]), use_local_synchronization=True)
        groups[key] = _Shared(alone, of_members=True, for_ever=True)
    return groups[key].group


def host_rank_group(group: dist.ProcessGroup | None, use: str) -> RankGroup:
    """Returns a gloo group of the same ranks, as NCCL cannot send host memory (collective)."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return ALONE
    found = rank_group_of(group)
    if is_gloo(group, torch.device("cpu")):
        return found
    groups, key = _made.setdefault(dist.group.WORLD, {}), (f"host: {use}", found.ranks)
    if key not in groups:
        made = dist.new_group(list(found.ranks), backend="gloo", use_local_synchronization=True)
        groups[key] = _Shared(made, of_members=True)
    rank_group = replace(found, process_group=groups[key].group)
    groups[key].users.append(weakref.ref(rank_group))
    return rank_group


def return_rank_group(rank_group: RankGroup) -> None:
    # Its process group is destroyed once no rank uses it any more.
    groups = _made.get(dist.group.WORLD, {}) if dist.is_initialized() else {}
    mine = rank_group.process_group
    for key, shared in tuple(groups.items()):
        if shared.of_members and shared.group is mine:
            shared.users = [user for user in shared.users if user() is not rank_group]
            free: list[Any] = [None] * rank_group.size
            dist.all_gather_object(free, not shared.used, mine)
            if all(free):
                del groups[key]
                dist.destroy_process_group(mine)


def release_groups() -> None:
    """Destroys groups that no rank has used since the last call (collective)."""
    if not dist.is_initialized():
        return
    groups = _made.get(dist.group.WORLD, {})
    idle = [key for key, shared in groups.items() if not (shared.of_members or shared.wanted)]
    for shared in groups.values():
        shared.wanted = False
    if not idle:
        return
    free: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(free, [key for key in idle if not groups[key].used])
    for key in idle:
        if all(key in answer for answer in free):
            group = groups.pop(key).group
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def _shared(row: Sequence[int], use: str) -> _Shared:
    # torch sorts a group's ranks, which does not matter, as messages use world ranks.
    groups, key = _made.setdefault(dist.group.WORLD, {}), (use, tuple(sorted(row)))
    if key not in groups:
        groups[key] = _Shared(dist.new_group(list(key[1])))
    groups[key].wanted = True
    return groups[key]
