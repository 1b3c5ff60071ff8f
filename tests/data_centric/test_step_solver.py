"""Dealing samples to groups of ranks, held against brute force on small cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from gulliver.errors import GulliverError
from gulliver.hardware.batch_costs import BatchCosts, BlockKind, keep_blocks, kept_front
from gulliver.solve import split_batches
from gulliver.solve.steps import StepSolver, accumulated, covering

Table = dict[str, dict[int, np.ndarray]]


def table(seed: int, ranks: int) -> Table:
    """Seconds with a fixed part, and less than proportional gains from more ranks."""
    draw = np.random.default_rng(seed)
    found: Table = {}
    for name in "ab":
        fixed, each, most = draw.uniform(0.1, 0.5), draw.uniform(0.2, 3.0), int(draw.integers(1, 4))
        found[name] = {
            d: fixed + each * np.arange(1, most * d + 1) / d ** draw.uniform(0.7, 1.0)
            for d in range(1, ranks + 1)
            if draw.random() < 0.9 or d == 1
        }
    return found


def exact_seconds(row: np.ndarray, count: int) -> float:
    """The least seconds of samples on one group, over all ways to cut them."""
    least = [0.0]
    for n in range(1, count + 1):
        least.append(min(least[n - b] + row[b - 1] for b in range(1, min(n, len(row)) + 1)))
    return least[count]


def partitions(ranks: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """All ways to cut ranks into groups."""
    if ranks == 0:
        yield ()
    for first in range(min(ranks, largest or ranks), 0, -1):
        for rest in partitions(ranks - first, first):
            yield (first, *rest)


def brute_force(seconds: Table, counts: Mapping[str, int], ranks: int) -> float:
    """The least time over all groups and all ways to deal samples to them."""
    best = float("inf")
    samples = [shape for shape, count in counts.items() for _ in range(count)]
    for groups in partitions(ranks):
        for places in itertools.product(range(len(groups)), repeat=len(samples)):
            times = []
            for place, degree in enumerate(groups):
                own = [s for s, at in zip(samples, places, strict=True) if at == place]
                if any(degree not in seconds[shape] for shape in own):
                    times.append(float("inf"))
                    continue
                times.append(sum(exact_seconds(seconds[s][degree], own.count(s)) for s in set(own)))
            best = min(best, max(times))
    return best


def test_solutions_are_near_the_lower_bound() -> None:
    ratios = []
    for seed in range(40):
        ranks = 2 + seed % 2
        seconds, counts = table(seed, ranks), {"a": 1 + seed % 3, "b": 1 + seed // 3 % 3}
        least = brute_force(seconds, counts, ranks)
        answer = StepSolver(seconds, ranks).plan_step(counts)
        assert answer.bound <= least * (1 + 1e-9)
        assert answer.seconds >= least * (1 - 1e-9)
        ratios.append(answer.seconds / least)
    assert max(ratios) < 1.5
    assert np.mean(ratios) < 1.08


def test_every_sample_is_dealt_once_and_groups_fit_the_ranks() -> None:
    for seed in range(30):
        draw = np.random.default_rng(seed)
        ranks = int(draw.integers(1, 9))
        seconds = table(seed, ranks)
        counts = {"a": int(draw.integers(0, 60)), "b": int(draw.integers(1, 60))}
        answer = StepSolver(seconds, ranks).plan_step(counts)
        dealt = {"a": 0, "b": 0}
        assert sum(group.degree for group in answer.groups) <= ranks
        for group in answer.groups:
            total = 0.0
            for piece in group.pieces:
                dealt[piece.shape] += sum(piece.batches)  # type: ignore[index]
                row = seconds[piece.shape][group.degree]  # type: ignore[index]
                total += sum(row[batch - 1] for batch in piece.batches)
            assert total == pytest.approx(group.seconds)
        assert dealt == counts
        assert not answer.left
        assert answer.seconds == max(group.seconds for group in answer.groups)


def test_single_micro_batches_leave_unplaced_samples() -> None:
    seconds = {"a": {1: np.array([1.0, 1.5])}}
    answer = StepSolver(seconds, 2, repeat=False).plan_step({"a": 7})
    assert [piece.batches for group in answer.groups for piece in group.pieces] == [(2,), (2,)]
    assert answer.left == {"a": 3}


def test_solution_does_not_depend_on_count_order() -> None:
    seconds = table(3, 4)
    one = StepSolver(seconds, 4).plan_step({"a": 9, "b": 14})
    turned = {name: seconds[name] for name in reversed(seconds)}
    other = StepSolver(turned, 4).plan_step({"b": 14, "a": 9})
    assert one == other


def test_a_shape_that_fits_no_group_is_refused() -> None:
    with pytest.raises(GulliverError, match=r"'a' .* up to 2"):
        StepSolver({"a": {4: np.array([1.0])}}, 2)


@pytest.mark.parametrize("kind", ["affine", "concave", "convex", "any"])
def test_accumulated_seconds_are_those_of_the_cut_and_near_the_least(kind: str) -> None:
    size = np.arange(1, 9)
    row = {
        "affine": 0.3 + 0.2 * size,
        "concave": np.sqrt(size),
        "convex": 0.5 + 0.05 * size**2,
        "any": np.cumsum(np.random.default_rng(0).uniform(0.05, 1, 8)),
    }[kind]
    told = accumulated(row, 40)
    for count in range(1, 41):
        cut = split_batches(row, count)
        assert sum(cut) == count
        assert sum(row[batch - 1] for batch in cut) <= told[count] + 1e-12
        least = exact_seconds(row, count)
        assert told[count] >= least - 1e-12
        if kind in ("affine", "convex"):
            assert told[count] == pytest.approx(least)
        else:
            assert told[count] <= 1.35 * least


def test_covering_is_optimal() -> None:
    rows = {1: np.array([1.0, 1.4, 2.6]), 2: 2 * np.array([0.6, 0.75, 0.9, 1.0])}
    least, rate = covering(rows, 12)
    one = {b: min(float(row[b - 1]) for row in rows.values() if b <= len(row)) for b in range(1, 5)}
    for count in range(1, 13):
        best = min(
            sum(one[b] for b in parts)
            for parts in partitions(count)
            if all(b in one for b in parts)
        )
        assert least[count] == pytest.approx(best)
        assert count * rate <= least[count] + 1e-12


def test_kept_blocks_are_the_exact_knapsack_in_bytes() -> None:
    draw = np.random.default_rng(1)
    for _ in range(30):
        kinds = tuple(
            BlockKind(str(n), int(draw.integers(1, 5)), float(draw.integers(1, 40)), share)
            for n, share in enumerate(draw.dirichlet([1, 1, 1]).tolist())
        )
        base = np.arange(1, 5) * 100.0
        zeros = np.zeros(4)
        counts = np.tile([kind.count for kind in kinds], (4, 1))
        costs = BatchCosts(10 + base, base, zeros, base / 20, counts)
        found = keep_blocks(costs, 7.0, 700.0, kinds)
        for batch in range(1, 5):
            best = 0.0
            for kept in itertools.product(*(range(kind.count + 1) for kind in kinds)):
                size = sum(n * k.kept_bytes for n, k in zip(kept, kinds, strict=True)) * 7.0 * batch
                if base[batch - 1] + size <= 700.0 * (1 + 1e-12):
                    share = sum(n * k.share / k.count for n, k in zip(kept, kinds, strict=True))
                    best = max(best, share * base[batch - 1] / 20)
            assert costs.seconds[batch - 1] - found.seconds[batch - 1] == pytest.approx(best)
            assert found.bytes[batch - 1] <= 700.0 * (1 + 1e-9)
            kept_now = [
                k.count - r for k, r in zip(kinds, found.recomputed[batch - 1], strict=True)
            ]
            size = sum(n * k.kept_bytes for n, k in zip(kept_now, kinds, strict=True)) * 7.0 * batch
            assert base[batch - 1] + size == pytest.approx(found.bytes[batch - 1])


def test_dominated_choices_are_not_on_pareto_front() -> None:
    weights, shares, kept = kept_front((BlockKind("a", 2, 10.0, 0.5), BlockKind("b", 1, 30.0, 0.5)))
    assert weights.tolist() == [0, 10, 20, 40, 50]
    assert shares.tolist() == [0, 0.25, 0.5, 0.75, 1.0]
    assert kept.tolist() == [[0, 0], [1, 0], [2, 0], [1, 1], [2, 1]]


def test_one_wide_group_does_not_take_all_samples_along() -> None:
    """A long sample is cheapest on all ranks, short ones are far from it there."""
    size = np.arange(1, 9)
    seconds = {
        "long": {8: 8.0 * size, 4: 16.2 * size},
        "short": {1: 0.01 + 0.5 * size, 4: 0.5 + 0.2 * size, 8: 0.5 + 0.15 * size},
    }
    answer = StepSolver(seconds, 8).plan_step({"long": 1, "short": 120})
    assert max(group.degree for group in answer.groups) == 4
    assert answer.seconds < 1.1 * answer.bound
