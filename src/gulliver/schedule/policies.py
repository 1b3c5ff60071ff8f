"""Chooses an allocation by simulating sharing rules into the future.

One world per rule is simulated from completion to completion, all worlds in one array. In each
phase, `gulliver.solve.allocation.allocate` allocates the slots exactly for the rule's weights:

    maximize sum_j weight_j x (seconds of j on one slot now) / (seconds of j on n_j slots from now)

where the seconds on a number of slots other than the current one include the resize.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from gulliver.errors import check_known
from gulliver.schedule.classic import PERIOD, Fifo, Pollux, Srpt, Tiresias, shares
from gulliver.schedule.estimates import Estimator
from gulliver.schedule.jobs import JobCluster
from gulliver.schedule.state import Allotment, Decision, JobState, Policy, View
from gulliver.solve.allocation import fluid_bound

HORIZON = 40
"""Maximum number of jobs that share slots in a phase; those with the least work are preferred."""
NEVER = 1e30  # seconds per sample if a job cannot run
LATE = 1e9  # penalty in seconds for a missed deadline

Share = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class SharingRule(NamedTuple):
    """Determines how a simulated world weights jobs."""

    # Power of the remaining seconds; None for the weights of the closed form.
    power: float | None
    # Power p of the speedup, if power is None.
    speedup: float = 0.0
    # Whether running jobs keep at least their slots.
    lazy: bool = False
    # Whether jobs with a deadline come first.
    reserving: bool = False
    # Whether to minimize the sum of weighted slowdowns instead.
    inverse: bool = False
    # Power of the slowdowns in that sum.
    exponent: float = 1.0
    # Slowdown of a job without slots, relative to running alone on all slots.
    worst: float = 20.0
    # Weight of resize seconds.
    inertia: float = 1.0
    # Fraction of its weight charged to a job for all slots.
    price: float = 0.0


RULES = tuple(
    SharingRule(power, speedup, lazy)
    for power, speedup in ((0, 0), (0.5, 0), (1, 0), (2, 0), (5, 0), (None, 0.5), (None, 0.75))
    for lazy in (False, True)
) + tuple(
    SharingRule(power, lazy=lazy, inverse=True)
    for power in (-1, 0, 0.5, 1, 2)
    for lazy in (False, True)
)
CALM = SharingRule(0.45, inverse=True, exponent=0.5, worst=4.7, inertia=4.0, price=0.06)
"""Best rule while jobs keep arriving. A resize counts four times, as the next arrival may revert
it.
The parameters were tuned on 24 traces of each kind, with seeds that published tables do not use.
"""


class Jobs(NamedTuple):
    """Jobs as arrays."""

    # Remaining samples, [jobs].
    left: np.ndarray
    # Samples per second by number of slots, [jobs, slots + 1].
    goodputs: np.ndarray
    held: np.ndarray
    # Seconds until it makes progress on its slots, [jobs].
    ready: np.ndarray
    # Seconds to change its slots or to start, [jobs].
    resize: np.ndarray
    # Seconds of a resize after its start, [jobs].
    resume: np.ndarray
    # Seconds to the deadline, inf without one, [jobs].
    slack: np.ndarray
    # Seconds until its arrival, 0 if present, [jobs].
    comes: np.ndarray


def jobs_of(view: View, left: list[float]) -> Jobs:
    """Converts a view to arrays; `left` is the estimated remaining work."""
    states = view.jobs
    return Jobs(
        np.array(left),
        np.stack([useful_goodputs(state.job.modes(view.cluster).goodputs) for state in states]),
        np.array([state.count for state in states]),
        np.array([max(0.0, state.ready - view.now) for state in states]),
        np.array([state.overhead(view.now, -1) for state in states]),
        np.array([state.job.resize_seconds for state in states]),
        np.array([np.inf if s.job.deadline is None else s.job.deadline - view.now for s in states]),
        np.zeros(len(states)),
    )


def useful_goodputs(goodputs: np.ndarray) -> np.ndarray:
    """Sets goodput to zero for slot counts that are no faster than a smaller count."""
    before = np.maximum.accumulate(np.concatenate([[0.0], goodputs[:-1]]))
    return np.where(goodputs > before, goodputs, 0.0)


class WorldsOutcome(NamedTuple):
    """Results of worlds simulated to their end."""

    # Slots of the first phase, [worlds, jobs].
    counts: np.ndarray
    # Seconds until each job is done, [worlds, jobs].
    ends: np.ndarray
    # Seconds until each job first holds slots, [worlds, jobs].
    starts: np.ndarray
    # Sum over jobs of the seconds to their end, from now or from their arrival, plus `LATE` per
    # missed deadline, [worlds].
    cost: np.ndarray


class Worlds:
    """Simulates several worlds together."""

    def __init__(
        self,
        jobs: Jobs,
        rules: tuple[SharingRule, ...],
        share: Share,
        first: np.ndarray | None = None,
        limited: bool = False,
        there: np.ndarray | None = None,
    ) -> None:
        self.rules, self.share, self.first, self.limited = rules, share, first, limited
        wide = (len(rules), 1)
        self.goodputs, self.slack, self.resume = jobs.goodputs, jobs.slack, jobs.resume
        self.left = np.array(np.broadcast_to(jobs.left, (len(rules), jobs.left.shape[-1])))
        self.held, self.comes = np.tile(jobs.held, wide), jobs.comes
        self.ready, self.resize = np.tile(jobs.ready, wide), np.tile(jobs.resize, wide)
        self.now = np.zeros(len(rules))
        there = np.ones(self.left.shape, dtype=bool) if there is None else there
        self.there, self.coming = there, there & (self.comes > 0)
        self.alive = there & ~self.coming
        self.ends = np.zeros(self.left.shape)
        self.starts = np.where(self.held > 0, 0.0, np.inf)
        with np.errstate(divide="ignore"):
            # Seconds per sample on each number of slots; NEVER if it cannot run.
            self.slow = np.minimum(1 / self.goodputs, NEVER)
            self.fastest = self.slow.min(axis=1)
        self.lazy = np.array([rule.lazy for rule in rules])
        self.reserving = np.array([rule.reserving for rule in rules])
        self.inverse = np.array([rule.inverse for rule in rules])[:, None, None]
        self.exponent = np.array([rule.exponent for rule in rules])[:, None, None]
        self.worst = np.array([rule.worst for rule in rules])[:, None, None]
        self.price = np.array([rule.price for rule in rules])[:, None, None]
        self.inertia = np.array([rule.inertia for rule in rules])[:, None]

    def follow(self) -> WorldsOutcome:
        counts = self.shared() if self.first is None else self.first
        firsts = counts.copy()
        for _ in range(3 * self.left.shape[1] + 2):
            self._advance(counts)
            if not (self.alive.any() or self.coming.any()):
                break
            counts = self.shared()
        # Nothing runs in the first phase if a lazy rule cannot keep all jobs, because tenants need
        # their slots back.
        self.ends[self.alive | (firsts.sum(axis=1) == 0)[:, None]] = np.inf
        late = (self.ends > self.slack).sum(axis=1)
        cost = (self.ends - self.comes * self.there).sum(axis=1) + LATE * late
        return WorldsOutcome(firsts, self.ends, self.starts, cost)

    def shared(self) -> np.ndarray:
        worlds, jobs = self.left.shape
        width = self.goodputs.shape[1]
        most = max(1, int(self.alive.sum(axis=1).max()))
        kept = jobs if self.limited else min(most, HORIZON)
        alone = np.where(self.alive, self.left * self.fastest, np.inf)
        # Running jobs are never left out: a lazy rule keeps them.
        order = np.argsort(np.where(self.held > 0, -1 / (1 + alone), alone), axis=1, kind="stable")
        chosen = np.arange(jobs)[None].repeat(worlds, 0) if kept == jobs else order[:, :kept]
        row = np.arange(worlds)[:, None]
        alive, held = self.alive[row, chosen], self.held[row, chosen]
        left = self.left[row, chosen]
        lost = self.inertia * self.resize[row, chosen]
        seconds = left[:, :, None] * self.slow[chosen] + lost[:, :, None]
        stays = np.arange(width) == held[:, :, None]
        now = left * self.slow[chosen, held] + self.inertia * self.ready[row, chosen]
        seconds = np.where(stays & (held > 0)[:, :, None], now[:, :, None], seconds)
        seconds[:, :, 0] = NEVER
        alone = left * self.fastest[chosen]
        weights = self._weights(np.where(alive, np.maximum(alone, 1e-9), np.nan))
        values = np.where(
            alive[:, :, None], (weights * alone)[:, :, None] / np.maximum(seconds, 1e-12), -np.inf
        )
        values[:, :, 0] = 0.0
        slowdown = seconds / np.maximum(alone, 1e-9)[:, :, None]
        slower = -weights[:, :, None] * (
            np.minimum(slowdown, self.worst) ** self.exponent
            + self.price * np.arange(width) / (width - 1)
        )
        values = np.where(self.inverse & alive[:, :, None], slower, values)
        values[seconds >= NEVER / 1e6] = -np.inf
        none = -1.05 * weights * (self.worst**self.exponent)[:, :, 0]
        values[:, :, 0] = np.where(self.inverse[:, :, 0] & alive, none, 0.0)
        if self.reserving.any():
            slack = self.slack[chosen] - self.now[:, None]
            urgent = np.isfinite(slack) & (slack > 0) & alive & self.reserving[:, None]
            meets = urgent[:, :, None] & (seconds <= slack[:, :, None])
            # Earliest deadline first.
            due = np.argsort(np.argsort(np.where(urgent, slack, np.inf), axis=1), axis=1)
            values = np.where(meets, values + 1e6 * (jobs - due)[:, :, None], values)
        fewer = (np.arange(width) < held[:, :, None]) & self.lazy[:, None, None]
        values[fewer & alive[:, :, None]] = -np.inf
        found, _ = self.share(values)
        counts = np.zeros((worlds, jobs), dtype=np.int64)
        np.put_along_axis(counts, chosen, found, axis=1)
        return counts

    def _weights(self, alone: np.ndarray) -> np.ndarray:
        """Weights of jobs from their run times on all slots; nan marks finished jobs."""
        weights = np.zeros(alone.shape)
        shortest = np.where(np.isnan(alone), np.inf, alone).min(axis=1)
        shortest = np.where(np.isfinite(shortest), shortest, 1.0)
        for world, rule in enumerate(self.rules):
            if rule.power is not None:
                relative = alone[world] / max(shortest[world], 1e-9)
                weights[world] = np.maximum(relative**-rule.power, 1e-6)
                continue
            # The optimal policy for speed-up n^p (Berg et al. 2020, "heSRPT"): with m jobs the i-th
            # longest gets weight ((i/m)^(1/(1-p)) - ((i-1)/m)^(1/(1-p)))^(1-p).
            known = ~np.isnan(alone[world])
            order = np.argsort(-np.where(known, alone[world], -np.inf), kind="stable")
            count = int(known.sum())
            ends = (np.arange(count + 1) / max(1, count)) ** (1 / (1 - rule.speedup))
            weights[world, order[:count]] = np.diff(ends) ** (1 - rule.speedup)
        return np.nan_to_num(weights)

    def _advance(self, counts: np.ndarray) -> None:
        moved = (counts != self.held) & self.alive
        self.ready = np.where(moved & (counts > 0), self.resize, self.ready)
        self.held = np.where(self.alive, counts, 0)
        runs = self.held > 0
        self.starts = np.where(runs, np.minimum(self.starts, self.now[:, None]), self.starts)
        self.resize = np.where(runs, self.resume, self.resize)
        slow = self.slow[np.arange(counts.shape[1])[None], self.held]
        with np.errstate(invalid="ignore"):
            until = np.where(runs, self.ready + self.left * slow, np.inf)
        spent = until.min(axis=1)[:, None]
        if self.coming.any():
            wait = np.where(self.coming, self.comes, np.inf).min(axis=1) - self.now
            spent = np.minimum(spent, np.maximum(wait, 0.0)[:, None])
        spent = np.where(np.isfinite(spent), spent, 0.0)
        ran = np.where(runs, np.maximum(0.0, spent - self.ready), 0.0)
        with np.errstate(invalid="ignore"):
            self.left = np.maximum(0.0, self.left - np.where(runs, ran / slow, 0.0))
        self.ready = np.maximum(0.0, self.ready - spent)
        self.now = self.now + spent[:, 0]
        ended = (until <= spent * (1 + 1e-12)) & runs
        self.ends = np.where(ended, self.now[:, None], self.ends)
        self.alive &= ~ended
        self.held = np.where(ended, 0, self.held)
        came = self.coming & (self.comes <= self.now[:, None] * (1 + 1e-12))
        self.alive, self.coming = self.alive | came, self.coming & ~came


# Samples futures: remaining work of jobs, and arrivals, from the history so far.


LEAST_SEEN = 6  # minimum number of past arrivals before future ones are predicted


class Futures(NamedTuple):
    """Sampled futures of a view."""

    # Current jobs, followed by those of all futures; `left` is [futures, jobs].
    jobs: Jobs
    # Whether a job is in a future, [futures, jobs].
    there: np.ndarray
    # Number of current jobs.
    present: int


def futures_of(view: View, estimator: Estimator, count: int, coming: int, seed: int) -> Futures:
    """Samples `count` futures with remaining work and `coming` arrivals."""
    # Gaps between arrivals are sampled from those seen so far, the first one from those longer than
    # the time since the last arrival; each new job is a copy of a seen one (a bootstrap). Only the
    # past of the trace is used. The same moment always has the same futures.
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
    """Samples seconds until arrivals, [futures, jobs]; empty if too few were seen."""
    times = np.sort([state.job.arrival for state in seen])
    gaps, since = np.diff(times), now - float(times[-1])
    longer = gaps[gaps > since]
    if len(seen) < LEAST_SEEN or not len(longer) or not coming:
        return np.zeros((count, 0))
    first = draw.choice(longer, size=(count, 1)) - since
    rest = draw.choice(gaps, size=(count, coming - 1))
    return np.cumsum(np.concatenate([first, rest], axis=1), axis=1)


def _totals(flat: list[JobState], estimator: Estimator, draw: np.random.Generator) -> np.ndarray:
    return np.array(
        [
            state.job.samples
            if state.job.announced or state.done == state.job.samples
            else state.done + float(estimator.draws(state, 1, draw)[0])
            for state in flat
        ]
    )


# Rollout policy: chooses the allocation with the best simulated future.
#
# Improving the first step of a base policy by simulation is a rollout policy (Bertsekas and
# Castanon 1999, "Rollout algorithms for stochastic scheduling problems").


MOVES = 64  # maximum number of first steps to try per round of moves
ROUNDS = 2  # rounds of moving slots between jobs if no arrivals are expected
MARGIN = 0.003  # minimum relative saving that justifies a change


class Rollout(Policy):
    """Allocates slots for the best predicted future.

    Args:
        estimator: estimates remaining samples of jobs that do not announce them; default: from loss
            curves.
        futures: number of sampled futures.
        coming: number of arrivals in each future; 0 for none.
        seed: seed of the futures.
    """

    name, what = (
        "rollout",
        "rollout: the allocation with the best predicted future, resizes included",
    )

    def __init__(
        self,
        estimator: Estimator | None = None,
        futures: int = 8,
        coming: int = 12,
        seed: int = 0,
    ) -> None:
        self.estimator = estimator or Estimator()
        self.futures, self.coming, self.seed = futures, coming, seed
        self.pollux = Pollux()

    def begin(self, cluster: JobCluster) -> None:
        super().begin(cluster)
        self.estimator.begin()

    def decide(self, view: View) -> Decision:
        # 1. Simulate all rules of `policies.py` to the end of the current jobs, including resizes.
        # 2. With the best rule as the future, try other first steps: keep everything, only use idle
        # slots, move slots between two jobs.
        # 3. Drop a change that saves less than `MARGIN` of the sum over staying (hysteresis).
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
            None if known else view.now + PERIOD,
            _reasons(view, best, stays),
            predicted,
            fluid_bound(list(jobs.left), jobs.goodputs, [0.0] * len(jobs.left), view.cluster.slots),
        )

    def _rules(self, jobs: Jobs) -> tuple[SharingRule, ...]:
        rules = (*RULES, CALM, CALM._replace(lazy=True))
        if np.isfinite(jobs.slack).any():
            rules = (*rules, *(rule._replace(reserving=True) for rule in rules))
        return rules

    def _best_over(self, futures: Futures, jobs: Jobs, view: View) -> tuple[WorldsOutcome, float]:
        """Finds the allocation with the lowest mean cost over sampled futures."""
        share, limited = shares(view), bool(view.cluster.quotas)
        rules = self._rules(jobs)
        calm = CALM._replace(reserving=bool(np.isfinite(jobs.slack).any()))
        # Candidates: each rule's first step, Pollux's and the current allocation; the calm rule's
        # is first.
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
        if cost[best] > cost[0] * (1 - MARGIN):
            best = 0
        alone = Worlds(jobs, (calm,), share, tried[best][None], limited).follow()
        lazy = [float(c) for c, keep in zip(cost, keeps, strict=False) if keep]
        gain = min(lazy) - float(cost[best]) if lazy else 0.0
        return alone, float(alone.cost[0]) + gain

    def _best(self, jobs: Jobs, view: View) -> tuple[WorldsOutcome, float]:
        """Finds the best world without arrivals, and the lowest cost under lazy rules."""
        share, limited = shares(view), bool(view.cluster.quotas)
        rules = self._rules(jobs)
        found = Worlds(jobs, rules, share, None, limited).follow()
        place = int(found.cost.argmin())
        best, rule = _world(found, place), rules[place]
        lazy = np.array([rule.lazy for rule in rules])
        quiet = np.flatnonzero(lazy)[found.cost[lazy].argmin()] if lazy.any() else place
        # The first step of the lazy world, continued with the better rule.
        stays = found.counts[quiet]
        if not self._allowed(stays, view):
            stays = best.counts[0]
        for _ in range(ROUNDS):
            first = np.stack([stays, *self._moved(best.counts[0], jobs, view)])
            again = Worlds(jobs, (rule,) * len(first), share, first, limited).follow()
            if float(again.cost[0]) < float(found.cost[quiet]):
                found.cost[quiet] = again.cost[0]
                found.ends[quiet], found.starts[quiet] = again.ends[0], again.starts[0]
            better = int(again.cost.argmin())
            if again.cost[better] >= best.cost[0] * (1 - 1e-9):
                break
            best = _world(again, better)
        quiet_cost = float(found.cost[quiet])
        same = best.cost[0] > quiet_cost * (1 - MARGIN)
        if self._allowed(found.counts[quiet], view) and same:
            return _world(found, int(quiet)), quiet_cost
        return best, quiet_cost

    def _allowed(self, counts: np.ndarray, view: View) -> bool:
        used: dict[str, int] = {}
        for state, count in zip(view.jobs, counts, strict=True):
            used[state.job.tenant] = used.get(state.job.tenant, 0) + int(count)
        fits = all(count <= view.limits[tenant] for tenant, count in used.items())
        return fits and int(counts.sum()) <= view.cluster.slots

    def _moved(self, counts: np.ndarray, jobs: Jobs, view: View) -> list[np.ndarray]:
        """Returns allocations that move one, half or all of a job's slots to another job."""
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


