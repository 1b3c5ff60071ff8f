"""ONES as published: batch sizes grow with the slots, chosen by an evolutionary search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from gulliver.errors import GulliverError, nearest
from gulliver.schedule._evolution import NOBODY, Field, Genome, evolved, filled, reordered
from gulliver.schedule._jobs import Job, JobCluster
from gulliver.schedule._predictor import ProgressPredictor
from gulliver.schedule._state import Allotment, Decision, JobState, Policy, View

Progress = Literal["sample", "mean", "perfect", "off"]


class Ones(Policy):
    """Searches schedules by evolution, once in a while and at every event.

    Args:
        period: seconds between searches; published 1.
        population: genomes that are kept.
        rate: probability that mutation takes a job out.
        progress: remaining work from one draw of the predicted Beta, as published, from its mean,
            from the truth, or ``off``: as much again as is done.
        evolve: search; otherwise the greedy fill alone.
        seed: seed of the search and of the predictor.

    Raises:
        GulliverError: an unknown kind of progress.
    """

    name, what = "ones", "ONES as published: evolution over slots, batch sizes grow with them"
    knows_quotas = False

    def __init__(
        self,
        period: float = 1.0,
        population: int = 16,
        rate: float = 0.3,
        progress: Progress = "sample",
        evolve: bool = True,
        seed: int = 0,
    ) -> None:
        if progress not in get_args(Progress):
            known = get_args(Progress)
            raise GulliverError(f"unknown progress {progress!r}: {nearest(progress, known)}")
        self.period, self.population, self.rate = period, population, rate
        self.progress, self.evolve, self.seed = progress, evolve, seed

    def begin(self, cluster: JobCluster) -> None:
        """Resets the policy for a new simulation."""
        super().begin(cluster)
        self.draw = np.random.default_rng(self.seed)
        self.predictor = ProgressPredictor(self.seed)
        self.numbers: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        self.speeds: dict[str, dict[int, float]] = {}
        self.genomes: list[Genome] = []
        self.was_running: set[str] = set()
        self.scaled: dict[str, tuple[int, float]] = {}

    def decide(self, view: View) -> Decision:
        """Learns, moves the limits, searches, and applies what passes the gate."""
        if self.progress in ("sample", "mean"):
            self.predictor.learn(view.finished)
        names = [state.job.name for state in view.jobs]
        # Small numbers, so that sets of jobs fit into the bits of one.
        used = {self.numbers[name] for name in names if name in self.numbers}
        free = iter(n for n in range(len(names) + len(used) + 1) if n not in used)
        renamed = {name: self.numbers.get(name, NOBODY) for name in names}
        fresh = {name: next(free) for name, number in renamed.items() if number == NOBODY}
        gone = set(self.numbers.values()) - used
        self.genomes = [[NOBODY if j in gone else j for j in genome] for genome in self.genomes]
        self.numbers = {**{n: k for n, k in renamed.items() if k != NOBODY}, **fresh}
        self._measure(view)
        self._move_limits(view)
        field = self._field(view)
        if self.evolve:
            self.genomes = evolved(self.genomes, field, self.population, self.rate, self.draw)
            best = self.genomes[0]
        else:
            best = filled([NOBODY] * view.cluster.slots, field)
        present = self._present(view)
        chosen = self._gated(reordered(best, present), present, view)
        self.was_running = {state.job.name for state in view.jobs if state.slots}
        return Decision(self._allotments(chosen, view), view.now + self.period)

    def _measure(self, view: View) -> None:
        """Notes the throughput at the slots that jobs have run on."""
        for state in view.jobs:
            if state.slots and view.now > state.ready:
                speed = state.job.scaling.throughput(state.count, state.batch)
                self.speeds.setdefault(state.job.name, {})[state.count] = speed

    def _move_limits(self, view: View) -> None:
        """Doubles the limits of jobs that have used theirs; halves those of one that waits."""
        slots = view.cluster.slots
        running = [state for state in view.jobs if state.slots]
        times = [view.now - s.started for s in view.jobs if s.started is not None]
        median = float(np.median(times)) if times else 0.0
        largest = max(running, key=lambda s: s.count, default=None)
        for state in view.jobs:
            name = state.job.name
            limit = self.limits.setdefault(name, 1)
            count, since = self.scaled.get(name, (0, 0.0))
            if count != state.count:
                # A move to other slots is no scaling: epochs go on counting.
                count, since = self.scaled[name] = (state.count, state.epochs - state.epochs_since)
            if state.slots and state.count >= limit and state.epochs - since >= 2:
                limit = min(slots, 2 * limit)
            elif not state.slots and name in self.was_running:
                limit = max(1, limit // 2)
            self.limits[name] = min(limit, state.job.most_slots or limit)
        if largest is None or largest.count < slots / 2 or median <= 0:
            return
        lasted = view.now - (largest.started or 0.0)
        waiting = any(not state.slots for state in view.jobs)
        if lasted > median and waiting:
            limit = max(int(2 * largest.count / (lasted / median + 1)), 1)
            self.limits[largest.job.name] = min(slots, limit + limit % 2)

    def _left(self, state: JobState) -> float:
        """Samples that a job has left, by the predictor."""
        if self.progress == "perfect":
            return state.job.samples - state.done
        a, b = self.predictor.beta(state) if self.progress != "off" else (1.0, 1.0)
        if self.progress == "sample":
            rho = float(np.clip(self.draw.beta(a, b), 1e-3, 1.0))
        else:
            rho = a / (a + b)
        return state.done * (1 / rho - 1)

    def _speed(self, state: JobState) -> np.ndarray:
        """Throughput over slots: linear between what was measured, and beyond."""
        slots = np.arange(self.slots + 1)
        known = self.speeds.get(state.job.name, {})
        if not known:
            return slots * state.job.scaling.throughput(1, self._batch(state.job, 1))
        counts = sorted(known)
        speeds = np.interp(slots, [0, *counts], [0.0, *(known[count] for count in counts)])
        last = counts[-1]
        return np.where(slots > last, known[last] * slots / last, speeds)

    def _field(self, view: View) -> Field:
        self.slots = view.cluster.slots
        left, cost, new = {}, {}, []
        for state in view.jobs:
            number = self.numbers[state.job.name]
            if state.started is None:
                new.append(number)
                continue
            speeds = self._speed(state)
            samples = self._left(state) if state.epochs >= 2 else 0.0
            left[number] = samples / speeds[max(1, state.count)]
            if state.epochs >= 2:
                counts = np.arange(self.slots + 1)
                with np.errstate(invalid="ignore", divide="ignore"):
                    cost[number] = np.where(counts > 0, samples * counts / speeds, 0.0)
        return Field(
            self.slots,
            {self.numbers[s.job.name]: self.limits[s.job.name] for s in view.jobs},
            {self.numbers[s.job.name]: s.job.slots for s in view.jobs},
            new,
            left,
            cost,
            frozenset(cost),
        )

    def _present(self, view: View) -> Genome:
        present = [NOBODY] * view.cluster.slots
        for state in view.jobs:
            for slot in state.slots:
                present[slot] = self.numbers[state.job.name]
        return present

    def _gated(self, wanted: Genome, present: Genome, view: View) -> Genome:
        """Switches when every job that would be touched has done an epoch; else starts new jobs."""
        for state in view.jobs:
            number = self.numbers[state.job.name]
            if not state.slots or state.epochs_since >= 1:
                continue
            slots = [slot for slot, job in enumerate(wanted) if job == number]
            if slots != sorted(state.slots):
                break
        else:
            return wanted
        present = list(present)
        idle = [slot for slot, job in enumerate(present) if job == NOBODY]
        new = [self.numbers[s.job.name] for s in view.jobs if s.started is None]
        for slot, job in zip(idle, new, strict=False):
            present[slot] = job
        return present

    def _batch(self, job: Job, count: int) -> int:
        """Batch size on so many slots: the local one that its user chose, times them."""
        local = math.ceil(job.batch / job.slots)
        return min(max(job.smallest, local * count), job.largest)

    def _allotments(self, genome: Sequence[int], view: View) -> dict[str, Allotment]:
        counts = Counter(genome)
        given = {}
        for state in view.jobs:
            number = self.numbers[state.job.name]
            if counts[number]:
                slots = tuple(slot for slot, job in enumerate(genome) if job == number)
                slots = state.slots if set(slots) == set(state.slots) else slots
                given[state.job.name] = Allotment(slots, self._batch(state.job, len(slots)))
        return given
