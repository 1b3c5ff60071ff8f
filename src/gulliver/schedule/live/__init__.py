"""Real jobs under the policies of `gulliver.schedule`: submitted, resized, restarted, explained."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gulliver.schedule.live._backends import Agent, Backend, Launch, LocalNodes, Nodes, RankEnd
    from gulliver.schedule.live._controller import Controller
    from gulliver.schedule.live._daemon import (
        ensure_scheduler,
        has_scheduler,
        serve,
        stop_scheduler,
    )
    from gulliver.schedule.live._elastic import Elastic, elastic, read_curve, share_of
    from gulliver.schedule.live._history import (
        ScheduleHistory,
        expected_ends,
        live_page,
        live_why,
        read_history,
        result_of,
        status_line,
        write_history,
    )
    from gulliver.schedule.live._options import HERE, LOCAL, SchedulerOptions, Submission
    from gulliver.schedule.live._ray import RayNodes
    from gulliver.schedule.live._submission import Spool
    from gulliver.schedule.live._tracking import LiveJob, MeasuredSeconds, Phase

_PLACES = {
    "gulliver.schedule.live._backends": (
        "Agent",
        "Backend",
        "Launch",
        "LocalNodes",
        "Nodes",
        "RankEnd",
    ),
    "gulliver.schedule.live._controller": ("Controller",),
    "gulliver.schedule.live._daemon": (
        "ensure_scheduler",
        "has_scheduler",
        "serve",
        "stop_scheduler",
    ),
    "gulliver.schedule.live._elastic": (
        "Elastic",
        "elastic",
        "read_curve",
        "share_of",
    ),
    "gulliver.schedule.live._history": (
        "ScheduleHistory",
        "expected_ends",
        "live_page",
        "live_why",
        "read_history",
        "result_of",
        "status_line",
        "write_history",
    ),
    "gulliver.schedule.live._options": (
        "HERE",
        "LOCAL",
        "SchedulerOptions",
        "Submission",
    ),
    "gulliver.schedule.live._ray": ("RayNodes",),
    "gulliver.schedule.live._submission": ("Spool",),
    "gulliver.schedule.live._tracking": (
        "LiveJob",
        "MeasuredSeconds",
        "Phase",
    ),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}
__all__ = [
    "HERE",
    "LOCAL",
    "Agent",
    "Backend",
    "Controller",
    "Elastic",
    "Launch",
    "LiveJob",
    "LocalNodes",
    "MeasuredSeconds",
    "Nodes",
    "Phase",
    "RankEnd",
    "RayNodes",
    "ScheduleHistory",
    "SchedulerOptions",
    "Spool",
    "Submission",
    "elastic",
    "ensure_scheduler",
    "expected_ends",
    "has_scheduler",
    "live_page",
    "live_why",
    "read_curve",
    "read_history",
    "result_of",
    "serve",
    "share_of",
    "status_line",
    "stop_scheduler",
    "write_history",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
