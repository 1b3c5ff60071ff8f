"""Real jobs under the policies of `gulliver.schedule`: submitted, resized, restarted, explained.

A script calls `elastic` (`_elastic.py`), users submit it (`_submission.py`, which also tells of the
folder that all meet in), and a scheduler (`_daemon.py`) runs `_controller.py` over jobs
(`_tracking.py`) on slots: processes that are forked (`_forks.py`) by agents on nodes
(`_backends.py`), which Ray finds (`_ray.py`). `_history.py` keeps what has happened, and explains.

It knows nothing of what a job computes, nor of other users of a cluster.
"""

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
    History,
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
from gulliver.schedule.live._tracking import LiveJob, Measured, Phase

__all__ = [
    "HERE",
    "LOCAL",
    "Agent",
    "Backend",
    "Controller",
    "Elastic",
    "History",
    "Launch",
    "LiveJob",
    "LocalNodes",
    "Measured",
    "Nodes",
    "Phase",
    "RankEnd",
    "RayNodes",
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
