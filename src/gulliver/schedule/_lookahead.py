"""Our policy: of many ways to share the slots, the one whose future is predicted to be best.

At every arrival and end, and where estimates may have changed:

1. all rules of `_rollout.py` are followed to the end of the jobs that are there, resizes included;
2. with the best rule as the future, other first steps are tried: leaving all as it is, growing into
   idle slots alone, and moving slots between two jobs, as long as that helps;
3. what is better than staying by less than `margin` of the jobs' mean is not done (hysteresis).

The predicted sum of completion times stands beside a bound that no schedule of these jobs is below.
A rule as a whole policy and a better first step over it is a rollout policy (Bertsekas and
Castanon 1999, "Rollout algorithms for stochastic scheduling problems").
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from gulliver.schedule._classic import shares
from gulliver.schedule._estimates import Estimator
from gulliver.schedule._rollout import LATE, RULES, Jobs, Outcome, Worlds, jobs_of
from gulliver.schedule._state import Allotment, Decision, Policy, View
from gulliver.solve import fluid_bound, fluid_bound_by_lp

MOVES = 64
"""Most first steps that are tried in a round of moves."""
LEAST_SEEN = 5
"""Jobs that must have come before their rate counts."""
Bound = Literal["closed form", "lp", "none"]


class Rollout(Policy):
    """Shares slots by the best predicted future.

    Args:
        estimator: samples that are left of jobs that do not announce theirs.
        margin: share of the predicted sum that a change has to save.
        moves: rounds of moving slots between jobs; 0 takes the rules as they are.
        period: seconds between looks while jobs are there whose samples are estimated.
        price: how much the delay of jobs that are still to come counts.
        bound: bound that predictions are laid beside; ``lp`` needs scipy and takes longer.
    """

    name, what = "rollout", "ours: the sharing whose predicted future is best, resizes included"

    def __init__(
        self,
        estimator: Estimator | None = None,
        margin: float = 0.01,
        moves: int = 2,
        period: float = 30.0,
        bound: Bound = "closed form",
        price: float = 0.02,
    ) -> None:
        self.estimator = estimator or Estimator()
        self.price = price
        self.margin, self.moves, self.period, self.bound = margin, moves, period, bound

    def decide(self, view: View) -> Decision:
        """Chooses the slots of every job."""
        self.estimator.learn(view.finished)
        left = [self.estimator.remaining(state) for state in view.jobs]
        jobs = jobs_of(view, left)
        best, stays = self._best(jobs, view)
        counts = best.counts[0]
        given = {
            s.job.name: Allotment(int(n), s.job.modes(view.cluster.slots).batches[n])
            for s, n in zip(view.jobs, counts, strict=True)
            if n
        }
        known = all(state.job.announced for state in view.jobs)
        predicted = float(best.ends[0].sum())
        return Decision(
            given,
            None if known else view.now + self.period,
            _reasons(view, best, stays),
            predicted,
            self._bound(jobs, view.cluster.slots),
        )

    def _crowd(self, view: View) -> float:
        """Jobs that have come in a second so far."""
        seen = len(view.jobs) + len(view.finished)
        return self.price * seen / view.now if view.now > 0 and seen >= LEAST_SEEN else 0.0

    def _best(self, jobs: Jobs, view: View) -> tuple[Outcome, float]:
        """Finds the best world, and the cost of the best one that takes no slot away."""
        share, limited = shares(view), bool(view.cluster.quotas)
        crowd, rules = self._crowd(view), RULES
        if np.isfinite(jobs.slack).any():
            rules = (*rules, *(rule._replace(reserving=True) for rule in rules))
        found = Worlds(jobs, rules, share, None, limited, crowd).follow()
        place = int(found.cost.argmin())
        best, rule = _world(found, place), rules[place]
        lazy = np.array([rule.lazy for rule in rules])
        quiet = np.flatnonzero(lazy)[found.cost[lazy].argmin()] if lazy.any() else place
        # The quiet world's first step, with the better future behind it.
        stays = found.counts[quiet]
        if not self._allowed(stays, view):
            stays = best.counts[0]
        for _ in range(max(1, self.moves)):
            tried = [stays, *(self._moved(best.counts[0], jobs, view) if self.moves else [])]
            first = np.stack(tried)
            again = Worlds(jobs, (rule,) * len(first), share, first, limited, crowd).follow()
            if float(again.cost[0]) < float(found.cost[quiet]):
                found.cost[quiet] = again.cost[0]
                found.ends[quiet], found.starts[quiet] = again.ends[0], again.starts[0]
            better = int(again.cost.argmin())
            if again.cost[better] >= best.cost[0] * (1 - 1e-9):
                break
            best = _world(again, better)
        quiet_cost = float(found.cost[quiet])
        if self._allowed(found.counts[quiet], view) and best.cost[0] > quiet_cost * (
            1 - self.margin
        ):
            return _world(found, int(quiet)), quiet_cost
        return best, quiet_cost

    def _allowed(self, counts: np.ndarray, view: View) -> bool:
        used: dict[str, int] = {}
        for state, count in zip(view.jobs, counts, strict=True):
            used[state.job.tenant] = used.get(state.job.tenant, 0) + int(count)
        fits = all(count <= view.limits[tenant] for tenant, count in used.items())
        return fits and int(counts.sum()) <= view.cluster.slots

    def _moved(self, counts: np.ndarray, jobs: Jobs, view: View) -> list[np.ndarray]:
        """First steps in which one job's slots, or half of them, or one, are another's."""
        possible = jobs.goodputs > 0
        idle = view.cluster.slots - int(counts.sum())
        found: dict[bytes, np.ndarray] = {}
        givers = [(None, n) for n in {idle} if n] + [
            (int(a), n)
            for a in np.flatnonzero(counts)
            for n in {1, int(counts[a]) // 2, int(counts[a])}
            if n
        ]
        for giver, amount in givers:
            for taker in range(len(counts)):
                if taker == giver:
                    continue
                step = counts.copy()
                if giver is not None:
                    step[giver] -= amount
                    if step[giver] and not possible[giver, step[giver]]:
                        continue
                reach = np.flatnonzero(possible[taker, : step[taker] + amount + 1])
                if not len(reach) or reach[-1] <= step[taker]:
                    continue
                step[taker] = reach[-1]
                if self._allowed(step, view):
                    found[step.tobytes()] = step
        return list(found.values())[:MOVES]

    def _bound(self, jobs: Jobs, slots: int) -> float | None:
        if self.bound == "none":
            return None
        by = fluid_bound_by_lp if self.bound == "lp" else fluid_bound
        return by(list(jobs.left), jobs.goodputs, [0.0] * len(jobs.left), slots)


def _world(found: Outcome, place: int) -> Outcome:
    return Outcome(*(part[place : place + 1] for part in found))


def _reasons(view: View, best: Outcome, stays: float) -> dict[str, str]:
    """Says of every job what the plan has for it."""
    why = {}
    gain = stays - float(best.cost[0])
    for place, state in enumerate(view.jobs):
        count, end = int(best.counts[0, place]), float(best.ends[0, place])
        plan = f"the plan ends it in {end:.4g} s"
        if not count:
            start = float(best.starts[0, place])
            told = f"waits: the plan starts it in {start:.4g} s and ends it in {end:.4g} s"
        elif state.count == 0 or count == state.count:
            told = f"{count} slots: {plan}"
        else:
            told = f"from {state.count} to {count} slots: {plan}"
        if state.count > count and 0 < gain < LATE:
            told += f"; all jobs together end {gain:.4g} s sooner than if nothing were taken away"
        why[state.job.name] = told
    return why
