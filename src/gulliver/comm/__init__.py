"""The world of processes, and collectives between its ranks."""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.comm.collectives import Handle as Handle
    from gulliver.comm.collectives import all_gather as all_gather
    from gulliver.comm.collectives import all_reduce as all_reduce
    from gulliver.comm.collectives import barrier as barrier
    from gulliver.comm.collectives import broadcast as broadcast
    from gulliver.comm.collectives import choose_axes as choose_axes
    from gulliver.comm.collectives import gather_objects as gather_objects
    from gulliver.comm.collectives import group_rank as group_rank
    from gulliver.comm.collectives import reduce_scatter as reduce_scatter
    from gulliver.comm.launcher import launch as launch
    from gulliver.comm.torus import Torus as Torus
    from gulliver.comm.torus import make_axes as make_axes
    from gulliver.comm.watchdog import guard as guard
    from gulliver.comm.world import World as World
    from gulliver.comm.world import current_world as current_world
    from gulliver.comm.world import init_world as init_world
    from gulliver.comm.world import shutdown as shutdown
    from gulliver.precision.wire.formats import IDENTITY as IDENTITY

__getattr__, __dir__ = lazy_exports(__name__)
