"""Budgets of a step (samples, tokens or seconds), and the costs of samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from gulliver.errors import GulliverError, check_known
from gulliver.hardware.batch_costs import BatchCosts
from gulliver.hardware.sample_tables import TableCosts
from gulliver.options import positive_number, whole_number


@dataclass(frozen=True)
class Samples:
    """A step with a fixed number of samples; the last step of an epoch may have fewer."""

    count: int

    def __post_init__(self) -> None:
        if whole_number("samples of a step", self.count) < 1:
            raise GulliverError(f"a step of {self.count} samples is too small: use at least 1")

    def __str__(self) -> str:
        return f"{self.count:,} samples a step"


@dataclass(frozen=True)
class Tokens:
    """A step whose number of tokens is as close to `count` as the order of samples allows."""

    count: int

    def __post_init__(self) -> None:
        if whole_number("tokens of a step", self.count) < 1:
            raise GulliverError(f"a step of {self.count} tokens is too small: use at least 1")

    def __str__(self) -> str:
        return f"about {self.count:,} tokens a step"


@dataclass(frozen=True)
class Seconds:
    """A step that is predicted to take at most this many seconds."""

    seconds: float

    def __post_init__(self) -> None:
        positive_number("seconds of a step", self.seconds)

    def __str__(self) -> str:
        return f"at most {self.seconds:g} s a step"


Budget = Samples | Tokens | Seconds


def weight(budget: Budget, tokens: int, rank_seconds: float) -> float:
    """A sample's share of a budget."""
    if isinstance(budget, Samples):
        return 1.0
    return float(tokens) if isinstance(budget, Tokens) else rank_seconds


def total(budget: Budget, ranks: int) -> float:
    """Maximum total weight of the samples of a step."""
    if isinstance(budget, Samples | Tokens):
        return float(budget.count)
    return budget.seconds * ranks


def check_key(budget: Budget, tokens: int, least: float) -> float:
    """Returns the minimum budget that a sample needs, in tokens or seconds."""
    return least if isinstance(budget, Seconds) else float(tokens)


def check_sample(
    budget: Budget, index: int, shape: Hashable, tokens: int, least: float, ranks: int
) -> None:
    if isinstance(budget, Tokens) and tokens > budget.count:
        raise GulliverError(
            f"no step meets {budget}: sample {index} ({shape}) has {tokens:,} tokens; use at least "
            "that many"
        )
    if isinstance(budget, Seconds) and least > budget.seconds:
        raise GulliverError(
            f"no step meets {budget}: sample {index} ({shape}) takes {least:.4g} s on {ranks} "
            "ranks at best; use at least that much"
        )


# The costs that a planner of data-centric steps needs, and checks of its degrees and window.


WINDOW, STEPS_AHEAD = 4096, 16  # default window in samples, or in steps for budgets in samples


class Costs(Protocol):
    """Costs of samples; implemented by `SampleCosts` and `TableCosts`."""

    @property
    def memory(self) -> float: ...
    @property
    def identity(self) -> str: ...

    def degrees(self, ranks: int) -> tuple[int, ...]: ...

    def tokens(self, shape: Any) -> int: ...

    def batches(
        self, shape: Any, degree: int, pac: bool = True, most: int = 4096
    ) -> BatchCosts: ...


def alone(costs: Costs) -> Costs:
    """Returns the costs by which samples are chosen for steps, independent of tensor ranks."""
    return getattr(costs, "alone", costs)


def efficient_batch(costs: Costs, shape: Hashable, pac: bool) -> int:
    """Smallest micro-batch within 2% of the best time per sample."""
    # Uses the smallest group that fits a sample, for any number of ranks, because the samples of a
    # step must not depend on that number.
    costs = alone(costs)
    for degree in costs.degrees(1024):
        row = costs.batches(shape, degree, pac)
        if len(row):
            each = row.seconds / np.arange(1, len(row) + 1)
            return int(np.argmax(each <= 1.02 * each.min())) + 1
    return 1


