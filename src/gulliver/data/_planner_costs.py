"""What a planner of data-centric steps asks of costs, and checks of its degrees and window."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np

from gulliver.data._arrangement import WINDOW
from gulliver.data._budgets import Budget, Samples
from gulliver.errors import GulliverError
from gulliver.hardware import BatchCosts
from gulliver.options import size_text, whole_number

STEPS_AHEAD = 16
"""Steps that the default window is as long as."""


class Costs(Protocol):
    """Costs of samples, such as `SampleCosts` and `TableCosts` are."""

    @property
    def memory(self) -> float: ...
    @property
    def identity(self) -> str: ...

    def degrees(self, ranks: int) -> tuple[int, ...]:
        """Degrees up to a number of ranks."""
        ...

    def tokens(self, shape: Any) -> int:
        """Tokens of a sample of a shape."""
        ...

    def batches(self, shape: Any, degree: int, pac: bool = True, most: int = 4096) -> BatchCosts:
        """Costs of micro-batches of 1, 2, ... samples."""
        ...


def alone(costs: Costs) -> Costs:
    """Costs that decide which samples make a step: they must not depend on tensor ranks."""
    return getattr(costs, "alone", costs)


def lot_of(costs: Costs, shape: Hashable, pac: bool) -> int:
    """Samples of a shape that wait for each other: until each is within 2 % of the best."""
    # It looks at the smallest group that a sample fits, whatever the ranks: which samples a step
    # has must not depend on those.
    costs = alone(costs)
    for degree in costs.degrees(1024):
        row = costs.batches(shape, degree, pac)
        if len(row):
            each = row.seconds / np.arange(1, len(row) + 1)
            return int(np.argmax(each <= 1.02 * each.min())) + 1
    return 1


def checked_degrees(costs: Costs, ranks: int, intra: bool, degree: int | None) -> tuple[int, ...]:
    """Degrees that groups may have."""
    known = costs.degrees(ranks)
    if intra:
        if degree is not None:
            raise GulliverError("degree= is for intra=False: groups choose their own degrees")
        return known
    if degree is None or degree not in known or ranks % degree:
        right = ", ".join(str(d) for d in known if ranks % d == 0)
        if not right:
            text = ", ".join(map(str, known)) or "none"
            raise GulliverError(
                f"intra=False: {ranks} ranks are no multiple of a degree of these costs "
                f"({text}): take other ranks"
            )
        raise GulliverError(
            f"intra=False needs one degree= of all groups that divides {ranks} ranks: "
            f"{right}; not {degree}"
        )
    return (degree,)


def checked_window(budget: Budget, arrange: int | None, window: int | None) -> int:
    """Samples that are looked at ahead."""
    if isinstance(budget, Samples):
        window = STEPS_AHEAD * budget.count if window is None else window
        window = whole_number("window", window)
        if window < budget.count:
            raise GulliverError(
                f"window={window} holds no step of {budget}: give at least {budget.count}"
            )
    usual = 4096 if arrange is None else WINDOW
    window = usual if window is None else whole_number("window", window)
    if window < 1:
        raise GulliverError(f"window={window}: give at least 1 sample")
    return window


def costs_text(costs: Costs, pac: bool) -> str:
    """Says whose costs they are, and what host memory activations may move to, if they may."""
    host = getattr(costs, "host", None)
    text = f"costs of {costs.identity}"
    if host is None or not pac:
        return text
    return f"{text}, {size_text(host.bytes)} of a rank's host memory for activations"