def _count(given: Allotment | None) -> int:
    return 0 if given is None else given.slots if isinstance(given.slots, int) else len(given.slots)


def _world(found: WorldsOutcome, place: int) -> WorldsOutcome:
    return WorldsOutcome(*(part[place : place + 1] for part in found))


def _reasons(view: View, best: WorldsOutcome, stays: float) -> dict[str, str]:
    why = {}
    gain = stays - float(best.cost[0])
    for place, state in enumerate(view.jobs):
        count, end = int(best.counts[0, place]), float(best.ends[0, place])
        plan = f"expected to end in {end:.4g} s"
        if not count:
            start = float(best.starts[0, place])
            text = f"waits: expected to start in {start:.4g} s and to end in {end:.4g} s"
        elif state.count == 0 or count == state.count:
            text = f"{count} slots: {plan}"
        else:
            text = f"from {state.count} to {count} slots: {plan}"
        if state.count > count and 0 < gain < LATE:
            text += f"; all jobs together end {gain:.4g} s sooner than without taking slots away"
        why[state.job.name] = text
    return why


# Policies by name.


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "fifo": lambda seed: Fifo(),
    "srpt": lambda seed: Srpt(),
    "tiresias": lambda seed: Tiresias(),
    "pollux": lambda seed: Pollux(),
    "rollout": lambda seed: Rollout(seed=seed),
}


def make_policy(name: str, seed: int = 0) -> Policy:
    check_known("policy", name, POLICIES)
    return POLICIES[name](seed)