def checked_degrees(costs: Costs, ranks: int, intra: bool, degree: int | None) -> tuple[int, ...]:
    known = costs.degrees(ranks)
    if intra:
        if degree is not None:
            raise GulliverError(
                "degree= only applies to intra=False; otherwise each group has its own degree"
            )
        return known
    if degree is None or degree not in known or ranks % degree:
        right = ", ".join(str(d) for d in known if ranks % d == 0)
        if not right:
            text = ", ".join(map(str, known)) or "none"
            raise GulliverError(
                f"intra=False: {ranks} ranks are not a multiple of any degree in the costs "
                f"({text}); use another number of ranks"
            )
        raise GulliverError(
            f"intra=False needs one degree= for all groups that divides the {ranks} ranks: use "
            f"{right}, not {degree}"
        )
    return (degree,)


def checked_window(budget: Budget, window: int | None) -> int:
    """Validates the window; returns it in samples."""
    if isinstance(budget, Samples):
        window = STEPS_AHEAD * budget.count if window is None else window
        if window < budget.count:
            raise GulliverError(
                f"window={window} is shorter than a step of {budget}: use at least {budget.count}"
            )
    return WINDOW if window is None else window


# Samples for planning without a dataset, and a lower bound on the time of any plan for them.


Distribution = Literal["short", "balanced", "long"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("short", "balanced", "long")
EXPONENT, OFFSET, IMAGES = 3.0, 5.0, 2
"""Exponent and offset of Zipf's law over shapes by cost; number of images per video."""


def draw_shapes(
    costs: TableCosts, distribution: Distribution, count: int, seed: int = 0
) -> list[str]:
    """Draws shapes: videos by Zipf's law over cost or evenly, and two images per video."""
    check_known("distribution", distribution, DISTRIBUTIONS)
    images = sorted((s for s in costs.seconds if s.endswith("/1")), key=lambda s: _cost(costs, s))
    videos = sorted(costs.seconds.keys() - set(images), key=lambda s: (_cost(costs, s), s))
    draw = np.random.Generator(np.random.Philox(key=seed))
    stills = count * IMAGES // (IMAGES + 1) if images and videos else count * bool(images)
    found = _drawn(videos, distribution, count - stills, draw)
    found += _drawn(images, distribution, stills, draw)
    return [found[place] for place in draw.permutation(count)]


def draw_samples(
    costs: Costs, shapes: Sequence[Any], distribution: Distribution, count: int, seed: int = 0
) -> list[Any]:
    """Draws samples from the given shapes, by Zipf's law over their tokens or evenly."""
    ordered = sorted(shapes, key=lambda shape: (costs.tokens(shape), str(shape)))
    draw = np.random.Generator(np.random.Philox(key=seed))
    return _drawn(ordered, distribution, count, draw)


def _cost(costs: TableCosts, shape: str) -> float:
    return min(d * min(row.values()) for d, row in costs.seconds[shape].items() if row)


def _drawn(
    shapes: Sequence[Any], distribution: str, count: int, draw: np.random.Generator
) -> list[Any]:
    if not count:
        return []
    weights = 1 / (np.arange(1, len(shapes) + 1) + OFFSET) ** EXPONENT
    if distribution == "balanced":
        weights = np.ones(len(shapes))
    weights = weights[::-1] if distribution == "long" else weights
    chosen: list[int] = draw.choice(len(shapes), count, p=weights / weights.sum()).tolist()
    return [shapes[number] for number in chosen]


def least_time(costs: Costs, shapes: Sequence[Any], ranks: int, pac: bool = True) -> float:
    """Lower bound on the time of an epoch: every sample in its best micro-batch."""
    found = 0.0
    for shape, count in Counter(shapes).items():
        rows = [(d, costs.batches(shape, d, pac).seconds) for d in costs.degrees(ranks)]
        found += count * min(
            float(np.min(d * row / np.arange(1, len(row) + 1))) for d, row in rows if len(row)
        )
    return found / ranks
