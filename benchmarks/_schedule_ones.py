"""The search of ONES: schedules as genomes, crossed, mutated, filled and reordered.

A genome has a gene per slot: the number of its job, or `NOBODY`. Written from Bian et al. 2021,
"Online evolutionary batch size orchestration for scheduling deep learning workloads in GPU
clusters", and its artifact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gulliver.schedule.jobs import Job, JobCluster
from gulliver.schedule.state import Allotment, Decision, JobState, Policy, View

NOBODY = -1
Genome = list[int]


@dataclass(frozen=True)
class Field:
    """Data of the jobs that the search uses, by number."""

    slots: int
    # Most slots of each job.
    limits: Mapping[int, int]
    # Slots that its user asks for.
    asked: Mapping[int, int]
    # Jobs that have not run yet, in order of arrival.
    new: Sequence[int]
    # Seconds that each job has left at the slots it had last.
    left: Mapping[int, float]
    # Slot-seconds that are left of each job over its slots, by job; empty for jobs that have done
    # less than two epochs, which count nothing.
    cost: Mapping[int, np.ndarray]
    # Jobs that mutation may take out.
    mutable: frozenset[int]


def refreshed(genome: Genome, field: Field) -> Genome:
    """Drops jobs that are gone, and genes beyond a job's limit."""
    counts: Counter[int] = Counter()
    kept = []
    for job in genome:
        keep = job in field.limits and counts[job] < field.limits[job]
        counts[job] += keep
        kept.append(job if keep else NOBODY)
    return kept


def crossed(
    one: Genome, other: Genome, field: Field, draw: np.random.Generator
) -> tuple[Genome, Genome]:
    """Swaps each gene with probability a half; a gene whose job is at its limit is dropped."""
    swap = draw.random(len(one)) < 0.5
    first = [b if s else a for a, b, s in zip(one, other, swap, strict=True)]
    second = [a if s else b for a, b, s in zip(one, other, swap, strict=True)]
    return refreshed(first, field), refreshed(second, field)


def mutated(genome: Genome, field: Field, rate: float, draw: np.random.Generator) -> Genome:
    """Takes each job that may be out of it with probability `rate`."""
    there = sorted({job for job in genome if job in field.mutable})
    out = {job for job, chance in zip(there, draw.random(len(there)), strict=True) if chance < rate}
    return [NOBODY if job in out else job for job in genome]


def filled(genome: Genome, field: Field) -> Genome:
    """Gives idle slots away: one to each new job, then to waiting jobs, then to all, to limits."""
    genome = list(genome)
    idle = [slot for slot, job in enumerate(genome) if job == NOBODY][::-1]
    counts = Counter(genome)

    def give(job: int, most: int) -> None:
        while idle and counts[job] < most:
            genome[idle.pop()] = job
            counts[job] += 1

    for job in field.new:
        give(job, 1)
    executed = sorted(field.left, key=lambda job: (field.left[job], job))
    for job in executed:
        if not counts[job]:
            give(job, min(field.limits[job], 4 * field.asked[job]))
    for job in executed:
        give(job, field.limits[job])
    return genome


def score(genome: Genome, field: Field) -> float:
    """Sums the slot-seconds that the placed jobs have left; less is better."""
    counts = Counter(genome)
    return sum(float(cost[counts[job]]) for job, cost in field.cost.items() if counts[job])


