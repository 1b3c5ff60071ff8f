"""Samples of a window put into steps that fill some number of ranks; see `gulliver.solve`.

It knows which number of ranks it arranges for, which need not be the number that runs: which
samples a step has depends on the former alone, so that a run on other ranks has the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gulliver.data._budgets import Budget, Tokens
from gulliver.data._steps import Shape
from gulliver.errors import GulliverError
from gulliver.options import whole_number
from gulliver.solve import StepArranger, StepSolver

WINDOW = 16_384
"""Samples that are looked at ahead by default: the more there are, the better some fit."""


class Arrangement:
    """Chooses which samples of a window make a step."""

    def __init__(
        self,
        ranks: int,
        budget: Budget,
        seconds: Callable[[Shape, int], Mapping[int, np.ndarray]],
    ) -> None:
        if whole_number("arrange", ranks) < 1:
            raise GulliverError(f"arrange={ranks}: give a number of ranks of at least 1")
        if not isinstance(budget, Tokens):
            raise GulliverError(
                f"arrange={ranks} makes steps somewhat larger and smaller than asked for, which "
                f"{budget} forbids: give a budget of Tokens(n)"
            )
        self.ranks, self._budget, self._seconds = ranks, budget, seconds
        self._solver = StepSolver({}, ranks)
        self._tokens: dict[Shape, float] = {}

    def meet(self, shape: Shape, tokens: int) -> None:
        """Takes the costs of a shape."""
        rows = self._seconds(shape, self.ranks)
        if not any(map(len, rows.values())):
            raise GulliverError(
                f"{shape} ({tokens:,} tokens) fits on no group of arrange={self.ranks} ranks: "
                "arrange for more"
            )
        self._solver.add(shape, rows)
        self._tokens[shape] = tokens

    def order(
        self, shapes: Sequence[Shape], draw: np.random.Generator
    ) -> tuple[np.ndarray, list[int]]:
        """Orders waiting samples by step, steps in random order."""
        members: dict[Shape, list[int]] = {}
        for place, shape in enumerate(shapes):
            members.setdefault(shape, []).append(place)
        counts = {shape: len(places) for shape, places in members.items()}
        arranger = StepArranger(self._solver, self._tokens, self._budget.count)
        steps = arranger.arrange(counts)
        taken = dict.fromkeys(members, 0)
        order, cuts = [], []
        for number in draw.permutation(len(steps)).tolist():
            cuts.append(sum(steps[number].values()))
            for shape, count in steps[number].items():
                start = taken[shape]
                order += members[shape][start : start + count]
                taken[shape] = start + count
        left = sorted(place for shape in members for place in members[shape][taken[shape] :])
        return np.array(order + left, dtype=np.int64), cuts
