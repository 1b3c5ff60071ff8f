"""Peers that only this benchmark runs: Pollux as published, and a search that knows all arrivals.

`clairvoyant` gives each job a factor of its weight in a rule of sharing, and searches these factors
at random over the whole trace. What it finds is a schedule that can be run, so it says what some
schedule does, where a bound says what none can do; it is no proof that nothing is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gulliver.schedule import Job, JobCluster
from gulliver.schedule.classic import Pollux
from gulliver.schedule.policies import CALM, RULES, Jobs, SharingRule, Worlds, useful_goodputs
from gulliver.schedule.state import Decision, View
from gulliver.solve.allocation import allocate

INERTIAS = (1.0, 2.0, 4.0)  # How much resizes count in the rules that the search may begin with


def clairvoyant(
    trace: Sequence[Job], cluster: JobCluster, rounds: int = 150, tries: int = 32, seed: int = 0
) -> float:
    """Returns the mean completion time in seconds of the best schedule that was found."""
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


Start = tuple[float, SharingRule, np.ndarray]


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


def _costs(jobs: Jobs, rules: tuple[SharingRule, ...], boosts: np.ndarray) -> np.ndarray:
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


class PolluxInRounds(Pollux):
    """Shares slots as `Pollux` does, but in rounds only, and by its genetic search.

    Who comes waits for the next round, and what is set free stays idle until then. In a round a
    population of allocations is mutated (each number with probability 1 / jobs, to any other),
    crossed job by job with one chosen by tournament, repaired where there are not so many slots,
    and the best are kept (Qiao et al. 2021, "Pollux", section 4.2.1; 100 allocations, 100
    generations). It begins from what jobs hold; the published one from its last population.
    """

    name, what = "pollux-rounds", "pollux as published: rounds of 60 s, and a genetic search"
    knows_quotas = False

    def __init__(
        self,
        period: float = 60.0,
        population: int = 100,
        generations: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__(period)
        self.population, self.generations, self.seed = population, generations, seed
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
