"""Jobs that share a cluster: simulated under several policies, explained, and drawn.

`live` runs the same policies on real jobs; here no process is started.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gulliver.schedule._classic import Fifo, Optimus, Pollux, Srpt, Tiresias
    from gulliver.schedule._estimates import Estimator
    from gulliver.schedule._generators import SHAPES, generate
    from gulliver.schedule._jobs import Job, JobCluster, Modes
    from gulliver.schedule._lookahead import Rollout
    from gulliver.schedule._ones import Ones
    from gulliver.schedule._page import HEADS, schedule_page, summary_row
    from gulliver.schedule._policies import POLICIES, make_policy
    from gulliver.schedule._result import Result, Segment, Summary, bound_of
    from gulliver.schedule._simulator import simulate
    from gulliver.schedule._state import Allotment, Decision, JobState, Policy, View
    from gulliver.schedule._traces import read_trace, write_trace
    from gulliver.schedule._why import why
    from gulliver.schedule.live._elastic import Elastic, elastic

_PLACES = {
    "gulliver.schedule._classic": (
        "Fifo",
        "Optimus",
        "Pollux",
        "Srpt",
        "Tiresias",
    ),
    "gulliver.schedule._estimates": ("Estimator",),
    "gulliver.schedule._generators": (
        "SHAPES",
        "generate",
    ),
    "gulliver.schedule._jobs": (
        "Job",
        "JobCluster",
        "Modes",
    ),
    "gulliver.schedule._lookahead": ("Rollout",),
    "gulliver.schedule._ones": ("Ones",),
    "gulliver.schedule._page": (
        "HEADS",
        "schedule_page",
        "summary_row",
    ),
    "gulliver.schedule._policies": (
        "POLICIES",
        "make_policy",
    ),
    "gulliver.schedule._result": (
        "Result",
        "Segment",
        "Summary",
        "bound_of",
    ),
    "gulliver.schedule._simulator": ("simulate",),
    "gulliver.schedule._state": (
        "Allotment",
        "Decision",
        "JobState",
        "Policy",
        "View",
    ),
    "gulliver.schedule._traces": (
        "read_trace",
        "write_trace",
    ),
    "gulliver.schedule._why": ("why",),
    "gulliver.schedule.live._elastic": (
        "Elastic",
        "elastic",
    ),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}
__all__ = [
    "HEADS",
    "POLICIES",
    "SHAPES",
    "Allotment",
    "Decision",
    "Elastic",
    "Estimator",
    "Fifo",
    "Job",
    "JobCluster",
    "JobState",
    "Modes",
    "Ones",
    "Optimus",
    "Policy",
    "Pollux",
    "Result",
    "Rollout",
    "Segment",
    "Srpt",
    "Summary",
    "Tiresias",
    "View",
    "bound_of",
    "elastic",
    "generate",
    "make_policy",
    "read_trace",
    "schedule_page",
    "simulate",
    "summary_row",
    "why",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
