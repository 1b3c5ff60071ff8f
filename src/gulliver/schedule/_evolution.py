"""The search of ONES: schedules as genomes, crossed, mutated, filled and reordered.

A genome has a gene per slot: the number of its job, or `NOBODY`. Written from Bian et al. 2021,
"Online evolutionary batch size orchestration for scheduling deep learning workloads in GPU
clusters", and its artifact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
