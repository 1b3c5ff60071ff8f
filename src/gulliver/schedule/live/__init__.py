"""Real jobs under the policies of `gulliver.schedule`: submitted, resized, restarted, explained."""

from gulliver.schedule.live._backends import Agent, Backend, Launch, LocalNodes, Nodes, RankEnd
from gulliver.schedule.live._controller import Controller
from gulliver.schedule.live._daemon import (
    HERE,
    LOCAL,
    SchedulerOptions,
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
    told,
    write_history,
)
from gulliver.schedule.live._ray import RayNodes
from gulliver.schedule.live._submission import Spool, Submission, default_folder
from gulliver.schedule.live._tracking import LiveJob, MeasuredSeconds, Phase

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
    "default_folder",
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
    "stop_scheduler",
    "told",
    "write_history",
]
