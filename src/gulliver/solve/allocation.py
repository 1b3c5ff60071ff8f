"""Allocates slots to malleable jobs, and bounds the sum of their completion times.

Let area_j be the fewest slot-seconds that complete job j, and shortest_j its shortest run time. A
schedule does the fraction f_j(t) of j's work at time t, with sum_j f_j(t) area_j <= slots and
f_j(t) <= 1 / shortest_j. The mean busy time M_j = integral of t f_j(t) is at least shortest_j / 2
before j's end. The bound is the best of:

1. every job by itself on all slots: sum of release + shortest;
2. one machine as fast as all slots: shortest remaining time first is optimal (Schrage 1968);
3. sum of M_j + shortest_j / 2, where running the job with the smallest area first, on one machine,
minimizes sum of M_j (Goemans et al. 2002, "Single machine scheduling with release dates").
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def fluid_bound(
    work: Sequence[float], rates: np.ndarray, releases: Sequence[float], slots: int
) -> float:
    """Lower bound on the sum of completion times, in closed form."""
    if not len(work):
        return 0.0
    amount, rates = np.asarray(work, float), np.asarray(rates, float)
    counts = np.arange(1, rates.shape[1])
    with np.errstate(divide="ignore"):
        areas = amount * (counts / rates[:, 1:]).min(axis=1) / slots
    shortest = amount / rates.max(axis=1)
    alone = float(np.sum(np.asarray(releases) + shortest))
    ends, _ = _one_machine(areas, releases, remaining=True)
    _, middles = _one_machine(areas, releases, remaining=False)
    return max(alone, ends, middles + float(shortest.sum()) / 2)


def _one_machine(
    lengths: np.ndarray, releases: Sequence[float], remaining: bool
) -> tuple[float, float]:
    """Simulates one machine that runs the shortest job first, by remaining or by total length."""
    left = lengths.astype(float).copy()
    times = sorted({float(release) for release in releases})
    now, ends, middles = times[0], 0.0, 0.0
    waiting = set(range(len(left)))
    while waiting:
        ready = [job for job in waiting if releases[job] <= now]
        later = [time for time in times if time > now]
        if not ready:
            now = later[0]
            continue
        job = min(ready, key=lambda j: (left[j] if remaining else lengths[j], j))
        until = now + left[job]
        if later and later[0] < until:
            until = later[0]
        spent = until - now
        if lengths[job] > 0:
            middles += spent / lengths[job] * (now + until) / 2
        left[job] -= spent
        now = until
        if left[job] <= 1e-12 * max(1.0, lengths[job]):
            waiting.discard(job)
            ends += now
    return ends, middles


# Allocation of slots to jobs in one round: exact for any values, by dynamic programming over slots.
#
#     best_j(c) = max over n <= c of best_(j-1)(c - n) + value_j(n)
#
# in jobs x slots^2 operations (a multiple-choice knapsack with small integer weights, Ibaraki and
# Katoh 1988, "Resource allocation problems"). Several scenarios are solved at once, because
# planners need many. Groups of jobs with their own limit are solved first and then enter as one
# job, which keeps the result exact.


MINUS = -np.inf


def allocate(
    values: np.ndarray, groups: Sequence[Sequence[int]] = (), limits: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Allocates slots exactly, maximizing the sum of values."""
    worlds, jobs, _ = values.shape
    groups = groups or [range(jobs)]
    curves, choices = [], []
    for number, group in enumerate(groups):
        curve, choice = _shared(values[:, list(group)])
        if limits:
            curve[:, limits[number] + 1 :] = MINUS
        curves.append(curve)
        choices.append(choice)
    counts = np.zeros((worlds, jobs), dtype=np.int64)
    every = np.arange(worlds)
    if len(groups) == 1:
        ends = curves[0].argmax(axis=1)[:, None]
        value = curves[0][every, ends[:, 0]]
    else:
        total, picked = _shared(np.stack(curves, axis=1))
        last = total.argmax(axis=1)
        value = total[every, last]
        ends = _traced(picked, last)
    for number, group in enumerate(groups):
        counts[:, list(group)] = _traced(choices[number], ends[:, number])
    return counts, value


def _shared(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the best sum for each number of slots, [worlds, slots + 1], and each job's slots."""
    worlds, jobs, width = values.shape
    padded = np.full((worlds, 2 * width - 1), MINUS)
    best = padded[:, width - 1 :]
    best[:, 0] = 0.0
    # Row c of the windows is best(c), best(c - 1), ..., best(0), -inf ...: the value left by n
    # slots.
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)[:, :, ::-1]
    choices = np.zeros((jobs, worlds, width), dtype=np.int64)
    for job in range(jobs):
        # Skip slot counts that no scenario allows: of 64, few jobs can use more than 16.
        possible = np.flatnonzero((values[:, job] > MINUS).any(axis=0))
        most = int(possible[-1]) + 1 if len(possible) else 1
        sums = windows[:, :, :most] + values[:, job, None, :most]
        choices[job] = sums.argmax(axis=2)
        best[:] = np.take_along_axis(sums, choices[job][:, :, None], axis=2)[:, :, 0]
    return best.copy(), choices


def _traced(choices: np.ndarray, ends: np.ndarray) -> np.ndarray:
    jobs, worlds, _ = choices.shape
    counts, left, every = np.zeros((worlds, jobs), dtype=np.int64), ends.copy(), np.arange(worlds)
    for job in reversed(range(jobs)):
        counts[:, job] = choices[job, every, left]
        left = left - counts[:, job]
    return counts
