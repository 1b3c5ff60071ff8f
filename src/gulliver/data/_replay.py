"""Planners run over a distribution and a table of costs, without a model: what they would reach.

Ours and the published ones read the same table, so their figures can be laid side by side: tokens a
second, the share of time in which ranks wait, samples that are never used, and how unevenly samples
weigh in a step's gradient.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gulliver.data._budgets import Budget
from gulliver.data._planner import DataCentricPlanner
from gulliver.data._planner_costs import Costs
from gulliver.data._published import Method, Share, published_plan
from gulliver.data._steps import StepPlan
from gulliver.errors import GulliverError, nearest
from gulliver.hardware import TableCosts

Distribution = Literal["short", "balanced", "long"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("short", "balanced", "long")
PUBLISHED: dict[Distribution, dict[Method, float]] = {
    "short": {"intra": 1.55, "inter": 2.12, "inter+pac": 2.48},
    "balanced": {"intra": 1.23, "inter": 1.68, "inter+pac": 1.78},
    "long": {"intra": 1.07, "inter": 1.27, "inter+pac": 1.28},
}
"""Speed-ups over bucketing on 32 H100s, as published; from another table of costs than ours."""
PUBLISHED_IMBALANCE: dict[Method, tuple[float, float, float]] = {
    "bucketing": (0.089, 0.138, 0.164),
    "intra": (0.052, 0.052, 0.053),
    "inter": (0.024, 0.039, 0.043),
    "inter+pac": (0.012, 0.018, 0.033),
}
"""Imbalance on 8, 16 and 32 devices, as published."""
EXPONENT, OFFSET, IMAGES = 3.0, 5.0, 2
"""Exponent and offset of Zipf's law over shapes by cost; images for each video."""


@dataclass(frozen=True)
class Replayed:
    """Results of a planner over an epoch."""

    # Name of the planner.
    name: str
    steps: int
    # Samples that are used.
    samples: int
    # Samples that are not.
    dropped: int
    # Tokens that are used.
    tokens: int
    # Predicted seconds of all steps.
    seconds: float
    # Share of the ranks' time in which they wait for the step's last group.
    imbalance: float
    # Effective share of samples in a step's gradient, the mean: 1 where all weigh the same.
    effective: float
    # Largest weight of a sample over the smallest in one step.
    spread: float
    # Predicted seconds over the bounds of the steps, less 1; None where there is no bound.
    gap: float | None
    # Processor seconds of planning.
    planning: float
    # Seconds of planning by the clock; on a machine that others use these are more.
    wall: float
    # Samples of a small step: one in twenty has fewer.
    few: float
    # Samples of a large step: one in twenty has more.
    many: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_samples(self) -> float:
        """Samples of an optimizer step, the mean."""
        return self.samples / self.steps if self.steps else 0.0


def draw_shapes(
    costs: TableCosts, distribution: Distribution, count: int, seed: int = 0
) -> list[str]:
    """Draws shapes: videos by Zipf's law over cost or evenly, and two images for each."""
    if distribution not in DISTRIBUTIONS:
        raise GulliverError(
            f"no distribution {distribution!r}: {nearest(distribution, DISTRIBUTIONS)}"
        )
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
    """Draws samples of given shapes, by Zipf's law over their tokens or evenly."""
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


def replay_published(
    method: Method, costs: TableCosts, shapes: Sequence[str], ranks: int, seed: int = 0
) -> Replayed:
    """Runs a published planner over an epoch, drops and weights as they are in it."""
    clock = _Clock()
    with clock:
        plan = published_plan(method, costs, Counter(shapes), ranks, seed)
    seconds = busy = 0.0
    tokens = 0
    sizes: list[int] = []
    shares, spreads = [], [1.0]
    for step in plan.steps:
        longest = max(share.total for share in step)
        seconds += longest
        busy += sum(share.degree * share.total for share in step)
        sizes.append(sum(share.batch * share.repeats for share in step))
        tokens += sum(share.batch * share.repeats * costs.tokens(share.shape) for share in step)
        effective, spread = _weights(step)
        shares.append(effective)
        spreads.append(spread)
    imbalance = 1 - busy / (ranks * seconds) if seconds else 0.0
    effective = float(np.mean(shares)) if shares else 0.0
    told = (imbalance, effective, max(spreads), None, clock.processor, clock.wall, *_range(sizes))
    return Replayed(method, len(plan.steps), sum(sizes), plan.dropped, tokens, seconds, *told)


def _range(sizes: Sequence[int]) -> tuple[float, float]:
    """Samples of small and of large steps: one in twenty lies below, one above."""
    low, high = np.quantile(sizes, (0.05, 0.95)) if len(sizes) else (0.0, 0.0)
    return float(low), float(high)


def _weights(step: Sequence[Share]) -> tuple[float, float]:
    """Effective share of the samples, and largest over smallest weight: means of means."""
    counts = np.array([share.batch * share.repeats for share in step], dtype=float)
    weights = np.array([share.degree for share in step]) / counts
    together, squares = (counts * weights).sum(), (counts * weights**2).sum()
    return float(together**2 / squares / counts.sum()), float(weights.max() / weights.min())


def replay_ours(
    costs: TableCosts,
    shapes: Sequence[str],
    ranks: int,
    budget: Budget,
    name: str = "ours",
    **settings: Any,
) -> Replayed:
    """Runs our planner over an epoch."""
    clock = _Clock()
    with clock:
        planner = DataCentricPlanner(costs, shapes, ranks, budget, **settings)
        steps = iter(planner)
    tokens, used, sizes = 0, set[int](), list[int]()
    together = np.zeros(3)
    while True:
        with clock:
            plan = next(steps, None)
        if plan is None:
            break
        # Plans are looked at and forgotten, as in training.
        tokens += sum(len(batch.samples) * costs.tokens(batch.shape) for _, batch in plan)
        used.update(index for _, batch in plan for index in batch.samples)
        sizes.append(plan.samples)
        together += sums([plan])
    seconds, busy, bound = together.tolist()
    told = (1 - busy / (ranks * seconds), 1.0, 1.0, seconds / bound - 1)
    times = (clock.processor, clock.wall, *_range(sizes))
    count = len(used)
    return Replayed(name, len(sizes), count, len(shapes) - count, tokens, seconds, *told, *times)


class _Clock:
    """Adds up the seconds of what runs inside, of this process and of the clock."""

    def __init__(self) -> None:
        self.processor = self.wall = 0.0

    def __enter__(self) -> None:
        self._begun = time.process_time(), time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.processor += time.process_time() - self._begun[0]
        self.wall += time.perf_counter() - self._begun[1]


def sums(plans: Iterable[StepPlan]) -> tuple[float, float, float]:
    """Seconds of steps, rank seconds in which groups are busy, and seconds of the bounds."""
    seconds = busy = bound = 0.0
    for plan in plans:
        seconds += plan.seconds
        busy += sum(group.degree * group.seconds for group in plan.all_groups)
        bound += plan.bound
    return seconds, busy, bound


def least_time(costs: Costs, shapes: Sequence[Any], ranks: int, pac: bool = True) -> float:
    """Seconds that no plan of an epoch can be under: every sample in its best micro-batch."""
    found = 0.0
    for shape, count in Counter(shapes).items():
        rows = [(d, costs.batches(shape, d, pac).seconds) for d in costs.degrees(ranks)]
        found += count * min(
            float(np.min(d * row / np.arange(1, len(row) + 1))) for d, row in rows if len(row)
        )
    return found / ranks
