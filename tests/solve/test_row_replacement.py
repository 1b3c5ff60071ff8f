"""Which rows stay in a cache, held against brute force and against a policy in dictionaries."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from benchmarks._embedding_rates import TraceConfig, make_trace

from gulliver.solve import HashIndex
from gulliver.solve.rows import (
    HALF_LIVES,
    CacheTooSmall,
    DecayedCounts,
    RowReplacement,
    index_bytes,
    make_index,
)

Trace = list[np.ndarray]


def one_row_each(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows, ascending, with one use each."""
    return rows, np.ones(len(rows), np.int64)


def random_trace(seed: int, rows: int, batches: int, most: int) -> Trace:
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, most + 1, batches)
    return [np.sort(draw.choice(rows, size, replace=False)).astype(np.int64) for size in sizes]


def misses(policy: RowReplacement, trace: Trace, ahead: int) -> list[int]:
    """Misses batch by batch, `ahead` batches being known besides the present one."""
    found, queue = [], []
    for number in range(len(trace) + ahead):
        if number < len(trace):
            queue.append(policy.announce(*one_row_each(trace[number])))
        if number >= ahead:
            plan = policy.decide(queue.pop(0))
            policy.commit(plan)
            found.append(len(plan.missing))
    return found


def fewest_misses(trace: Trace, slots: int) -> int:
    """Fewest misses of all ways to keep rows: every set that a cache may hold is tried."""
    states = {frozenset[int](): 0}
    for batch in trace:
        wanted, after = frozenset(map(int, batch)), {}
        for held, cost in states.items():
            others = held - wanted
            room = slots - len(wanted)
            # To keep more never costs: only full caches, or all that there is.
            for kept in combinations(sorted(others), min(room, len(others))):
                now = wanted | frozenset(kept)
                least = cost + len(wanted - held)
                after[now] = min(after.get(now, least), least)
        states = after
    return min(states.values())


class ExactPolicy:
    """Belady's rule inside the window, exact decayed counts beyond it: sets and dictionaries."""

    def __init__(self, slots: int, half_life: float) -> None:
        self.slots, self.growth = slots, 2 ** (1 / half_life)
        self.held: set[int] = set()
        self.counts: dict[int, float] = {}
        self.now = 0

    def step(self, window: Trace) -> int:
        wanted = set(map(int, window[0]))
        missing = wanted - self.held

        def claim(row: int) -> tuple[int, float, int]:
            uses = [n for n, batch in enumerate(window[1:]) if row in batch]
            return (1, -uses[0], row) if uses else (0, self.counts[row], row)

        idle = sorted(self.held - wanted, key=claim)
        for row in idle[: max(len(self.held) + len(missing) - self.slots, 0)]:
            self.held.remove(row)
        self.held |= wanted
        self.now += 1
        for row in wanted:
            self.counts[row] = self.counts.get(row, 0.0) + self.growth**self.now
        return len(missing)


def test_with_the_whole_future_misses_are_the_fewest_there_can_be(full: bool) -> None:
    for seed in range(3000 if full else 150):
        rows, most = 4 + seed % 5, 1 + seed % 3
        trace = random_trace(seed, rows, 8, most)
        slots = min(most + seed % 3, rows)
        policy = RowReplacement(slots, rows)
        assert sum(misses(policy, trace, len(trace))) == fewest_misses(trace, slots), seed


def test_misses_and_rows_are_those_of_the_exact_policy_batch_by_batch(full: bool) -> None:
    # With a half-life of one batch counts are exact in 32 bits, so that equal ones are equal.
    for seed in range(3000 if full else 120):
        rows, most, ahead = 6 + seed % 20, 1 + seed % 5, seed % 6
        trace = random_trace(seed, rows, 20, most)
        slots = min(most + seed % 4, rows)
        policy, exact = (
            RowReplacement(slots, rows, half_life=1, counters=2**11),
            ExactPolicy(slots, 1),
        )
        found = misses(policy, trace, ahead)
        expected = [exact.step(trace[n : n + 1 + ahead]) for n in range(len(trace))]
        assert found == expected, seed
        assert set(policy.slot_rows.tolist()) - {-1} == exact.held


def test_more_look_ahead_never_has_more_misses_than_the_fewest_by_much() -> None:
    trace = [np.unique(np.random.default_rng(n).zipf(1.3, 60) % 300) for n in range(80)]
    totals = [sum(misses(RowReplacement(60, 300), trace, k)) for k in (0, 2, 8, 80)]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] < totals[0]


