"""The world of processes, and collectives between its ranks."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.comm.collectives import (
        Handle,
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        choose_axes,
        gather_objects,
        group_rank,
        reduce_scatter,
    )
    from gulliver.comm.launcher import launch
    from gulliver.comm.torus import Torus, make_axes
    from gulliver.comm.watchdog import guard
    from gulliver.comm.world import World, current_world, init_world, shutdown
    from gulliver.precision.wire.formats import IDENTITY

__all__ = [
    "IDENTITY",
    "Handle",
    "Torus",
    "World",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "choose_axes",
    "current_world",
    "gather_objects",
    "group_rank",
    "guard",
    "init_world",
    "launch",
    "make_axes",
    "reduce_scatter",
    "shutdown",
]

__getattr__, __dir__ = lazy_exports(__name__)
