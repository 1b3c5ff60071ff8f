"""Samples drawn for planning without a data set, and the time that no plan of them can be under."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gulliver.data._planner_costs import Costs
from gulliver.errors import GulliverError, nearest
from gulliver.hardware import TableCosts

Distribution = Literal["short", "balanced", "long"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("short", "balanced", "long")
EXPONENT, OFFSET, IMAGES = 3.0, 5.0, 2
"""Exponent and offset of Zipf's law over shapes by cost; images for each video."""


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


def least_time(costs: Costs, shapes: Sequence[Any], ranks: int, pac: bool = True) -> float:
    """Seconds that no plan of an epoch can be under: every sample in its best micro-batch."""
    found = 0.0
    for shape, count in Counter(shapes).items():
        rows = [(d, costs.batches(shape, d, pac).seconds) for d in costs.degrees(ranks)]
        found += count * min(
            float(np.min(d * row / np.arange(1, len(row) + 1))) for d, row in rows if len(row)
        )
    return found / ranks
