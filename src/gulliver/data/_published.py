"""Planners as they were published, to be replayed beside ours: bucketing, intra, inter, and PAC.

Bucketing has one sequence degree, one batch of one bucket per group and step. DCP-intra picks each
group's bucket, degree and batch size so that groups end together; DCP-inter lets groups repeat
their bucket; PAC profiles with activations kept. All take powers of two, drop what is left of a
bucket when it does not fill a batch, and plan a whole epoch at once. Defects are kept, for they are
part of what is compared: samples of a bucket whose rest is too small are never seen, and a step's
gradient is the mean over groups of means over micro-batches, however many samples those have.

Source: Data-Centric Parallel in VideoSys (NUS-HPC-AI-Lab), its description and code of 2024; told
from what it does, not copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gulliver.errors import GulliverError
from gulliver.hardware import TableCosts

Method = Literal["bucketing", "intra", "inter", "inter+pac"]
METHODS: tuple[Method, ...] = ("bucketing", "intra", "inter", "inter+pac")
BASELINE_DEGREE = 4
MAX_ACCUMULATION, MIN_ACCUMULATION, MIN_ACCUMULATION_PAC = 5, 2, 15


@dataclass
class Share:
    """One group's work in a step."""

    # Bucket of all its samples.
    shape: str
    # Ranks of the group.
    degree: int
    # Samples of a micro-batch.
    batch: int
    # Seconds of a micro-batch.
    seconds: float
    repeats: int = 1

    @property
    def total(self) -> float:
        """Seconds of the group in the step."""
        return self.repeats * self.seconds


@dataclass(frozen=True)
class PublishedPlan:
    """An epoch as a published planner runs it."""

    # Groups of each optimizer step.
    steps: list[list[Share]]
    # Samples that the epoch never sees.
    dropped: int


@dataclass(frozen=True)
class _Profile:
    """Seconds by (shape, degree, batch), and the setting that the profiler chose for each shape."""

    seconds: dict[tuple[str, int, int], float]
    best: dict[str, tuple[int, int]]


def published_plan(
    method: Method, costs: TableCosts, counts: Mapping[str, int], ranks: int, seed: int = 0
) -> PublishedPlan:
    """Plans an epoch as a published planner does."""
    if method not in METHODS:
        raise GulliverError(f"no planner {method!r}: choose from {', '.join(METHODS)}")
    draw = np.random.Generator(np.random.Philox(key=seed))
    left = {shape: n for shape, n in counts.items() if n}
    profile = _profiled(costs, tuple(left), ranks, method)
    if method == "bucketing":
        return _bucketing(profile, left, ranks, draw)
    steps = []
    while step := _drawn(profile, left, ranks, draw):
        _balance_batches(step, profile, ranks)
        if method != "intra":
            least = MIN_ACCUMULATION_PAC if method == "inter+pac" else MIN_ACCUMULATION
            _balance_repeats(step, least)
        # Its drop_last: a bucket without enough samples for what was planned is given up.
        wanted: dict[str, int] = {}
        for share in step:
            wanted[share.shape] = wanted.get(share.shape, 0) + share.batch * share.repeats
        short = [shape for shape, n in wanted.items() if n > left[shape]]
        if short:
            for shape in short:
                profile.best.pop(shape)
            continue
        for shape, n in wanted.items():
            left[shape] -= n
        steps.append(step)
    return PublishedPlan(steps, sum(left.values()))


def _profiled(costs: TableCosts, shapes: Sequence[str], ranks: int, method: Method) -> _Profile:
    """Powers of two in degree and batch; of those the setting with most samples per rank second."""
    seconds: dict[tuple[str, int, int], float] = {}
    best: dict[str, tuple[int, int]] = {}
    degrees = [BASELINE_DEGREE] if method == "bucketing" else costs.degrees(ranks)
    for shape in shapes:
        rates: dict[tuple[int, int], float] = {}
        for degree in degrees:
            found = costs.batches(shape, degree, method == "inter+pac")
            for batch, time in enumerate(found.seconds.tolist(), 1):
                seconds[shape, degree, batch] = time
            size = 1
            while size <= min(len(found), max(costs.seconds[shape].get(degree, {0: 0.0}))):
                rates[degree, size] = size / degree / found.seconds[size - 1]
                size *= 2
        if rates:
            best[shape] = max(rates, key=lambda key: rates[key])
    return _Profile(seconds, best)


