"""Describes planned steps: groups of ranks and their micro-batches.

A `StepPlan` lists which ranks share samples in a step, and which micro-batches each group runs. It
is plain data, equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from gulliver.hardware.batch_costs import BatchCosts
from gulliver.solve.steps import BalancedStep, StepSolver, fill_stages

Shape = Hashable
"""Size of a sample, such as ``480p/51`` or a `SampleShape`; equal shapes share batches."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one shape that a group of ranks runs together."""

    # Shape of all samples.
    shape: Shape
    # Indices of the samples in the dataset.
    samples: tuple[int, ...]
    # Number of blocks that backward recomputes; 0: all activations are kept.
    recompute: int = 0
    # Recomputed blocks of each kind, in the order of the costs' kinds.
    kinds: tuple[int, ...] = ()
    # Predicted seconds of forward and backward, including communication.
    seconds: float = 0.0
    # Of these, seconds of messages inside the group.
    communication: float = 0.0
    # Of these, seconds of recomputed forwards.
    recomputing: float = 0.0
    # Predicted peak bytes of a rank.
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that share the sequence of every sample, and their micro-batches in order."""

    # Adjacent data ranks in ascending order; their number is the sequence degree.
    ranks: tuple[int, ...]
    # Their micro-batches; empty if they have no work in this step.
    micro_batches: tuple[MicroBatch, ...] = ()
    # Additional predicted seconds in which pipeline stages fill and drain.
    filling: float = 0.0

    @property
    def degree(self) -> int:
        return len(self.ranks)

    @property
    def seconds(self) -> float:
        return sum(batch.seconds for batch in self.micro_batches) + self.filling

    @property
    def samples(self) -> int:
        return sum(len(batch.samples) for batch in self.micro_batches)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step of all data-parallel ranks."""

    # Number of the step, over all epochs.
    step: int
    # Epoch of its samples.
    epoch: int
    # Groups that partition the data ranks at the start of the step.
    groups: tuple[RankGroup, ...]
    # Predicted seconds until the last group ends.
    seconds: float
    # Lower bound on the seconds of any plan of these samples on these ranks.
    bound: float
    # Samples that were drawn for this step but are deferred to the next one.
    set_aside: tuple[int, ...] = ()
    # Later groups of the same ranks, such as single ranks after a sample that needs all of them. A
    # rank continues when its own group has ended.
    later: tuple[tuple[RankGroup, ...], ...] = ()

    @property
    def phases(self) -> tuple[tuple[RankGroup, ...], ...]:
        """Groups by consecutive phase; the groups of each phase partition the ranks."""
        return (self.groups, *self.later)

    @property
    def all_groups(self) -> tuple[RankGroup, ...]:
        return tuple(group for phase in self.phases for group in phase)

    @property
    def samples(self) -> int:
        """Number of samples over all groups, by which gradients are divided."""
        return sum(group.samples for group in self.all_groups)

    @property
    def ranks(self) -> int:
        return sum(group.degree for group in self.groups)

    @property
    def gap(self) -> float:
        """Relative gap between the prediction and the lower bound."""
        return self.seconds / self.bound - 1 if self.bound else 0.0

    @property
    def imbalance(self) -> float:
        """Share of the ranks' time spent waiting for the last group."""
        if not self.seconds:
            return 0.0
        busy = sum(group.degree * group.seconds for group in self.all_groups)
        return max(0.0, 1 - busy / (self.ranks * self.seconds))

    def groups_of(self, rank: int) -> tuple[RankGroup, ...]:
        return tuple(group for group in self.all_groups if rank in group.ranks)

    def __iter__(self) -> Iterator[tuple[RankGroup, MicroBatch]]:
        for group in self.all_groups:
            for batch in group.micro_batches:
                yield group, batch


Facts = tuple[int, tuple[int, ...], float, float, float, int]


def facts_of(row: BatchCosts, factor: float) -> list[Facts]:
    """Fields of a `MicroBatch` without its samples, for every batch size."""
    again = row.recomputed
    parts = row.seconds, row.communication, row.recomputing
    seconds = ((factor * part).tolist() for part in parts)
    held = np.ceil(row.bytes).astype(np.int64).tolist()
    counts = again.sum(axis=1).tolist(), [tuple(kinds) for kinds in again.tolist()]
    return list(zip(*counts, *seconds, held, strict=True))


@dataclass(frozen=True, slots=True)
class SolvedStep:
    """Consecutive parts of a step, their total seconds, and a lower bound on these."""

    parts: tuple[BalancedStep, ...]
    seconds: float
    bound: float


