"""Jobs that share a cluster: simulated under several policies, explained, and drawn.

`live` runs the same policies on real jobs; here no process is started.
"""

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
from gulliver.schedule.live import Elastic, elastic

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
