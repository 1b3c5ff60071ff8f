"""Sums of completion times that no schedule of malleable jobs is below.

Let area_j be the least slot-seconds that do the whole of job j, and shortest_j its least seconds. A
schedule gives j the fraction f_j(t) of its work at time t, with sum_j f_j(t) area_j <= slots and
f_j(t) <= 1 / shortest_j. Its mean busy time M_j = integral of t f_j(t) is at least shortest_j / 2
before its end. Three bounds follow, and the best is taken:

1. every job alone on all slots: sum of release + shortest;
2. one machine as fast as all slots: shortest remaining time first is optimal (Schrage 1968);
3. sum of M_j + shortest_j / 2, where the least sum of M_j on one machine is had by always running
   the job of least area (Goemans et al. 2002, "Single machine scheduling with release dates").

`fluid_bound_by_lp` bounds the sum of M_j by a linear programme over intervals instead, in which a
job is on some number of slots and slots are limited, both at once. It knows the exchange of speed
against slots, so it is the tighter one; work counts as done where its interval begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gulliver.errors import missing_extra


def fluid_bound(
    work: Sequence[float], rates: np.ndarray, releases: Sequence[float], slots: int
) -> float:
    """Bounds the sum of completion times from below, in closed form."""
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
    """Runs jobs on one machine, least remaining or least whole length first."""
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


def fluid_bound_by_lp(
    work: Sequence[float],
    rates: np.ndarray,
    releases: Sequence[float],
    slots: int,
    intervals: int = 40,
) -> float:
    """Bounds the sum of completion times from below, by a linear programme (HiGHS)."""
    quick = fluid_bound(work, rates, releases, slots)
    amount, rates = np.asarray(work, float), np.asarray(rates, float)
    if not amount.all():
        # A job without work ends when it is released, and takes no slot from others.
        some = np.flatnonzero(amount)
        at_once = float(np.sum(np.asarray(releases, float)[amount == 0]))
        rest = [float(releases[int(job)]) for job in some]
        left = amount[some].tolist()
        return max(quick, at_once + fluid_bound_by_lp(left, rates[some], rest, slots, intervals))
    if not len(work):
        return 0.0
    try:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array
    except ModuleNotFoundError:
        raise missing_extra("the bound by a linear programme needs scipy", "milp") from None
    edges = _edges(amount, rates, releases, slots, intervals)
    columns: list[tuple[int, int, float, float, float]] = []
    for job, row in enumerate(rates):
        for size, rate in _modes(row):
            for here in range(len(edges) - 1):
                if edges[here + 1] > releases[job]:
                    begun = max(edges[here], releases[job])
                    columns.append((job, here, size, rate / amount[job], begun))
    jobs, last = len(amount), len(edges) - 1
    number = np.arange(len(columns))
    job_of = np.array([c[0] for c in columns])
    time_of = np.array([c[1] for c in columns])
    size_of = np.array([c[2] for c in columns])
    share_of = np.array([c[3] for c in columns])
    begun_of = np.array([c[4] for c in columns])
    wide = np.diff(edges)
    own = job_of * last + time_of
    upper = csr_array(
        (
            np.concatenate([size_of, np.ones(len(columns))]),
            (np.concatenate([time_of, last + own]), np.concatenate([number, number])),
        ),
        shape=(last + jobs * last, len(columns)),
    )
    room = np.maximum(edges[1:] - np.maximum(edges[:-1], np.asarray(releases)[:, None]), 0.0)
    limit = np.concatenate([slots * wide, room.ravel()])
    whole = csr_array((share_of, (job_of, number)), shape=(jobs, len(columns)))
    found = linprog(
        share_of * begun_of, A_ub=upper, b_ub=limit, A_eq=whole, b_eq=np.ones(jobs), method="highs"
    )
    if found.status != 0:
        return quick
    shortest = amount / rates.max(axis=1)
    return max(quick, float(found.fun) + float(shortest.sum()) / 2)


def _edges(
    amount: np.ndarray, rates: np.ndarray, releases: Sequence[float], slots: int, intervals: int
) -> np.ndarray:
    """Edges of intervals: even to where all may be done, and one long interval behind."""
    counts = np.arange(1, rates.shape[1])
    with np.errstate(divide="ignore"):
        areas = amount * (counts / rates[:, 1:]).min(axis=1)
    first, last = min(releases), max(releases)
    likely = max(float(areas.sum()) / slots * 1.5, float((amount / rates.max(axis=1)).max()))
    slowest = float((amount / rates[:, 1:].max(axis=1)).sum())
    even = np.linspace(first, max(last, first + likely), intervals)
    return np.append(even, even[-1] + slowest + likely)


def _modes(row: np.ndarray) -> list[tuple[int, float]]:
    """Numbers of slots and rates whose hull is above the rates of all numbers of slots."""
    sizes = sorted({0, *(2**k for k in range(len(row).bit_length()) if 2**k < len(row))})
    sizes = sorted({*sizes, int(row.argmax())})
    kept = np.full(len(row), -np.inf)
    kept[sizes] = row[sizes]
    hull = concave_hull(kept)
    top = np.interp(np.arange(len(row)), hull, row[hull])
    raised = float((row[1:] / np.maximum(top[1:], 1e-300)).max())
    return [(size, float(row[size]) * max(1.0, raised)) for size in hull if size and row[size] > 0]


# Slots that jobs share in one round: exact for any values, by dynamic programming over slots.
#
#     best_j(c) = max over n <= c of best_(j-1)(c - n) + value_j(n)
#
# in jobs x slots^2 operations (a multiple-choice knapsack whose weights are small whole numbers,
# Ibaraki and Katoh 1988, "Resource allocation problems"). Several worlds are solved at once,
# because a planner asks for many. Groups of jobs with a limit of their own are solved first, and
# then shared among in the same way, which keeps it exact. For concave values the marginal greedy
# finds the same; `relaxed_value` bounds any others by their concave hulls.


MINUS = -np.inf


def allocate(
    values: np.ndarray, groups: Sequence[Sequence[int]] = (), limits: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Shares slots so that the sum of values is highest."""
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
    """Returns the best sum over slots used, [worlds, slots + 1], and what each job then has."""
    worlds, jobs, width = values.shape
    padded = np.full((worlds, 2 * width - 1), MINUS)
    best = padded[:, width - 1 :]
    best[:, 0] = 0.0
    # Row c of the windows is best(c), best(c - 1), ..., best(0), -inf ...: what n slots leave.
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)[:, :, ::-1]
    choices = np.zeros((jobs, worlds, width), dtype=np.int64)
    for job in range(jobs):
        # Numbers of slots that no world allows need no look: of 64, few jobs can use more than 16.
        possible = np.flatnonzero((values[:, job] > MINUS).any(axis=0))
        most = int(possible[-1]) + 1 if len(possible) else 1
        sums = windows[:, :, :most] + values[:, job, None, :most]
        choices[job] = sums.argmax(axis=2)
        best[:] = np.take_along_axis(sums, choices[job][:, :, None], axis=2)[:, :, 0]
    return best.copy(), choices


