"""Searches a schedule that knows all: how far can any policy get, as far as one can find?

A bound says what no schedule can do; this says what one does. Every arrival and length is known,
and each job has a factor of its weight in a rule of sharing. The factors are searched by trying
random changes of a few of them, many at once, over the whole trace, and keeping the best. What is
found is a schedule that can be run, so a policy that sees no future is not expected to be below it,
but it is no proof that nothing is: the search is random, and its rule is one of many.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gulliver.schedule._jobs import Job, JobCluster
from gulliver.schedule._rollout import CALM, RULES, Jobs, Rule, Worlds, useful_goodputs
from gulliver.solve import allocate

INERTIAS = (1.0, 2.0, 4.0)
"""How much resizes count in the rules that the search may begin with."""


def clairvoyant(
    trace: Sequence[Job], cluster: JobCluster, rounds: int = 150, tries: int = 32, seed: int = 0
) -> float:
    """Returns the mean completion time in seconds of the best schedule that was found.

    Args:
        trace: jobs; no quotas, and where a job lies does not matter.
        cluster: slots.
        rounds: rounds of the search.
        tries: changes that are tried in a round.
        seed: seed of the changes.
    """
    jobs = _whole(tuple(sorted(trace, key=lambda job: job.arrival)), cluster)
    draw = np.random.default_rng(seed)
    rules = tuple(
        rule._replace(inertia=times)
        for rule in (*(r for r in RULES if not r.lazy), CALM)
        for times in INERTIAS
    )
    ones = np.ones((len(rules), len(jobs.left)))
    costs = _costs(jobs, rules, ones)
    kept = np.argsort(costs, kind="stable")[:4]
    # Four starts side by side; each keeps what is better than its own best.
    starts = [(float(costs[n]), rules[n], ones[0]) for n in kept]
    for number in range(rounds):
        starts = _improved(starts, jobs, tries // len(starts), draw, number / rounds)
    return min(cost for cost, _, _ in starts) / len(jobs.left)


Start = tuple[float, Rule, np.ndarray]


def _improved(
    starts: list[Start], jobs: Jobs, tries: int, draw: np.random.Generator, part: float
) -> list[Start]:
    """Changes factors of a few jobs in each start, less as the search goes on."""
    rules, boosts = [], []
    for _, rule, boost in starts:
        for _ in range(tries):
            size = 10 ** draw.uniform(-1.5, 0.5 - part)
            chosen = draw.integers(len(boost), size=int(draw.integers(1, 4)))
            changed = boost.copy()
            changed[chosen] *= np.exp(size * draw.standard_normal(len(chosen)))
            rules.append(rule)
            boosts.append(changed)
    costs = _costs(jobs, tuple(rules), np.stack(boosts))
    found = []
    for number, start in enumerate(starts):
        own = costs[number * tries : (number + 1) * tries]
        best = int(own.argmin())
        better = own[best] < start[0]
        found.append(
            (float(own[best]), start[1], boosts[number * tries + best]) if better else start
        )
    return found


def _costs(jobs: Jobs, rules: tuple[Rule, ...], boosts: np.ndarray) -> np.ndarray:
    return Worlds(jobs, rules, allocate, boost=boosts).follow().cost


def _whole(trace: tuple[Job, ...], cluster: JobCluster) -> Jobs:
    """A whole trace as numbers, before its first arrival."""
    zeros = np.zeros(len(trace))
    first = trace[0].arrival
    return Jobs(
        np.array([job.samples for job in trace]),
        np.stack([useful_goodputs(job.modes(cluster).goodputs) for job in trace]),
        zeros.astype(np.int64),
        zeros,
        np.array([job.start_seconds for job in trace]),
        np.array([job.resize_seconds for job in trace]),
        np.full(len(trace), np.inf),
        np.array([job.arrival - first for job in trace]),
    )