def evolved(
    population: list[Genome], field: Field, size: int, rate: float, draw: np.random.Generator
) -> list[Genome]:
    """Makes the next population: `size` of the refreshed, crossed and mutated ones."""
    parents = [refreshed(genome, field) for genome in population] or [[NOBODY] * field.slots]
    children = list(parents)
    for _ in range(size // 2):
        one, other = draw.integers(len(parents), size=2)
        children += crossed(parents[one], parents[other], field, draw)
    for number in range(size):
        children.append(mutated(parents[number % len(parents)], field, rate, draw))
    children = [filled(genome, field) for genome in children]
    unseen = tuple(field.new)

    def fitness(genome: Genome) -> tuple[int, float]:
        # New jobs count nothing, and are placed first.
        there = set(genome)
        return -sum(job in there for job in unseen), score(genome, field)

    return sorted(children, key=fitness)[:size]


def reordered(genome: Genome, present: Genome) -> Genome:
    """Lays a genome's jobs out contiguously so that few genes differ from the present ones."""
    # f[i][k] is the fewest changed genes of the first i slots with k jobs on them: slot i is empty,
    # or a job that is not yet there ends at it. One best prefix is kept for each i and k, so it is
    # approximate, as published.
    counts = Counter(job for job in genome if job != NOBODY)
    jobs, slots = sorted(counts), len(genome)
    same = {job: np.cumsum([0, *(here == job for here in present)]) for job in jobs}
    best: list[dict[int, tuple[int, int, tuple[int, ...], tuple[int, ...]]]] = [{0: (0, 0, (), ())}]
    for end in range(1, slots + 1):
        here = dict(best[end - 1])
        for job in jobs:
            begin = end - counts[job]
            if begin < 0:
                continue
            changed = counts[job] - int(same[job][end] - same[job][begin])
            for k, (cost, used, order, starts) in best[begin].items():
                if used >> job & 1:
                    continue
                known = here.get(k + 1)
                if known is None or cost + changed < known[0]:
                    here[k + 1] = (cost + changed, used | 1 << job, (*order, job), (*starts, begin))
        best.append(here)
    if len(jobs) not in best[slots]:
        return genome
    _, _, order, starts = best[slots][len(jobs)]
    laid = [NOBODY] * slots
    for job, begin in zip(order, starts, strict=True):
        laid[begin : begin + counts[job]] = [job] * counts[job]
    return laid


# Progress of a job as a Beta distribution, learned from finished jobs: a the epochs done, b = 1 +
# relu(network of five features).


EPOCHS, BATCH, ROWS, RATE, DECAY, WIDTH = 60, 8, 2000, 1e-4, 1e-4, 64
FIRST_LOSS = 5.0


def features(state: JobState, epochs: float) -> list[float]:
    """Returns the five features of a job after some epochs."""
    # They are the log of the epoch's samples, the first loss, epochs, the share that the loss has
    # fallen by, and the accuracy; loss and accuracy follow the job's curvature.
    job = state.job
    progress = epochs * job.epoch_samples / job.samples
    fallen = 1 - math.exp(-job.curvature * progress)
    accuracy = fallen / (1 - math.exp(-job.curvature))
    return [math.log(job.epoch_samples), FIRST_LOSS, epochs, fallen, accuracy]


def beta_slopes(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Gradient of the mean negative log-likelihood of Beta(a, b) by the network's weights."""
    import torch

    hidden, bias, last, end = weights
    layer = np.tanh(x @ hidden + bias)
    out = layer @ last + end
    b = 1 + np.maximum(out, 0)
    # d/db of -log Beta(y; a, b) = -log(1 - y) + digamma(b) - digamma(a + b).
    both = torch.digamma(torch.from_numpy(np.stack([b, np.maximum(x[:, 2], 1e-3) + b]))).numpy()
    slope = (-np.log1p(-y) + both[0] - both[1]) * (out > 0) / len(x)
    inner = (slope[:, None] * last) * (1 - layer * layer)
    return [x.T @ inner, inner.sum(axis=0), slope @ layer, slope.sum(keepdims=True)]


class ProgressPredictor:
    """Learns how far jobs are."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.trained, self.next_size = seed, False, 1
        self.weights: list[np.ndarray] = []

    def learn(self, finished: Sequence[JobState]) -> None:
        """Trains when the number of finished jobs has doubled since."""
        # The paper trains again after every job that ends; after the 1st, 2nd, 4th, 8th ... is what
        # a simulation can afford. The artifact also queries the network in another unit than it was
        # trained on; here both are epochs.
        known = [state for state in finished if not state.job.announced]
        if len(known) < self.next_size:
            return
        self.next_size = 2 * len(known)
        rows, targets = [], []
        for state in known:
            total = state.job.samples / state.job.epoch_samples
            for epoch in range(1, max(2, math.ceil(total))):
                rows.append(features(state, min(epoch, 0.999 * total)))
                targets.append(min(epoch / total, 0.999))
        self._train(np.array(rows[-ROWS:]), np.array(targets[-ROWS:]))
        self.trained = True

    def _train(self, x: np.ndarray, y: np.ndarray) -> None:
        """Maximises the likelihood of `y`, [rows], given `x`, [rows, 5]."""
        draw = np.random.default_rng(self.seed)
        hidden = draw.standard_normal((5, WIDTH)) / math.sqrt(5)
        last = draw.standard_normal(WIDTH) / math.sqrt(WIDTH)
        weights = [hidden, np.zeros(WIDTH), last, np.ones(1)]
        moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
        step = 0
        for _ in range(EPOCHS):
            order = draw.permutation(len(x))
            for start in range(0, len(x), BATCH):
                chosen, step = order[start : start + BATCH], step + 1
                slopes = beta_slopes(weights, x[chosen], y[chosen])
                for weight, slope, (mean, square) in zip(weights, slopes, moments, strict=True):
                    slope += DECAY * weight
                    mean += 0.1 * (slope - mean)
                    square += 0.001 * (slope * slope - square)
                    root = np.sqrt(square / (1 - 0.999**step)) + 1e-8
                    weight -= RATE / (1 - 0.9**step) * mean / root
        self.weights = weights

    def beta(self, state: JobState) -> tuple[float, float]:
        """Returns a and b of a job's progress; a job must have done an epoch."""
        a = max(state.epochs, 1e-3)
        if not self.trained:
            return a, 1.0 + a
        hidden, bias, last, end = self.weights
        seen = np.array(features(state, state.epochs))
        out = float((np.tanh(seen @ hidden + bias) @ last + end)[0])
        return a, 1.0 + max(0.0, out)


# ONES as published: batch sizes grow with the slots, chosen by an evolutionary search.


Progress = Literal["sample", "perfect", "off"]


class Ones(Policy):
    """Searches schedules by evolution, once in a while and at every event.

    Args:
        period: seconds between searches; published 1.
        population: genomes that are kept.
        rate: probability that mutation takes a job out.
        progress: remaining work from one draw of the predicted Beta, as published, from the truth,
            or ``off``: as much again as is done.
        evolve: search; otherwise the greedy fill alone.
        seed: seed of the search and of the predictor.
    """

    name, what = "ones", "ONES as published: evolution over slots, batch sizes grow with them"

    def __init__(
        self,
        period: float = 1.0,
        population: int = 16,
        rate: float = 0.3,
        progress: Progress = "sample",
        evolve: bool = True,
        seed: int = 0,
    ) -> None:
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
        if self.progress == "sample":
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
        if self.progress == "off":
            return state.done
        a, b = self.predictor.beta(state)
        rho = float(np.clip(self.draw.beta(a, b), 1e-3, 1.0))
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
