"""Schedules jobs that share a cluster: policies, simulation, explanations and charts.

`live` runs the same policies on real jobs; the other modules start no processes.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.schedule.classic import Pollux
    from gulliver.schedule.jobs import Job, JobCluster
    from gulliver.schedule.live.training import elastic
    from gulliver.schedule.policies import Rollout
    from gulliver.schedule.report import HEADS, why
    from gulliver.schedule.simulator import Result, Summary, simulate
    from gulliver.schedule.state import Decision, Policy, View
    from gulliver.schedule.traces import SHAPES, generate, read_trace, write_trace
__all__ = [
    "HEADS",
    "SHAPES",
    "Decision",
    "Job",
    "JobCluster",
    "Policy",
    "Pollux",
    "Result",
    "Rollout",
    "Summary",
    "View",
    "elastic",
    "generate",
    "read_trace",
    "simulate",
    "why",
    "write_trace",
]

__getattr__, __dir__ = lazy_exports(__name__)
