"""Samples of a step dealt to groups that follow one another, and to stages of a pipeline.

A sample that needs many ranks would hold them in one group, and every short sample with them. So
where samples need different least degrees, a step of two phases is tried as well: the wide ones,
and all others in groups of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gulliver.data._step_ends import StepEnds
from gulliver.data._steps import Shape, SolvedStep
from gulliver.solve import BalancedStep, StepSolver, fill_stages, halves

REMEMBERED = 4096
"""Steps whose phases are kept: the same come again."""
SPLIT = 1.02
"""Seconds over the bound from which samples that need many ranks may get a phase of their own."""


class Phases:
    """Deals the samples of a step."""

    def __init__(
        self,
        solver: StepSolver,
        least: Mapping[Shape, int],
        ends: StepEnds | None,
        several: bool,
        stages: int = 1,
    ) -> None:
        self._solver, self._least, self._ends = solver, least, ends
        self._several, self._stages = several, stages
        self._known: dict[frozenset[tuple[Shape, int]], tuple[dict[Shape, int], ...]] = {}

    def forget(self) -> None:
        """Forgets which phases steps have: costs have changed."""
        self._known.clear()

    def solved(self, shapes: Mapping[Shape, int]) -> SolvedStep:
        """Deals so many samples of each shape: all in one phase, or wide groups and then others."""
        # Whatever ends sooner, with the micro-batches that suit stages.
        if self._ends is not None or self._stages > 1:
            return self._compared(shapes)
        # Kept as counts: thousands of whole plans would be looked through by the garbage collector.
        key = frozenset(shapes.items())
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = self._shortest(shapes)
        parts = tuple(self._solver.plan_step(part) for part in self._known[key])
        bound = parts[0].bound if len(parts) == 1 else self._solver.step_times(shapes)[1]
        return self._filled(parts, bound)

    def _cuts(self, shapes: Mapping[Shape, int]) -> Iterator[tuple[dict[Shape, int], ...]]:
        """Ways to part wide samples from others."""
        for degree in sorted({self._least[shape] for shape in shapes} - {1}):
            wide = {s: n for s, n in shapes.items() if self._least[s] >= degree}
            others = {s: n for s, n in shapes.items() if s not in wide}
            if others:
                yield wide, others

    def _shortest(self, shapes: Mapping[Shape, int]) -> tuple[dict[Shape, int], ...]:
        """The samples of each phase, where nothing but micro-batches counts: no groups are made."""
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
        """The phases, in the order, that end soonest with stages and both ends of the step."""
        solver = self._solver
        whole = solver.plan_step(shapes)
        best = self._filled((whole,), whole.bound)
        if not self._several or whole.seconds <= SPLIT * whole.bound:
            return best
        for wide, others in self._cuts(shapes):
            if self._hopeless(best, solver.bound(wide), solver.bound(others)):
                continue
            first = solver.plan_step(wide)
            if self._hopeless(best, first.seconds, solver.bound(others)):
                continue
            for parts in self._orders(first, solver.plan_step(others)):
                found = self._filled(parts, whole.bound)
                if self._time(found) < self._time(best):
                    best = found
        return best

    def _filled(self, parts: tuple[BalancedStep, ...], bound: float) -> SolvedStep:
        """A step of these parts, with the micro-batches that suit stages."""
        if self._stages > 1:
            seconds = self._solver.seconds
            parts = tuple(fill_stages(part, seconds, self._stages) for part in parts)
        return SolvedStep(parts, sum(part.seconds for part in parts), bound)

    def _time(self, step: SolvedStep) -> float:
        """Seconds of a step with its ends."""
        return step.seconds + (0.0 if self._ends is None else self._ends.around(step.parts))

    def _hopeless(self, best: SolvedStep, *seconds: float) -> bool:
        """Whether parts of at least so many seconds cannot be shorter, where ends do not count."""
        return self._ends is None and sum(seconds) >= best.seconds * (1 + 1e-9)

    def _orders(
        self, wide: BalancedStep, others: BalancedStep
    ) -> Iterator[tuple[BalancedStep, ...]]:
        """Ways in which two parts of a step may follow one another."""
        yield wide, others
        if self._ends is None:
            return
        yield others, wide
        for early, late in halves(others, self._solver.seconds_of):
            yield early, wide, late
