"""Predictions that learn from real steps: a factor for each shape, on top of the fitted costs.

Clocks, neighbours and kernels make real seconds differ from a fit by a factor that hardly depends
on the batch. So each shape has one, a mean in logarithms of measured over predicted seconds in
which the last ones count most; shapes not seen yet take the mean of all.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

from gulliver.errors import GulliverError

LEAST_WEIGHT = 0.1
"""Weight of the last measurement in the mean, once there are many."""
FARTHEST = 8.0
"""Factor beyond which a measurement is taken for a stall, not for a cost."""
LAST = 64
"""Measurements that the error is the median of."""


class Refinement:
    """Factors from predicted to measured seconds, and the error that is left."""

    # All ranks must get the same measurements, for they plan with what they have learned.

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, int]] = {}
        self._all = (0.0, 0)
        self._errors: deque[float] = deque(maxlen=LAST)

    def observe(self, shape: Hashable, predicted: float, measured: float) -> None:
        """Learns from one micro-batch."""
        if not (
            math.isfinite(predicted) and math.isfinite(measured) and min(predicted, measured) > 0
        ):
            raise GulliverError(f"seconds must be above 0, not {predicted} and {measured}")
        self._errors.append(abs(predicted * self.factor(shape) / measured - 1))
        ratio = measured / predicted
        if not 1 / FARTHEST <= ratio <= FARTHEST:
            return
        name = repr(shape)
        self._means[name] = _with(self._means.get(name, self._all), math.log(ratio))
        self._all = _with(self._all, math.log(ratio))

    def factor(self, shape: Hashable) -> float:
        """Measured over predicted seconds of a shape; 1 before anything was measured."""
        return math.exp(self._means.get(repr(shape), self._all)[0])

    @property
    def error(self) -> float | None:
        """Median relative error of the last predictions, each made before its measurement."""
        return statistics.median(self._errors) if self._errors else None

    def state_dict(self) -> dict[str, Any]:
        """Returns what was learned, as plain values."""
        means = {name: list(mean) for name, mean in self._means.items()}
        return {"shapes": means, "all": list(self._all), "errors": list(self._errors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what was learned before."""
        try:
            means = {str(k): (float(v[0]), int(v[1])) for k, v in state["shapes"].items()}
            whole = float(state["all"][0]), int(state["all"][1])
            errors = [float(error) for error in state["errors"]]
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise GulliverError("the saved refinement of costs is broken") from None
        self._means, self._all = means, whole
        self._errors = deque(errors, maxlen=LAST)


def _with(mean: tuple[float, int], value: float) -> tuple[float, int]:
    weight = max(LEAST_WEIGHT, 1 / (mean[1] + 1))
    return mean[0] + weight * (value - mean[0]), mean[1] + 1
