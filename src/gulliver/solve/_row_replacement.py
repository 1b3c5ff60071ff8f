"""Decides which rows of a large table a cache holds, a batch of rows at a time.

A batch is *announced* as soon as it is known, *decided* (`decide` says which rows come, into which
slots, and which leave; nothing changes by it) and *committed*. Between announcing and committing
it lies in the window. All rows of a batch are in the cache at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError, nearest
from gulliver.solve._row_index import HashIndex, make_index
from gulliver.solve._sketch import DecayedCounts

RowPolicy = Literal["lookahead", "lfu", "lru", "dataset"]
NEVER = 2**50
_SOON = 1e15
"""Key of what is used at once; what is used later has smaller ones. Counts are far smaller."""
Slots = NDArray[np.int64]
HALF_LIVES = (8.0, 512.0)
"""Half-lives in batches of which the better one is taken where none is given."""


# [Note: look-ahead] Inside the window the future is known. What is used there leaves after all that
# is not, the farthest use first: Belady's rule (1966), which has the fewest misses there can be
# where the window reaches to the end. What is not used inside the window leaves by its decayed
# count, the smallest first. Rows with equal claims leave in the order of their numbers, so that
# decisions depend on the batches alone.
class TooSmall(GulliverError):
    """A batch does not fit a cache."""

    def __init__(self, rows: int, held: int, slots: int) -> None:
        # Smallest number of slots that it would fit.
        self.least = rows + held
        beside = f" beside {held} rows that wait for an optimizer's step" if held else ""
        super().__init__(
            f"a batch of {rows} different rows{beside} does not fit a cache of {slots} slots: "
            f"the smallest legal cache has {self.least}"
        )


@dataclass
class RowRequest:
    """A batch of rows."""

    # Distinct rows, ascending.
    rows: NDArray[np.int64]
    # Uses of each in the batch.
    counts: NDArray[np.int64]
    # Number of the batch among those that were announced; -1 for none of these.
    number: int
    # Number of the next batch that is known to use each, else `NEVER`.
    next_use: NDArray[np.int64]


@dataclass(frozen=True)
class RowPlan:
    """What a batch does to a cache."""

    request: RowRequest
    # Slot of each of its rows.
    slots: Slots
    # Places, among the rows, of those that have to be loaded.
    missing: NDArray[np.int64]
    # Slots whose rows leave; the last of those that `missing` are loaded into.
    victims: Slots


@dataclass
class RowCounts:
    """Uses of rows so far."""

    # Number of batches.
    batches: int = 0
    # Number of distinct rows, batch by batch.
    rows: int = 0
    # Number of them that were loaded.
    misses: int = 0
    # Uses of rows.
    uses: int = 0
    # Uses of rows that were loaded.
    missed_uses: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the uses that found their row in the cache."""
        return 1.0 - self.missed_uses / max(self.uses, 1)