def _traced(choices: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Reads each job's slots back from the last job to the first."""
    jobs, worlds, _ = choices.shape
    counts, left, every = np.zeros((worlds, jobs), dtype=np.int64), ends.copy(), np.arange(worlds)
    for job in reversed(range(jobs)):
        counts[:, job] = choices[job, every, left]
        left = left - counts[:, job]
    return counts


def relaxed_value(values: np.ndarray, slots: int) -> float:
    """Returns a sum that no allocation is above: slots may be cut, values are their hulls."""
    total, steps = 0.0, []
    for row in values:
        hull = concave_hull(row)
        total += float(row[0])
        for low, high in pairwise(hull):
            steps.append((float(row[high] - row[low]) / (high - low), high - low))
    for slope, wide in sorted(steps, reverse=True):
        if slots <= 0 or slope <= 0:
            break
        taken = min(slots, wide)
        total += slope * taken
        slots -= taken
    return total


def concave_hull(row: np.ndarray) -> list[int]:
    """Indices of the upper concave hull of finite values over 0, 1, 2 ... (Andrew 1979)."""
    hull: list[int] = []
    for here in range(len(row)):
        if not np.isfinite(row[here]):
            continue
        while len(hull) > 1:
            low, high = hull[-2], hull[-1]
            if (row[high] - row[low]) * (here - high) <= (row[here] - row[high]) * (high - low):
                hull.pop()
            else:
                break
        hull.append(here)
    return hull
