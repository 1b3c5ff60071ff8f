"""Worlds of ranks, and the collectives between them."""

from gulliver.comm._collectives import (
    Group,
    Handle,
    all_gather,
    all_reduce,
    any_rank,
    barrier,
    broadcast,
    broadcast_object,
    gather_objects,
    group_rank,
    group_size,
    reduce_scatter,
)
from gulliver.comm._launch import default_ranks, launch, under_launcher
from gulliver.comm._torus import Torus
from gulliver.comm._watchdog import Watchdog
from gulliver.comm._world import World, adopt_world, current_world, guard, init_world, shutdown

__all__ = [
    "Group",
    "Handle",
    "Torus",
    "Watchdog",
    "World",
    "adopt_world",
    "all_gather",
    "all_reduce",
    "any_rank",
    "barrier",
    "broadcast",
    "broadcast_object",
    "current_world",
    "default_ranks",
    "gather_objects",
    "group_rank",
    "group_size",
    "guard",
    "init_world",
    "launch",
    "reduce_scatter",
    "shutdown",
    "under_launcher",
]
