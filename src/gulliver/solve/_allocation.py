"""Slots that jobs share in one round: exact for any values, by dynamic programming over slots.

    best_j(c) = max over n <= c of best_(j-1)(c - n) + value_j(n)

in jobs x slots^2 operations (a multiple-choice knapsack whose weights are small whole numbers,
Ibaraki and Katoh 1988, "Resource allocation problems"). Several worlds are solved at once, because
a planner asks for many. Groups of jobs with a limit of their own are solved first, and then shared
among in the same way, which keeps it exact. For concave values the marginal greedy finds the same;
`relaxed_value` bounds any others by their concave hulls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

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
