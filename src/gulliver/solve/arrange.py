"""Choice of the waiting samples that make a step, so that its groups of ranks end together.

A step of few large samples cannot be dealt evenly whatever is done: two of 4.4 seconds on four
ranks each fill eight ranks, one of them and some of 3.6 do not. But a window has many samples, and
steps may be somewhat larger or smaller than asked for. So samples are chosen for steps, and not
only dealt in them, as in cutting stock:

    patterns (samples of a step) are packed up to many times around that of a mean step: those in
    which a few micro-batches just end
    the pattern that wastes least of its ranks' time is cut from the window as often as samples
    last, smaller and larger ones in turn, so that the mean step is as asked for
    small samples of which more is left than of others count more, so that no kind of them waits
    for the window's end, and are at most a third of a pattern's work while there are others

That is the sequential heuristic procedure; patterns are packed by `StepSolver`. The answer hangs on
the samples, their costs and the ranks that are arranged for, and on nothing before.

Source: Haessler 1975, "Controlling Cutting Pattern Changes in One-Dimensional Trim Problems".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from gulliver.solve.steps import StepSolver

SLACK = 0.45
"""Share by which a step may be larger or smaller than the mean one."""
NEAR = 0.02
"""Share up to which a step counts as a mean one."""
APART = 0.004
"""Share by which times that are tried differ."""
REPEATS, MOST_TIMES = 6, 64
"""Samples of one shape after whose ends patterns may end; times that are tried at most."""
SMALL, MOST_SMALL = 0.05, 0.35
"""Share of a step's rank seconds below which a sample is small; the most that small ones take."""
GOOD = 0.985
"""Used share of the ranks' time below which new patterns are looked for."""
URGE, MOST_URGE = 0.3, 3.0
"""What an excess of a small shape by as much again adds to its worth, and the most that counts."""
CHANGED = 0.8
"""New patterns are looked for when no more than this share is left since the last time."""


class StepArranger:
    """Chooses samples for steps."""

    def __init__(
        self, solver: StepSolver, weights: Mapping[Hashable, float], budget: float
    ) -> None:
        self._solver, self._weights, self._budget = solver, weights, budget

    def arrange(self, counts: Mapping[Hashable, int]) -> list[dict[Hashable, int]]:
        """Steps of waiting samples: how many of each shape; the same for the same counts."""
        names = sorted((shape for shape, n in counts.items() if n), key=repr)
        if not names:
            return []
        left = np.array([counts[name] for name in names])
        pool = _Pool(self._solver, names, left, self._weights, self._budget)
        steps: list[dict[Hashable, int]] = []
        for pattern, times in pool.cut():
            one = {names[n]: int(pattern[n]) for n in np.flatnonzero(pattern)}
            steps += [one] * times
        return steps


