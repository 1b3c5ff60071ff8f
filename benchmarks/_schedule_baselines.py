"""Peers that only this benchmark runs: Pollux as published, and Optimus."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gulliver.schedule import JobCluster
from gulliver.schedule.classic import Pollux
from gulliver.schedule.estimates import Estimator
from gulliver.schedule.state import Allotment, Decision, FreeSlots, JobState, Policy, View


class PolluxInRounds(Pollux):
    """Shares slots as `Pollux` does, but in rounds only, and by its genetic search.

    Who comes waits for the next round, and what is set free stays idle until then. In a round a
    population of allocations is mutated (each number with probability 1 / jobs, to any other),
    crossed job by job with one chosen by tournament, repaired where there are not so many slots,
    and the best are kept (Qiao et al. 2021, "Pollux", section 4.2.1; 100 allocations, 100
    generations). It begins from what jobs hold; the published one from its last population.
    """

    name, what = "pollux-rounds", "pollux as published: rounds of 60 s, and a genetic search"

    def __init__(
        self, period: float = 60.0, population: int = 100, generations: int = 100, seed: int = 0
    ) -> None:
        super().__init__()
        self.period, self.population = period, population
        self.generations, self.seed = generations, seed
        self.next = 0.0

    def begin(self, cluster: JobCluster) -> None:
        """Forgets everything."""
        super().begin(cluster)
        self.draw, self.next = np.random.default_rng(self.seed), 0.0

    def decide(self, view: View) -> Decision:
        """Searches if a round is due; until then everything stays."""
        held = np.array([state.count for state in view.jobs])
        if view.now < self.next:
            return replace(self._decision(view, held), wake=self.next)
        self.next = view.now + self.period
        return self._decision(view, self._search(self.fitness(view), held))

    def _search(self, values: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Returns the best counts found, [jobs]."""
        jobs, width = values.shape
        slots, row = width - 1, np.arange(jobs)
        most = (values > -np.inf).cumsum(axis=1).argmax(axis=1)
        found = np.tile(held, (self.population, 1))
        for _ in range(self.generations):
            scores = values[row, found].sum(axis=1)
            rivals = self.draw.integers(len(found), size=(2, len(found)))
            mates = found[np.where(scores[rivals[0]] > scores[rivals[1]], *rivals)]
            children = np.where(self.draw.random(found.shape) < 0.5, found, mates)
            changed = self.draw.random(found.shape) < 1 / jobs
            children = np.where(changed, self.draw.integers(width, size=found.shape), children)
            every = np.concatenate([found, self._repaired(np.minimum(children, most), slots)])
            order = np.argsort(-values[row, every].sum(axis=1), kind="stable")
            found = every[order[: self.population]]
        return found[0]

    def _repaired(self, counts: np.ndarray, slots: int) -> np.ndarray:
        """Takes slots away from jobs that come last in an order drawn for each allocation."""
        order = self.draw.random(counts.shape).argsort(axis=1)
        fits = np.minimum(np.take_along_axis(counts, order, axis=1).cumsum(axis=1), slots)
        repaired = np.empty_like(counts)
        np.put_along_axis(repaired, order, np.diff(fits, axis=1, prepend=0), axis=1)
        return repaired


class Optimus(Policy):
    """Gives slots one by one where they shorten a job's remaining time most."""

    # The marginal greedy of Peng et al. 2018, "Optimus", with its remaining times from `estimator`
    # in place of its fit of loss curves. Jobs keep their own batch size, as there. Every job starts
    # with one slot, in order of arrival.

    name, what = "optimus", "slots where they shorten a job most, one by one; batch sizes as given"

    def __init__(self, estimator: Estimator | None = None, period: float = 60.0) -> None:
        self.estimator, self.period = estimator or Estimator(), period

    def decide(self, view: View) -> Decision:
        """Runs the greedy."""
        self.estimator.learn(view.finished)
        room, counts = FreeSlots(view), dict[str, int]()
        curves = {s.job.name: self._remaining(s, view) for s in view.jobs}
        for state in view.jobs:
            if room.fits(state.job, 1):
                room.take(state.job, 1)
                counts[state.job.name] = 1
        growing = {s.job.name: s.job for s in view.jobs if s.job.name in counts}

        def gain(name: str) -> float:
            if not room.fits(growing[name], 1):
                return 0.0
            curve, count = curves[name], counts[name]
            return curve[count] - curve[count + 1] if count + 1 < len(curve) else 0.0

        while growing:
            best = max(growing, key=gain)
            if gain(best) <= 0:
                break
            room.take(growing[best], 1)
            counts[best] += 1
        given = {n: Allotment(count, growing[n].batch) for n, count in counts.items()}
        return Decision(given, view.now + self.period)

    def _remaining(self, state: JobState, view: View) -> list[float]:
        """Remaining seconds on 0, 1, 2 ... slots, without restarts as in the paper."""
        job, left = state.job, self.estimator.remaining(state)
        most = min(job.most_slots or view.cluster.slots, view.cluster.slots)
        return [np.inf, *(left / job.goodput(n, job.batch) for n in range(1, most + 1))]
