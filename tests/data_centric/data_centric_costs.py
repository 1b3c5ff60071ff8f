"""Costs of samples whose shapes are numbers of tokens, for plans that need no measurement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gulliver.hardware import TableCosts


def line_costs(
    cost: Callable[[int], float],
    memory: float,
    fixed: float = 0.0,
    lost: float = 0.05,
    allowed: Sequence[int] = (1,),
    shapes: Iterable[int] = range(1, 513),
) -> TableCosts:
    """Costs that grow in proportion to the samples of a micro-batch."""
    return TableCosts.from_functions(shapes, cost, lambda n: n, memory, fixed, lost, allowed)