class _Pool:
    """Waiting samples of each shape, and patterns: rows of how many of each a step takes."""

    def __init__(
        self,
        solver: StepSolver,
        names: Sequence[Hashable],
        left: np.ndarray,
        weights: Mapping[Hashable, float],
        budget: float,
    ) -> None:
        self._solver, self._names, self._budget = solver, names, budget
        self._left, self._whole = left.copy(), left.copy()
        self._weights = np.array([weights[name] for name in names], dtype=float)
        self._worth = np.array([solver.rank_seconds(name) for name in names])
        self._mean = budget * (self._worth @ left) / (self._weights @ left) / solver.ranks
        self._small = self._worth < SMALL * self._mean * solver.ranks
        self._patterns = np.zeros((0, len(names)), dtype=np.int64)
        self._seconds, self._sizes, self._small_share = np.zeros((3, 0))
        self._known: set[bytes] = set()

    def cut(self) -> Iterator[tuple[np.ndarray, int]]:
        """Patterns and how often each is cut, until no two steps are left."""
        drift, searched, turned = 0.0, np.inf, 0
        while (total := float(self._weights @ self._left)) >= 2 * self._budget:
            best = self._best(large=drift <= 0)
            enough = 1.0 if best is None else CHANGED
            if total < enough * searched and (best is None or self._used(best) < GOOD):
                searched = total
                self._search()
                best = self._best(large=drift <= 0)
            if best is None:
                # None of the size that is due is left: the others may go on.
                drift, turned = (-1.0 if drift > 0 else 1.0), turned + 1
                if turned > 2:
                    return
                continue
            turned = 0
            times, over = self._times_of(best, drift)
            drift += times * over
            self._left -= times * self._patterns[best]
            yield self._patterns[best], times

    def _times_of(self, best: int, drift: float) -> tuple[int, float]:
        """How often a pattern is cut, and by how much it is over the budget."""
        pattern, over = self._patterns[best], float(self._sizes[best]) - self._budget
        needed = pattern > 0
        times = int((self._left[needed] // pattern[needed]).min())
        if abs(over) > NEAR * self._budget:
            times = min(times, int((abs(drift) + 1.5 * self._budget) / abs(over)))
        return max(1, times), over

    def _used(self, row: int) -> float:
        """Share of the ranks' time in which a pattern's samples run at their best rate."""
        useful = float(self._worth @ self._patterns[row])
        return useful / (self._solver.ranks * float(self._seconds[row]))

    def _best(self, large: bool) -> int | None:
        """The pattern of most worth a second that samples are left for."""
        near = np.abs(self._sizes - self._budget) <= NEAR * self._budget
        possible = (self._patterns <= self._left).all(axis=1)
        possible &= near | ((self._sizes >= self._budget) == large)
        mixed = possible & (self._small_share <= MOST_SMALL)
        if mixed.any():
            possible = mixed
        if not possible.any():
            return None
        mean = (self._worth @ self._left) / (self._worth @ self._whole)
        excess = np.clip(self._left / self._whole / mean - 1, -1.0, MOST_URGE)
        worth = self._worth * (1 + URGE * np.where(self._small, excess, 0.0))
        values = self._patterns @ worth / self._seconds
        return int(np.argmax(np.where(possible, values, -np.inf)))

    def _search(self) -> None:
        """Packs patterns of what is left, up to all times around the mean step's."""
        rows, seconds = [], []
        for taken, longest in self._packed():
            row = np.array([taken.get(name, 0) for name in self._names])
            fits = abs(float(self._weights @ row) / self._budget - 1) <= SLACK
            if fits and row.tobytes() not in self._known:
                self._known.add(row.tobytes())
                rows.append(row)
                seconds.append(longest)
        if not rows:
            return
        self._patterns = np.concatenate((self._patterns, np.array(rows)))
        self._seconds = np.concatenate((self._seconds, np.array(seconds)))
        worths = self._patterns * self._worth
        self._sizes = self._patterns @ self._weights
        self._small_share = worths[:, self._small].sum(axis=1) / worths.sum(axis=1)

    def _packed(self) -> Iterator[tuple[dict[Hashable, int], float]]:
        """Fillings of all ranks: of all shapes alike, and of large ones and then of small ones."""
        # More of a shape than all ranks can take need not be looked at.
        most = np.ceil((1 + SLACK) * self._mean * self._solver.ranks / self._worth)
        counts = np.minimum(self._left, most).astype(np.int64).tolist()
        waiting = np.argsort(-self._worth * self._left, kind="stable").tolist()
        few = set(np.flatnonzero(self._small).tolist())
        large = {s: counts[n] for n, s in enumerate(self._names) if counts[n] and n not in few}
        small = {self._names[n]: counts[n] for n in waiting if counts[n] and n in few}
        lot = max(map(self._solver.lot_seconds, small), default=0.0)
        tries = [({**large, **small}, limit, {}, 0.0) for limit in self._limits(0.0)]
        if small:
            tries += [(large, limit, small, limit + lot) for limit in self._limits(lot)]
        for one in tries:
            packed = self._solver.fill(*one)
            if packed is not None:
                yield packed

    def _limits(self, after: float) -> list[float]:
        """Times at which few micro-batches of a shape end; so much follows them."""
        mean = float(self._mean)
        low, high = (1 - SLACK) * mean - after, (1 + SLACK) * mean - after
        names = [self._names[n] for n in np.flatnonzero(self._left).tolist()]
        ends = {end for name in names for end in self._solver.first_ends(name, REPEATS)}
        ends |= {low + part * (high - low) for part in (0.25, 0.5, 0.75)}
        found = sorted(end for end in ends if low <= end <= high)
        kept = [end for end, later in pairwise([*found, np.inf]) if later > end * (1 + APART)]
        # Of many shapes there are more ends than it takes to find good patterns.
        thinned = kept[:: -(-len(kept) // MOST_TIMES)] if kept else []
        return [end * (1 + 1e-9) for end in thinned]
