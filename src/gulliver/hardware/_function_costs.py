"""Costs of samples from functions of their shapes, for loops whose costs nobody has measured."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from gulliver.errors import GulliverError
from gulliver.hardware._batch_costs import BatchCosts
from gulliver.options import whole_number


@dataclass(frozen=True)
class FunctionCosts:
    """Costs that a user's functions say: a line through the samples of a micro-batch.

    Attributes:
        cost: seconds of forward and backward of one sample of a shape on one rank, or any number
            that is in proportion to them.
        length: tokens of a sample of a shape, or whatever its memory is in proportion to.
        memory: tokens that fit on a rank at once; they stand for bytes.
        fixed: cost of a micro-batch whatever is in it.
        lost: share of a sample's cost that ranks of a group spend on messages, each.
        allowed: numbers of ranks that may share a sample.
        model: name of the model, for saved states.
    """

    cost: Callable[[Any], float]
    length: Callable[[Any], int]
    memory: float
    fixed: float = 0.0
    lost: float = 0.05
    allowed: tuple[int, ...] = (1,)
    model: str = "function"
    _met: list[tuple[int, float]] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        degrees = tuple(whole_number("a degree in allowed", degree) for degree in self.allowed)
        object.__setattr__(self, "allowed", degrees)
        finite = all(map(math.isfinite, (self.memory, self.fixed, self.lost)))
        sizes = finite and self.memory >= 1 and self.fixed >= 0 and self.lost >= 0
        if not sizes or not self.allowed or any(degree < 1 for degree in self.allowed):
            raise GulliverError(
                "costs of functions need memory and degrees of at least 1, and fixed and lost of "
                f"at least 0, all finite: {self.memory}, {self.allowed}, {self.fixed}, {self.lost}"
            )

    @property
    def room(self) -> str:
        """The memory of a rank in words."""
        return f"the {self.memory:,.0f} tokens"

    @property
    def identity(self) -> str:
        """What a saved state is held against: the model."""
        return self.model

    def degrees(self, ranks: int) -> tuple[int, ...]:
        """Degrees up to a number of ranks."""
        return tuple(degree for degree in sorted(self.allowed) if degree <= ranks)

    def tokens(self, shape: Any) -> int:
        """Tokens of a sample of a shape."""
        length = self.length(shape)
        if not (isinstance(length, Real) and math.isfinite(length)):
            raise GulliverError(f"shape {shape} has {length} tokens: give a number above 0")
        return math.ceil(length)

    def batches(self, shape: Any, degree: int, pac: bool = True, most: int = 4096) -> BatchCosts:
        """Costs of micro-batches of 1, 2, ... samples on a group of ranks, as many as fit."""
        cost, tokens = self.cost(shape), self.tokens(shape)
        if not (isinstance(cost, Real) and 0 < cost < math.inf and tokens >= 1):
            raise GulliverError(
                f"shape {shape} costs {cost} and has {tokens} tokens: both must be above 0, and "
                "finite"
            )
        self._check(shape, tokens, float(cost))
        each = float(cost)
        size = np.arange(1, min(most, int(self.memory * degree / tokens + 1e-9)) + 1)
        sent = size * each * self.lost * (degree > 1)
        nothing = np.zeros(len(size))
        bytes_ = size * tokens / degree
        none = np.zeros((len(size), 0), dtype=np.int64)
        return BatchCosts(self.fixed + size * each / degree + sent, bytes_, sent, nothing, none)

    def _check(self, shape: Any, tokens: int, cost: float) -> None:
        """Refuses costs that change, or that fall where samples are longer."""
        if float(self.cost(shape)) != cost:
            raise GulliverError(
                f"shape {shape} costs {cost:g} now and something else when it is asked again: a "
                "cost must hang on the shape alone"
            )
        place = bisect_left(self._met, (tokens, cost))
        if place < len(self._met) and self._met[place] == (tokens, cost):
            return
        near = [*self._met[max(0, place - 1) : place], (tokens, cost), *self._met[place:][:1]]
        for (short, before), (long, after) in pairwise(near):
            # Shapes of like length may differ in more than that, as a table's may.
            if short < long and after < before / 2:
                raise GulliverError(
                    f"the costs of samples lie: {long:,} tokens cost {after:g} and {short:,} cost "
                    f"{before:g}; longer samples cannot cost less than half"
                )
        insort(self._met, (tokens, cost))
