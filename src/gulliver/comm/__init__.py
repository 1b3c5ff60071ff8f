"""Worlds of ranks, and the collectives between them."""

from gulliver.comm._axes import Axes, Torus, make_axes
from gulliver.comm._choice import (
    Choice,
    Chooser,
    ReduceChoice,
    choose,
    choose_all_reduce,
    reduce_choices,
    use_links,
)
from gulliver.comm._collectives import (
    Group,
    Handle,
    Op,
    all_gather,
    all_reduce,
    any_rank,
    backend_all_reduce,
    barrier,
    broadcast,
    broadcast_object,
    gather_objects,
    group_rank,
    group_size,
    reduce_scatter,
)
from gulliver.comm._flight_recorder import Purpose
from gulliver.comm._groups import (
    host_rank_group,
    release_groups,
    return_rank_group,
    shared_rank_group,
)
from gulliver.comm._launch import default_ranks, launch, under_launcher
from gulliver.comm._layout import ChosenAxes, choose_axes
from gulliver.comm._messages import Messages, sent_bytes
from gulliver.comm._point_to_point import (
    Flight,
    PackedTensors,
    exchange,
    gather_integers,
    operations,
    post,
    shift,
)
from gulliver.comm._raising import raise_on_any_rank
from gulliver.comm._rank_group import ALONE, RankGroup, rank_group_of
from gulliver.comm._rendezvous import listen_on_localhost
from gulliver.comm._watchdog import Watchdog
from gulliver.comm._wire import IDENTITY, WireFormat
from gulliver.comm._world import (
    World,
    adopt_world,
    current_world,
    guard,
    init_world,
    shutdown,
    together,
)

__all__ = [
    "ALONE",
    "IDENTITY",
    "Axes",
    "Choice",
    "Chooser",
    "ChosenAxes",
    "Flight",
    "Group",
    "Handle",
    "Messages",
    "Op",
    "PackedTensors",
    "Purpose",
    "RankGroup",
    "ReduceChoice",
    "Torus",
    "Watchdog",
    "WireFormat",
    "World",
    "adopt_world",
    "all_gather",
    "all_reduce",
    "any_rank",
    "backend_all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "choose",
    "choose_all_reduce",
    "choose_axes",
    "current_world",
    "default_ranks",
    "exchange",
    "gather_integers",
    "gather_objects",
    "group_rank",
    "group_size",
    "guard",
    "host_rank_group",
    "init_world",
    "launch",
    "listen_on_localhost",
    "make_axes",
    "operations",
    "post",
    "raise_on_any_rank",
    "rank_group_of",
    "reduce_choices",
    "reduce_scatter",
    "release_groups",
    "return_rank_group",
    "sent_bytes",
    "shared_rank_group",
    "shift",
    "shutdown",
    "together",
    "under_launcher",
    "use_links",
]
