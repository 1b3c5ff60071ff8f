"""Samples of a step dealt to groups that follow one another, and to stages of a pipeline.

A sample that needs many ranks would hold them in one group, and every short sample with them. So
where samples need different least degrees, a step of two phases is tried as well: the wide ones,
and all others in groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gulliver.data._step_ends import StepEnds
from gulliver.data._steps import Shape, SolvedStep
from gulliver.solve import BalancedStep, StepSolver, fill_stages, halves

SPLIT = 1.02
"""Seconds over the bound from which samples that need many ranks may get a phase of their own."""


@dataclass(frozen=True)
class Phases:
    """Deals the samples of a step.

    Args:
        solver: seconds of micro-batches.
        least: least degree of each shape.
        ends: seconds at both ends of a step; None: they do not count.
        several: a step may have several phases.
        stages: stages of a pipeline that each rank is.
    """

    solver: StepSolver
    least: Mapping[Shape, int]
    ends: StepEnds | None
    several: bool
    stages: int = 1

    def solved(self, shapes: Mapping[Shape, int]) -> SolvedStep:
        """Deals so many samples of each shape: all in one phase, or wide groups and then others.

        Whatever ends sooner, with the micro-batches that suit stages.
        """
        whole = self.solver.plan_step(shapes)
        best = self._filled((whole,), whole.bound)
        if not self.several or whole.seconds <= SPLIT * whole.bound:
            return best
        for degree in sorted({self.least[shape] for shape in shapes} - {1}):
            wide = {s: n for s, n in shapes.items() if self.least[s] >= degree}
            others = {s: n for s, n in shapes.items() if s not in wide}
            if not others:
                continue
            if self._hopeless(best, self.solver.bound(wide), self.solver.bound(others)):
                continue
            first = self.solver.plan_step(wide)
            if self._hopeless(best, first.seconds, self.solver.bound(others)):
                continue
            for parts in self._orders(first, self.solver.plan_step(others)):
                found = self._filled(parts, whole.bound)
                if self._time(found) < self._time(best):
                    best = found
        return best

    def _filled(self, parts: tuple[BalancedStep, ...], bound: float) -> SolvedStep:
        """A step of these parts, with the micro-batches that suit stages."""
        if self.stages > 1:
            seconds = self.solver.seconds
            parts = tuple(fill_stages(part, seconds, self.stages) for part in parts)
        return SolvedStep(parts, sum(part.seconds for part in parts), bound)

    def _time(self, step: SolvedStep) -> float:
        """Seconds of a step with its ends."""
        return step.seconds + (0.0 if self.ends is None else self.ends.around(step.parts))

    def _hopeless(self, best: SolvedStep, *seconds: float) -> bool:
        """Whether parts of at least so many seconds cannot be shorter, where ends do not count."""
        return self.ends is None and sum(seconds) >= best.seconds * (1 + 1e-9)

    def _orders(
        self, wide: BalancedStep, others: BalancedStep
    ) -> Iterator[tuple[BalancedStep, ...]]:
        """Ways in which two parts of a step may follow one another."""
        yield wide, others
        if self.ends is None:
            return
        yield others, wide
        for early, late in halves(others, self.solver.seconds_of):
            yield early, wide, late