def _bucketing(
    profile: _Profile, left: dict[str, int], ranks: int, draw: np.random.Generator
) -> PublishedPlan:
    """One bucket's batch per group, in random order; sizes are drawn towards the median time."""
    median = float(np.median([profile.seconds[(s, *key)] for s, key in profile.best.items()]))
    batches: list[Share] = []
    dropped = 0
    for shape, n in left.items():
        if shape not in profile.best:
            dropped += n
            continue
        degree, size = profile.best[shape]
        unit = profile.seconds[shape, degree, size] / size
        size = max(1, round(median / unit))
        while (shape, degree, size) not in profile.seconds:
            size -= 1
        time = profile.seconds[shape, degree, size]
        batches += [Share(shape, degree, size, time) for _ in range(n // size)]
        dropped += n % size
    groups = ranks // BASELINE_DEGREE
    order = [batches[place] for place in draw.permutation(len(batches))]
    whole = len(order) // groups * groups
    dropped += sum(share.batch for share in order[whole:])
    steps = [order[start : start + groups] for start in range(0, whole, groups)]
    return PublishedPlan(steps, dropped)


def _drawn(
    profile: _Profile, left: Mapping[str, int], ranks: int, draw: np.random.Generator
) -> list[Share]:
    """Groups until ranks are used up: a degree by its number of buckets, then any bucket of it."""
    free, step = ranks, []
    spoken: dict[str, int] = {}
    while free:
        fitting: dict[int, list[str]] = {}
        for shape, (degree, batch) in profile.best.items():
            if degree <= free and left[shape] - spoken.get(shape, 0) >= batch:
                fitting.setdefault(degree, []).append(shape)
        if not fitting:
            break
        # The published test compares one number with every share by itself, not with their sum.
        total, chance = sum(map(len, fitting.values())), draw.random()
        shares = {degree: len(shapes) / total for degree, shapes in fitting.items()}
        degree = next((d for d, share in shares.items() if chance <= share), list(shares)[-1])
        shape = fitting[degree][draw.integers(len(fitting[degree]))]
        batch = profile.best[shape][1]
        spoken[shape] = spoken.get(shape, 0) + batch
        step.append(Share(shape, degree, batch, profile.seconds[shape, degree, batch]))
        free -= degree
    return sorted(step, key=lambda share: -share.degree)


def _balance_batches(step: list[Share], profile: _Profile, ranks: int) -> None:
    """DCP-intra: every group comes as close to the fastest as its degree and batch allow."""
    target = min(share.seconds for share in step)
    for share in step:
        if share.seconds == target:
            continue
        found: list[tuple[float, int, int]] = []
        degree = share.degree
        while degree <= ranks and (share.shape, degree, 1) in profile.seconds:
            unit = profile.seconds[share.shape, degree, 1]
            batch = _largest(profile, share.shape, degree, max(1, round(target / unit)))
            off = abs(profile.seconds[share.shape, degree, batch] - target)
            found.append((off, degree, batch))
            if off <= 0.1 * target:
                break
            degree *= 2
        _, share.degree, share.batch = min(found)
        share.seconds = profile.seconds[share.shape, share.degree, share.batch]
    step.sort(key=lambda share: -share.degree)
    while sum(share.degree for share in step) > ranks:
        step.pop()
    _grow(step, profile)


def _grow(step: list[Share], profile: _Profile) -> None:
    """Batches grow up to the least time that every group can reach."""
    ends = [
        profile.seconds[s.shape, s.degree, _largest(profile, s.shape, s.degree, 10**6)]
        for s in step
    ]
    limit = max(min(ends), max(share.seconds for share in step))
    for share in step:
        batch = share.batch
        while profile.seconds.get((share.shape, share.degree, batch + 1), limit + 1) <= limit:
            batch += 1
        share.batch, share.seconds = batch, profile.seconds[share.shape, share.degree, batch]


def _largest(profile: _Profile, shape: str, degree: int, batch: int) -> int:
    """The largest batch up to `batch` that was profiled."""
    low, high = 1, batch
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if (shape, degree, middle) in profile.seconds else (low, middle - 1)
        )
    return low


def _balance_repeats(step: list[Share], least: int) -> None:
    """DCP-inter: whole repeats that come closest to a common time; too long counts 1.2 times."""
    longest = MAX_ACCUMULATION * max(share.seconds for share in step)
    best: tuple[float, list[int]] = (float("inf"), [])
    for one in step:
        for m in range(1, int(longest / one.seconds) + 1):
            target = m * one.seconds
            repeats, total = [], 0.0
            for share in step:
                low = max(1, int(target / share.seconds))
                over = 1.2 * ((low + 1) * share.seconds - target)
                under = abs(target - low * share.seconds)
                repeats.append(low + (over < under))
                total += min(over, under)
            best = min(best, (total / target, repeats))
    factor = 1 if max(best[1]) >= least else -(-least // max(best[1]))
    for share, count in zip(step, best[1], strict=True):
        share.repeats = count * factor
