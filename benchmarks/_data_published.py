"""Published data-centric planners (bucketing, intra, inter, PAC), replayed next to ours.

Bucketing has one sequence degree, one batch of one bucket per group and step. DCP-intra picks each
group's bucket, degree and batch size so that groups end together; DCP-inter lets groups repeat
their bucket; PAC profiles with activations kept. All take powers of two, drop what is left of a
bucket when it does not fill a batch, and plan a whole epoch at once. Defects are kept, for they are
part of what is compared: samples of a bucket whose rest is too small are never seen, and a step's
gradient is the mean over groups of means over micro-batches, however many samples those have.

Source: Data-Centric Parallel in VideoSys (NUS-HPC-AI-Lab), its description and code of 2024; told
from what it does, not copied.

`replay_published` and `replay_ours` plan an epoch over one table of costs, so that their figures
can be compared: tokens a second, idle time, samples that are never used, and how unevenly samples
weigh in a step's gradient.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gulliver.data import DataCentricPlanner
from gulliver.data_centric.costs import Budget, Distribution
from gulliver.data_centric.steps import StepPlan
from gulliver.errors import GulliverError
from gulliver.hardware import TableCosts

Method = Literal["bucketing", "intra", "inter", "inter+pac"]
METHODS: tuple[Method, ...] = ("bucketing", "intra", "inter", "inter+pac")
BASELINE_DEGREE = 4
MAX_ACCUMULATION, MIN_ACCUMULATION, MIN_ACCUMULATION_PAC = 5, 2, 15


@dataclass
class Share:
    """One group's work in a step."""

    shape: str  # Bucket of all its samples
    degree: int  # Ranks of the group
    batch: int  # Samples of a micro-batch
    seconds: float  # Seconds of a micro-batch
    repeats: int = 1

    @property
    def total(self) -> float:
        """Seconds of the group in the step."""
        return self.repeats * self.seconds


@dataclass(frozen=True)
class PublishedPlan:
    """An epoch as a published planner runs it."""

    steps: list[list[Share]]  # Groups of each optimizer step
    dropped: int  # Samples that the epoch never sees


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
            for batch, each in enumerate(found.seconds.tolist(), 1):
                seconds[shape, degree, batch] = each
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


@dataclass(frozen=True)
class Replayed:
    """Results of a planner over an epoch."""

    name: str  # Name of the planner
    steps: int
    samples: int  # Samples that are used
    dropped: int  # Samples that are not
    tokens: int  # Tokens that are used
    seconds: float  # Predicted seconds of all steps
    imbalance: float  # Share of the ranks' time in which they wait for the step's last group
    # Effective share of samples in a step's gradient, the mean: 1 where all weigh the same.
    effective: float
    spread: float  # Largest weight of a sample over the smallest in one step
    # Predicted seconds over the bounds of the steps, less 1; None where there is no bound.
    gap: float | None
    planning: float  # Processor seconds of planning
    wall: float  # Seconds of planning by the clock; on a machine that others use these are more
    few: float  # Samples of a small step: one in twenty has fewer
    many: float  # Samples of a large step: one in twenty has more

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def step_samples(self) -> float:
        """Samples of an optimizer step, the mean."""
        return self.samples / self.steps if self.steps else 0.0


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