def test_unannounced_batch_keeps_lookahead() -> None:
    for seed in range(50):
        trace = random_trace(seed, 20, 20, 4)
        policy, held = RowReplacement(9, 20), set[int]()
        queue = [policy.announce(*one_row_each(batch)) for batch in trace]
        for number, request in enumerate(queue):
            for now in (
                [policy.sudden(*one_row_each(trace[-number]))] if number % 3 == 0 else []
            ) + [request]:
                plan = policy.decide(now)
                assert set(now.rows[plan.missing].tolist()) == set(now.rows.tolist()) - held
                policy.commit(plan)
                held = set(policy.slot_rows.tolist()) - {-1}
                assert (policy.slot_rows[plan.slots] == now.rows).all()


def test_pinned_rows_stay_and_a_batch_that_does_not_fit_names_the_smallest_cache() -> None:
    policy = RowReplacement(4, 10)
    first = policy.decide(policy.sudden(*one_row_each(np.array([1, 2, 3]))))
    policy.commit(first)
    then = policy.decide(policy.sudden(*one_row_each(np.array([5]))), pinned=first.slots)
    policy.commit(then)
    assert {1, 2, 3, 5} == set(policy.slot_rows.tolist())
    with pytest.raises(CacheTooSmall, match=r"2 .* 3 .* 5"):
        policy.decide(policy.sudden(*one_row_each(np.array([6, 7]))), pinned=first.slots)
    with pytest.raises(CacheTooSmall, match="at least 5"):
        policy.decide(policy.sudden(*one_row_each(np.arange(5))))


def test_the_hash_index_is_a_dictionary() -> None:
    draw = np.random.default_rng(3)
    for wide in (False, True):
        index, known = HashIndex(40, wide_keys=wide), dict[int, int]()
        for _ in range(400):
            keys = np.unique(draw.integers(-(2**40) if wide else 0, 2**40 if wide else 90, 12))
            there = np.array([key in known for key in keys.tolist()])
            index.remove(keys[there])
            index.insert(keys[~there], keys[~there] % 1000)
            for key, found in zip(keys.tolist(), there, strict=True):
                known.pop(key) if found else known.__setitem__(key, key % 1000)
            asked = np.unique(np.concatenate([keys, draw.integers(0, 90, 30)]))
            expected = [known.get(key, -1) for key in asked.tolist()]
            assert index.lookup(asked).tolist() == expected
            assert len(index) == len(known)


@pytest.mark.parametrize("share", [0.005, 0.01, 0.05, 0.16, 0.5, 1.0])
def test_an_index_takes_at_most_a_third_of_16_bytes_a_row(share: float) -> None:
    rows = 177_944_275
    assert index_bytes(rows, int(rows * share)) <= 16 * rows / 3
    assert make_index(10**5, int(10**5 * share)).nbytes == index_bytes(10**5, int(10**5 * share))


def test_counts_are_never_too_low_and_nearly_exact_where_there_is_room() -> None:
    draw, exact = np.random.default_rng(0), dict[int, float]()
    sketch, growth = DecayedCounts(4096, 8.0), 2 ** (1 / 8.0)
    for _ in range(400):
        factor = sketch.tick()
        exact = {row: count * factor for row, count in exact.items()}
        rows, counts = np.unique(draw.zipf(1.2, 50) % 2000, return_counts=True)
        sketch.add(rows, counts)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            exact[row] = exact.get(row, 0.0) + count * sketch.unit
    rows = np.array(list(exact))
    error = sketch.estimate(rows) - np.array(list(exact.values()))
    assert (error >= -1e-4 * sketch.unit).all()
    assert np.abs(error).mean() < 0.02 * sketch.unit
    assert growth**400 > 2**20, "the unit was divided away at least once"


@pytest.mark.parametrize(("shift", "better"), [(0.0, 1), (1e-3, 0)], ids=["stays", "moves on"])
def test_the_half_life_is_the_one_that_misses_less(shift: float, better: int) -> None:
    config = TraceConfig(rows=60_000, uses=800, batches=140, shift=shift)
    missed, trace = dict[float | None, int](), make_trace(config)
    cache = RowReplacement(1200, config.rows)
    for life in (*HALF_LIVES, None):
        cache = RowReplacement(1200, config.rows, half_life=life)
        for batch in trace:
            cache.commit(cache.decide(cache.sudden(*batch)))
        missed[life] = cache.counts.missed_uses
    assert cache._duel is not None
    assert cache._duel.best == better
    assert missed[HALF_LIVES[better]] < missed[HALF_LIVES[1 - better]]
    assert missed[None] <= missed[HALF_LIVES[better]] * 1.02
