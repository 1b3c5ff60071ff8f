"""Draws futures: remaining work of jobs, and arrivals, from what has been seen so far."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gulliver.schedule._estimates import Estimator
from gulliver.schedule._rollout import Jobs, jobs_of, useful_goodputs
from gulliver.schedule._state import JobState, View

LEAST_SEEN = 6
"""Jobs that must have come before more are expected."""


class Futures(NamedTuple):
    """Futures of a view."""

    # Jobs that are there and those of all futures behind them; `left` is [futures, jobs].
    jobs: Jobs
    # Whether a job is in a future, [futures, jobs].
    there: np.ndarray
    # Number of jobs that are there now.
    present: int


def futures_of(view: View, estimator: Estimator, count: int, coming: int, seed: int) -> Futures:
    """Draws futures."""
    # Gaps between arrivals are those seen so far, the first one of those longer than the time since
    # the last arrival; each new job is a copy of one that was seen (a bootstrap). Nothing of the
    # trace that has not happened yet is looked at. The same moment always has the same futures.
    draw = np.random.default_rng([seed, round(view.now * 1e3), len(view.jobs)])
    now = jobs_of(view, [0.0] * len(view.jobs))
    left = np.stack([estimator.draws(state, count, draw) for state in view.jobs], axis=1)
    seen = [*view.jobs, *view.finished]
    times = _arrivals(seen, view.now, count, coming, draw)
    if not times.size:
        certain = bool((left == left[0]).all())
        kept = left[:1] if certain else left
        return Futures(now._replace(left=kept), np.ones(kept.shape, dtype=bool), len(view.jobs))
    picked = draw.integers(len(seen), size=times.shape)
    flat = [seen[int(number)] for number in picked.ravel()]
    more = len(flat)
    zeros = np.zeros(more)
    jobs = Jobs(
        np.concatenate([left, np.tile(_totals(flat, estimator, draw), (count, 1))], axis=1),
        np.concatenate(
            [
                now.goodputs,
                np.stack([useful_goodputs(s.job.modes(view.cluster).goodputs) for s in flat]),
            ]
        ),
        np.concatenate([now.held, np.zeros(more, dtype=now.held.dtype)]),
        np.concatenate([now.ready, zeros]),
        np.concatenate([now.resize, [s.job.start_seconds for s in flat]]),
        np.concatenate([now.resume, [s.job.resize_seconds for s in flat]]),
        np.concatenate([now.slack, np.full(more, np.inf)]),
        np.concatenate([now.comes, times.ravel()]),
    )
    there = np.ones((count, jobs.left.shape[1]), dtype=bool)
    there[:, len(view.jobs) :] = np.kron(np.eye(count), np.ones((1, times.shape[1]))) > 0
    return Futures(jobs, there, len(view.jobs))


def _arrivals(
    seen: list[JobState], now: float, count: int, coming: int, draw: np.random.Generator
) -> np.ndarray:
    """Seconds until jobs come, [futures, jobs]; empty where too few were seen to tell."""
    times = np.sort([state.job.arrival for state in seen])
    gaps, since = np.diff(times), now - float(times[-1])
    longer = gaps[gaps > since]
    if len(seen) < LEAST_SEEN or not len(longer) or not coming:
        return np.zeros((count, 0))
    first = draw.choice(longer, size=(count, 1)) - since
    rest = draw.choice(gaps, size=(count, coming - 1))
    return np.cumsum(np.concatenate([first, rest], axis=1), axis=1)


def _totals(flat: list[JobState], estimator: Estimator, draw: np.random.Generator) -> np.ndarray:
    """Samples of copies of jobs: their own where they are known."""
    return np.array(
        [
            state.job.samples
            if state.job.announced or state.done == state.job.samples
            else state.done + float(estimator.draws(state, 1, draw)[0])
            for state in flat
        ]
    )
