"""Rollout policy: chooses the sharing whose simulated future is best.

A rule as a base policy with a better first step is a rollout policy (Bertsekas and Castanon 1999,
"Rollout algorithms for stochastic scheduling problems").
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from gulliver.schedule._classic import Pollux, shares
from gulliver.schedule._estimates import Estimator
from gulliver.schedule._futures import Futures, futures_of
from gulliver.schedule._jobs import JobCluster
from gulliver.schedule._rollout import (
    CALM,
    LATE,
    RULES,
    Jobs,
    SharingRule,
    Worlds,
    WorldsOutcome,
    jobs_of,
)
from gulliver.schedule._state import Allotment, Decision, Policy, View
from gulliver.solve import fluid_bound, fluid_bound_by_lp

MOVES = 64
"""Most first steps that are tried in a round of moves."""
Bound = Literal["closed form", "lp", "none"]


class Rollout(Policy):
    """Shares slots by the best predicted future.

    Args:
        estimator: samples that are left of jobs that do not announce theirs; by default from how
            far the losses of jobs fall.
        margin: share of the predicted sum that a change has to save.
        moves: rounds of moving slots between jobs where nobody is expected; 0 for none.
        period: seconds between looks while jobs are there whose samples are estimated.
        futures: futures that are drawn.
        coming: jobs that come in each of them; 0 expects nobody.
        bound: bound that predictions are laid beside; ``lp`` needs scipy and takes longer.
        seed: seed of the futures.
    """

    name, what = "rollout", "ours: the sharing whose predicted future is best, resizes included"

    def __init__(
        self,
        estimator: Estimator | None = None,
        margin: float = 0.003,
        moves: int = 2,
        period: float = 60.0,
        futures: int = 8,
        coming: int = 12,
        bound: Bound = "closed form",
        seed: int = 0,
    ) -> None:
        self.estimator = estimator or Estimator()
        self.futures, self.coming, self.seed = futures, coming, seed
        self.margin, self.moves, self.period, self.bound = margin, moves, period, bound
        self.pollux = Pollux()

    def begin(self, cluster: JobCluster) -> None:
        """Resets the policy for a new simulation."""
        super().begin(cluster)
        self.estimator.begin()

    def decide(self, view: View) -> Decision:
        """Chooses the slots of every job."""
        # 1. Follow all rules of `_rollout.py` to the end of the jobs that are there, resizes
        #   included.
        # 2. With the best rule as the future, try other first steps: keep all as it is, grow into
        #   idle slots only, move slots between two jobs.
        # 3. Drop a change that saves less than `margin` of the sum over staying (hysteresis).
        self.estimator.learn(view.finished)
        jobs = jobs_of(view, [self.estimator.remaining(state) for state in view.jobs])
        futures = futures_of(view, self.estimator, self.futures, self.coming, self.seed)
        if len(futures.there) == 1 and futures.present == futures.there.shape[1]:
            best, stays = self._best(jobs, view)
        else:
            best, stays = self._best_over(futures, jobs, view)
        counts = best.counts[0]
        given = {
            s.job.name: Allotment(int(n), s.job.modes(view.cluster).batches[n])
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

    def _rules(self, jobs: Jobs) -> tuple[SharingRule, ...]:
        rules = (*RULES, CALM, CALM._replace(lazy=True))
        if np.isfinite(jobs.slack).any():
            rules = (*rules, *(rule._replace(reserving=True) for rule in rules))
        return rules

    def _best_over(self, futures: Futures, jobs: Jobs, view: View) -> tuple[WorldsOutcome, float]:
        """Finds the first step with the best mean cost over many futures."""
        share, limited = shares(view), bool(view.cluster.quotas)
        rules = self._rules(jobs)
        calm = CALM._replace(reserving=bool(np.isfinite(jobs.slack).any()))
        # Each rule's first step, Pollux' and what is held now; that of the calm rule comes first.
        rules = (calm, *rules)
        firsts = list(Worlds(jobs, rules, share, None, limited).shared())
        quiet = [n for n, rule in enumerate(rules) if rule.lazy]
        asked = self.pollux.decide(view).allotments
        firsts.append(np.array([_count(asked.get(state.job.name)) for state in view.jobs]))
        firsts.append(jobs.held)
        keeps = {first.tobytes(): n in quiet for n, first in reversed([*enumerate(firsts)])}
        unique = {first.tobytes(): first for first in firsts if self._allowed(first, view)}
        keeps = [keeps[key] or key == jobs.held.tobytes() for key in unique]
        tried = np.stack([first for first in unique.values() if first.any()])
        count = len(futures.there)
        ahead = np.zeros((len(tried) * count, futures.there.shape[1]), dtype=np.int64)
        ahead[:, : futures.present] = np.repeat(tried, count, axis=0)
        found = Worlds(
            futures.jobs._replace(left=np.tile(futures.jobs.left, (len(tried), 1))),
            (calm,) * len(ahead),
            share,
            ahead,
            limited,
            np.tile(futures.there, (len(tried), 1)),
        ).follow()
        cost = found.cost.reshape(len(tried), count).mean(axis=1)
        best = int(cost.argmin())
        if cost[best] > cost[0] * (1 - self.margin):
            best = 0
        alone = Worlds(jobs, (calm,), share, tried[best][None], limited).follow()
        lazy = [float(c) for c, keep in zip(cost, keeps, strict=False) if keep]
        gain = min(lazy) - float(cost[best]) if lazy else 0.0
        return alone, float(alone.cost[0]) + gain

    def _best(self, jobs: Jobs, view: View) -> tuple[WorldsOutcome, float]:
        """Finds the best world without arrivals, and the cost of the best that only adds slots."""
        share, limited = shares(view), bool(view.cluster.quotas)
        rules = self._rules(jobs)
        found = Worlds(jobs, rules, share, None, limited).follow()
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
            again = Worlds(jobs, (rule,) * len(first), share, first, limited).follow()
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
        """First steps that move one, half or all of a job's slots to another job."""
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


def _count(given: Allotment | None) -> int:
    return 0 if given is None else given.slots if isinstance(given.slots, int) else len(given.slots)


def _world(found: WorldsOutcome, place: int) -> WorldsOutcome:
    return WorldsOutcome(*(part[place : place + 1] for part in found))


def _reasons(view: View, best: WorldsOutcome, stays: float) -> dict[str, str]:
    """Describes the plan for every job."""
    why = {}
    gain = stays - float(best.cost[0])
    for place, state in enumerate(view.jobs):
        count, end = int(best.counts[0, place]), float(best.ends[0, place])
        plan = f"the plan ends it in {end:.4g} s"
        if not count:
            start = float(best.starts[0, place])
            text = f"waits: the plan starts it in {start:.4g} s and ends it in {end:.4g} s"
        elif state.count == 0 or count == state.count:
            text = f"{count} slots: {plan}"
        else:
            text = f"from {state.count} to {count} slots: {plan}"
        if state.count > count and 0 < gain < LATE:
            text += f"; all jobs together end {gain:.4g} s sooner than if nothing were taken away"
        why[state.job.name] = text
    return why
