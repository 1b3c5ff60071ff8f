"""Schedules jobs that share a cluster: policies, simulation, explanations and charts.

`live` runs the same policies on real jobs; the other modules start no processes.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.schedule.classic import Pollux as Pollux
    from gulliver.schedule.jobs import Job as Job
    from gulliver.schedule.jobs import JobCluster as JobCluster
    from gulliver.schedule.live.training import elastic as elastic
    from gulliver.schedule.policies import Rollout as Rollout
    from gulliver.schedule.report import HEADS as HEADS
    from gulliver.schedule.report import why as why
    from gulliver.schedule.simulator import Result as Result
    from gulliver.schedule.simulator import Summary as Summary
    from gulliver.schedule.simulator import simulate as simulate
    from gulliver.schedule.state import Decision as Decision
    from gulliver.schedule.state import Policy as Policy
    from gulliver.schedule.state import View as View
    from gulliver.schedule.traces import SHAPES as SHAPES
    from gulliver.schedule.traces import generate as generate
    from gulliver.schedule.traces import read_trace as read_trace
    from gulliver.schedule.traces import write_trace as write_trace
__getattr__, __dir__ = lazy_exports(__name__)