def place(
    solved: BalancedStep,
    members: dict[Shape, list[int]],
    facts: Mapping[tuple[Shape, int], list[Facts]],
    ranks: int,
) -> tuple[RankGroup, ...]:
    """Assigns ranks and samples to groups, widest groups first."""
    first, groups = 0, []
    for work in solved.groups:
        batches = []
        for shape, sizes in work.pieces:
            known, waiting = facts[shape, work.degree], members[shape]
            start = 0
            for size in sizes:
                samples = tuple(waiting[start : start + size])
                start += size
                batches.append(MicroBatch(shape, samples, *known[size - 1]))
            del waiting[:start]
        ranks_of = tuple(range(first, first + work.degree))
        groups.append(RankGroup(ranks_of, tuple(batches), work.filling))
        first += work.degree
    groups += [RankGroup((rank,)) for rank in range(first, ranks)]
    return tuple(groups)


# Distributes the samples of a step over phases and pipeline stages.
#
# A sample that needs many ranks would keep them in one group, for all short samples too. So if
# samples have different minimum degrees, a step of two phases is also tried: first the wide
# samples, then all others in their own groups.


REMEMBERED = 4096  # number of cached phase solutions, because the same steps recur
SPLIT = 1.02  # ratio of time to bound above which wide samples may get a separate phase


class Phases:
    """Assigns the samples of a step to phases."""

    def __init__(
        self,
        solver: StepSolver,
        least: Mapping[Shape, int],
        several: bool,
        stages: int = 1,
    ) -> None:
        self._solver, self._least = solver, least
        self._several, self._stages = several, stages
        self._known: dict[frozenset[tuple[Shape, int]], tuple[dict[Shape, int], ...]] = {}

    def forget(self) -> None:
        self._known.clear()

    def solved(self, shapes: Mapping[Shape, int]) -> SolvedStep:
        """Assigns samples by shape: all in one phase, or wide groups first."""
        if self._stages > 1:
            return self._compared(shapes)
        # Kept as counts: the garbage collector would traverse thousands of full plans.
        key = frozenset(shapes.items())
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = self._shortest(shapes)
        parts = tuple(self._solver.plan_step(part) for part in self._known[key])
        bound = parts[0].bound if len(parts) == 1 else self._solver.step_times(shapes)[1]
        return self._filled(parts, bound)

    def _cuts(self, shapes: Mapping[Shape, int]) -> Iterator[tuple[dict[Shape, int], ...]]:
        """Yields ways to separate wide samples from the others."""
        for degree in sorted({self._least[shape] for shape in shapes} - {1}):
            wide = {s: n for s, n in shapes.items() if self._least[s] >= degree}
            others = {s: n for s, n in shapes.items() if s not in wide}
            if others:
                yield wide, others

    def _shortest(self, shapes: Mapping[Shape, int]) -> tuple[dict[Shape, int], ...]:
        """Chooses the samples of each phase by time, before micro-batches are adapted to stages."""
        solver = self._solver
        best: tuple[dict[Shape, int], ...] = (dict(shapes),)
        seconds, bound = solver.step_times(shapes)
        if not self._several or seconds <= SPLIT * bound:
            return best
        for wide, others in self._cuts(shapes):
            most, least = seconds * (1 + 1e-9), solver.bound(others)
            if solver.bound(wide) + least >= most or solver.step_times(wide)[0] + least >= most:
                continue
            found = solver.step_times(wide)[0] + solver.step_times(others)[0]
            if found < seconds:
                best, seconds = (wide, others), found
        return best

    def _compared(self, shapes: Mapping[Shape, int]) -> SolvedStep:
        """Returns the fastest phases with micro-batches that suit the stages."""
        solver = self._solver
        whole = solver.plan_step(shapes)
        best = self._filled((whole,), whole.bound)
        if not self._several or whole.seconds <= SPLIT * whole.bound:
            return best
        for wide, others in self._cuts(shapes):
            if self._cannot_improve(best, solver.bound(wide), solver.bound(others)):
                continue
            first = solver.plan_step(wide)
            if self._cannot_improve(best, first.seconds, solver.bound(others)):
                continue
            found = self._filled((first, solver.plan_step(others)), whole.bound)
            if found.seconds < best.seconds:
                best = found
        return best

    def _filled(self, parts: tuple[BalancedStep, ...], bound: float) -> SolvedStep:
        """Splits the samples of each part into micro-batches that suit the stages."""
        if self._stages > 1:
            seconds = self._solver.seconds
            parts = tuple(fill_stages(part, seconds, self._stages) for part in parts)
        return SolvedStep(parts, sum(part.seconds for part in parts), bound)

    def _cannot_improve(self, best: SolvedStep, *seconds: float) -> bool:
        """Whether parts with these lower bounds on their seconds cannot be faster than `best`."""
        return sum(seconds) >= best.seconds * (1 + 1e-9)