def one_row_each(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns distinct rows, ascending, with one use each."""
    return rows, np.ones(len(rows), np.int64)


class RowReplacement:
    """Decides which rows are in a cache."""

    def __init__(
        self,
        slots: int,
        rows: int,
        policy: RowPolicy = "lookahead",
        frequencies: NDArray[np.int64] | None = None,
        half_life: float | None = None,
        counters: int | None = None,
    ) -> None:
        if policy not in get_args(RowPolicy):
            raise GulliverError(
                f"unknown policy {policy!r}: {nearest(policy, get_args(RowPolicy))}"
            )
        if (policy == "dataset") != (frequencies is not None):
            raise GulliverError("policy 'dataset' and frequencies belong together: give both")
        self.policy, self.slots = policy, slots
        # Row in each slot, -1 for none.
        self.slot_rows = np.full(slots, -1, np.int64)
        # What has happened so far.
        self.counts = RowCounts()
        self.index = make_index(rows, slots)
        self._frequencies = frequencies
        # What an empty slot has is never the smallest key.
        self._keys = np.full(slots, np.inf)
        self._scores = np.zeros(slots)
        self._free = slots
        self._window: deque[RowRequest] = deque()
        self._latest = HashIndex(1024, wide_keys=True, wide_values=True)
        self._announced = 0
        self._next_use = np.full(slots, NEVER, np.int64)
        self._sketch: DecayedCounts | None = None
        self._duel: Duel | None = None
        if policy == "lookahead":
            lives = HALF_LIVES if half_life is None else (half_life,)
            self._sketches = [DecayedCounts(counters or 4 * slots, life) for life in lives]
            self._sketch = self._sketches[0]
            self._duel = Duel(slots, rows) if half_life is None else None

    @property
    def nbytes(self) -> int:
        """Bytes of the decisions' own state, in addition to the index."""
        arrays = (self.slot_rows, self._keys, self._scores, self._next_use)
        sketches = sum(sketch.nbytes for sketch in self._sketches) if self._sketch else 0
        duel = self._duel.nbytes if self._duel else 0
        return sum(array.nbytes for array in arrays) + sketches + duel

    def announce(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> RowRequest:
        """Takes the next batch that is known; they are decided in this order."""
        number, self._announced = self._announced, self._announced + 1
        request = RowRequest(rows, counts, number, np.full(len(rows), NEVER, np.int64))
        self._window.append(request)
        if self._sketch is None:
            return request
        places = self._latest.lookup(rows)
        again = places >= 0
        first = self._window[0].number
        batches, inside = places[again] >> 32, places[again] & 0xFFFFFFFF
        for batch in np.unique(batches):
            self._window[batch - first].next_use[inside[batches == batch]] = number
        self._latest.remove(rows[again])
        self._latest.insert(rows, (np.int64(number) << 32) + np.arange(len(rows)))
        slots = self.index.lookup(rows)
        slots = slots[slots >= 0]
        slots = slots[self._next_use[slots] == NEVER]
        self._next_use[slots] = number
        self._keys[slots] = _SOON - number
        return request

    def sudden(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> RowRequest:
        """Makes a request of a batch that was not announced and is decided at once."""
        next_use = np.full(len(rows), NEVER, np.int64)
        for request in reversed(self._window if self._sketch else ()):
            if not len(request.rows):  # a batch of empty bags
                continue
            places = np.searchsorted(request.rows, rows)
            places[places == len(request.rows)] = 0
            next_use[request.rows[places] == rows] = request.number
        return RowRequest(rows, counts, -1, next_use)

    def decide(self, request: RowRequest, pinned: Slots | None = None) -> RowPlan:
        """Says what a batch loads, and what leaves for it."""
        slots = self.index.lookup(request.rows)
        missing = np.flatnonzero(slots < 0)
        kept = slots[slots >= 0]
        if pinned is not None and len(pinned):
            kept = np.union1d(kept, pinned)
        if len(missing) + len(kept) > self.slots:
            raise TooSmall(
                len(request.rows), len(missing) + len(kept) - len(request.rows), self.slots
            )
        taken = min(len(missing), self._free)
        free = np.arange(self.slots - self._free, self.slots - self._free + taken)
        victims = self._smallest(len(missing) - taken, kept)
        slots[missing] = np.concatenate([free, victims])
        return RowPlan(request, slots, missing, victims)

    def commit(self, plan: RowPlan) -> None:
        """Makes what was decided so."""
        request, slots, missing = plan.request, plan.slots, plan.missing
        if request.number >= 0:
            assert self._window[0] is request, "batches are committed in the order of announcing"
            self._window.popleft()
            if self._sketch is not None:
                self._latest.remove(request.rows[request.next_use == NEVER])
        self._free -= len(missing) - len(plan.victims)
        self.index.remove(self.slot_rows[plan.victims])
        self.index.insert(request.rows[missing], slots[missing])
        self.slot_rows[slots[missing]] = request.rows[missing]
        self._touch(request, slots, missing)
        counts = self.counts
        counts.batches += 1
        counts.rows += len(slots)
        counts.misses += len(missing)
        counts.uses += int(request.counts.sum())
        counts.missed_uses += int(request.counts[missing].sum())

    def skip(self, request: RowRequest) -> None:
        """Drops the first batch of the window, which does not come after all."""
        assert self._window[0] is request, "batches are skipped in the order of announcing"
        self._window.popleft()
        if self._sketch is None:
            return
        self._latest.remove(request.rows[request.next_use == NEVER])
        slots = self.index.lookup(request.rows)
        here = slots >= 0
        self._expect(slots[here], request.next_use[here])

    def grow(self, rows: int) -> None:
        """Knows of more rows from now on."""
        self.index.grow(rows)
        if self._frequencies is not None:
            more = np.zeros(rows - len(self._frequencies), self._frequencies.dtype)
            self._frequencies = np.concatenate([self._frequencies, more])
        for cache in self._duel.caches if self._duel else ():
            cache.grow(rows)

    def forget(self) -> None:
        """Empties the cache; what is known of the future and of the past stays."""
        used = self.slot_rows[: self.slots - self._free]
        self.index.remove(used)
        self.slot_rows[:], self._keys[:], self._free = -1, np.inf, self.slots
        self._next_use[:] = NEVER

    def _touch(self, request: RowRequest, slots: Slots, missing: NDArray[np.int64]) -> None:
        if self.policy == "lru":
            self._keys[slots] = self.counts.batches
        elif self.policy == "lfu":
            self._scores[slots[missing]] = 0
            self._scores[slots] += request.counts
            self._keys[slots] = self._scores[slots]
        elif self._frequencies is not None:
            self._keys[slots] = self._frequencies[request.rows]
        elif self._sketch is not None:
            self._age(request)
            self._scores[slots] = self._count(request)
            self._expect(slots, request.next_use)

    def _age(self, request: RowRequest) -> None:
        """Lets counts age, and takes those of the half-life that does better by now."""
        assert self._sketch is not None
        factors = [sketch.tick() for sketch in self._sketches]
        factor = factors[self._sketches.index(self._sketch)]
        best = self._sketches[self._duel.see(request.rows, request.counts)] if self._duel else None
        if best is not None and best is not self._sketch:
            self._sketch = best
            used = self.slot_rows >= 0
            self._scores[used] = best.estimate(self.slot_rows[used])
        elif factor != 1.0:
            self._scores *= factor
        else:
            return
        idle = (self._next_use == NEVER) & (self.slot_rows >= 0)
        self._keys[idle] = self._scores[idle]

    def _count(self, request: RowRequest) -> NDArray[np.float32]:
        """Counts a batch by all half-lives; returns the counts of the one that is taken."""
        found = [sketch.add(request.rows, request.counts) for sketch in self._sketches]
        return found[self._sketches.index(self._sketch)]  # type: ignore[arg-type]

    def _expect(self, slots: Slots, next_use: NDArray[np.int64]) -> None:
        self._next_use[slots] = next_use
        self._keys[slots] = np.where(next_use != NEVER, _SOON - next_use, self._scores[slots])

    def _smallest(self, count: int, kept: Slots) -> Slots:
        """Returns the slots with the smallest keys, by rows where keys are equal."""
        if count == 0:
            return np.empty(0, np.int64)
        before = self._keys[kept]
        self._keys[kept] = np.inf
        last = np.partition(self._keys, count - 1)[count - 1]
        sure = np.flatnonzero(self._keys < last)
        equal = np.flatnonzero(self._keys == last)
        self._keys[kept] = before
        short = count - len(sure)
        if short < len(equal):
            equal = equal[np.argpartition(self.slot_rows[equal], short - 1)[:short]]
        return np.concatenate([sure, equal])


SAMPLE = 16
"""One row of so many is in the sample that half-lives are tried on."""
MEMORY = 0.99
"""Part of the misses of a sample that still counts after a batch."""
LEAD = 0.01
"""Part of the misses that the other half-life has to save before it is taken."""


class Duel:
    """Half-lives next to each other, each in a cache of its own for a sample of the rows."""

    # A sample by a hash of the row, in a cache as much smaller, misses about as often as all rows
    # do in theirs (Waldspurger et al. 2017, "Cache modeling and optimization using miniature
    # simulations"); that the better of two rules is taken is set dueling (Qureshi et al. 2007).

    def __init__(self, slots: int, rows: int) -> None:
        small = max(slots // SAMPLE, 1)
        self.caches = [RowReplacement(small, rows, half_life=life) for life in HALF_LIVES]
        self.misses, self.best = np.zeros(len(HALF_LIVES)), 0

    @property
    def nbytes(self) -> int:
        """Bytes of the small caches' decisions."""
        return sum(cache.nbytes + cache.index.nbytes for cache in self.caches)

    def see(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
        """Shows a batch to the small caches; returns the number of the half-life to take."""
        mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mine = (mixed >> np.uint64(40)) % np.uint64(SAMPLE) == 0
        rows, counts = rows[mine], counts[mine]
        if not 0 < len(rows) <= self.caches[0].slots:
            return self.best
        self.misses *= MEMORY
        for place, cache in enumerate(self.caches):
            before = cache.counts.missed_uses
            cache.commit(cache.decide(cache.sudden(rows, counts)))
            self.misses[place] += cache.counts.missed_uses - before
        other = int(self.misses.argmin())
        if self.misses[other] < self.misses[self.best] * (1 - LEAD):
            self.best = other
        return self.best
