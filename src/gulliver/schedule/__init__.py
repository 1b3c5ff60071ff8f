"""Jobs that share a cluster: simulated under several policies, explained, and drawn.

`_jobs.py` says what a job is and how fast it is on some slots, `_simulator.py` runs a policy over a
trace, `_nodes.py` with `_placement.py` say where its jobs lie, `_result.py` adds up and holds it
against a bound. Policies: `_classic.py`, Pollux in its published form in `_genetic.py`, ONES as
published in `_ones.py` with `_evolution.py` and `_predictor.py`, ours in `_lookahead.py` with
`_rollout.py` and `_futures.py`; `_clairvoyant.py` searches what knowing all arrivals would gain.
`_why.py` explains, `_page.py` draws, `_traces.py` reads files and `_generators.py` draws traces.

`live` runs the same policies on real jobs; here no process is started.
"""

from gulliver.schedule._clairvoyant import clairvoyant
from gulliver.schedule._classic import Fifo, Optimus, Pollux, Srpt, Tiresias
from gulliver.schedule._estimates import Estimator
from gulliver.schedule._generators import SHAPES, generate
from gulliver.schedule._genetic import PolluxInRounds
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
    "PolluxInRounds",
    "Result",
    "Rollout",
    "Segment",
    "Srpt",
    "Summary",
    "Tiresias",
    "View",
    "bound_of",
    "clairvoyant",
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
