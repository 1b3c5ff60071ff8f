"""Maps embedding rows to cache slots, and decides which rows are cached.

The map is a hash table of 32-bit integers, or an array if that is smaller; all operations take
arrays of keys. `HashIndex` uses open addressing with linear probing and is at most half full;
removed keys leave tombstones, and the table is rebuilt when there are many. `DenseIndex` has an
entry per row.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gulliver.errors import GulliverError

Keys = NDArray[np.int64]
Values = NDArray[np.int64]
EMPTY, REMOVED, _CLAIMED = -1, -2, -3
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class DenseIndex:
    """An index with 4 bytes per row of the table."""

    def __init__(self, rows: int) -> None:
        self._slots = np.full(rows, EMPTY, np.int32)

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes

    def lookup(self, keys: Keys) -> Values:
        return self._slots[keys].astype(np.int64)

    def insert(self, keys: Keys, values: Values) -> None:
        """Adds keys, which must be distinct and absent."""
        self._slots[keys] = values

    def remove(self, keys: Keys) -> None:
        """Removes keys, which must be distinct and present."""
        self._slots[keys] = EMPTY

    def grow(self, rows: int) -> None:
        more = np.full(rows - len(self._slots), EMPTY, np.int32)
        self._slots = np.concatenate([self._slots, more])


class HashIndex:
    """A hash table from integers to integers."""

    def __init__(self, entries: int, wide_keys: bool = False, wide_values: bool = False) -> None:
        self._key_type = np.int64 if wide_keys else np.int32
        self._value_type = np.int64 if wide_values else np.int32
        self._lay_out(_capacity(entries))

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def __len__(self) -> int:
        return self._count

    def lookup(self, keys: Keys) -> Values:
        found = np.full(len(keys), EMPTY, np.int64)
        places = self._places(keys)
        hits = places >= 0
        found[hits] = self._values[places[hits]]
        return found

    def insert(self, keys: Keys, values: Values) -> None:
        if self._count + len(keys) > self._capacity // 2:
            self._rebuild(self._count + len(keys))
        elif self._count + self._marks + len(keys) > 3 * self._capacity // 4:
            self._rebuild(self._capacity // 2)
        open_ = np.arange(len(keys))
        places = self._first(keys)
        while len(open_):
            free = self._values[places] < 0
            wanted, who = places[free], open_[free]
            before = self._values[wanted]
            # Of several keys that collide, the last write wins.
            self._values[wanted] = _CLAIMED - who
            won = self._values[wanted] == _CLAIMED - who
            at, winners = wanted[won], who[won]
            self._marks -= int((before[won] == REMOVED).sum())
            self._keys[at], self._values[at] = keys[winners], values[winners]
            left = np.ones(len(open_), bool)
            left[np.flatnonzero(free)[won]] = False
            open_, places = open_[left], (places[left] + 1) & (self._capacity - 1)
        self._count += len(keys)

    def remove(self, keys: Keys) -> None:
        places = self._places(keys)
        assert (places >= 0).all(), "all removed keys are present"
        self._values[places] = REMOVED
        self._marks += len(keys)
        self._count -= len(keys)

    def grow(self, rows: int) -> None:
        if rows > 2**31 and self._key_type is np.int32:
            self._key_type = np.int64
            self._rebuild(self._capacity // 2)

    def items(self) -> tuple[Keys, Values]:
        used = self._values >= 0
        return self._keys[used].astype(np.int64), self._values[used].astype(np.int64)

    def _lay_out(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys = np.zeros(capacity, self._key_type)
        self._values = np.full(capacity, EMPTY, self._value_type)
        self._count = self._marks = 0

    def _rebuild(self, entries: int) -> None:
        keys, values = self.items()
        self._lay_out(_capacity(entries))
        self.insert(keys, values)

    def _first(self, keys: Keys) -> NDArray[np.int64]:
        shift = np.uint64(64 - (self._capacity.bit_length() - 1))
        return ((keys.astype(np.uint64) * _GOLDEN) >> shift).astype(np.int64)

    def _places(self, keys: Keys) -> NDArray[np.int64]:
        """Returns the table position of each key, or -1 if it is absent."""
        found = np.full(len(keys), -1, np.int64)
        open_, places = np.arange(len(keys)), self._first(keys)
        while len(open_):
            values = self._values[places]
            same = (values >= 0) & (self._keys[places] == keys[open_])
            found[open_[same]] = places[same]
            left = ~same & (values != EMPTY)
            open_, places = open_[left], (places[left] + 1) & (self._capacity - 1)
        return found


RowIndex = DenseIndex | HashIndex


def _capacity(entries: int) -> int:
    return 1 << max(2 * entries - 1, 7).bit_length()


def index_bytes(rows: int, slots: int) -> int:
    return min(4 * rows, _capacity(slots) * (12 if rows > 2**31 else 8))


def make_index(rows: int, slots: int) -> RowIndex:
    if 4 * rows <= index_bytes(rows, slots):
        return DenseIndex(rows)
    return HashIndex(slots, wide_keys=rows > 2**31)


# Counts uses of rows with exponential decay in a fixed amount of memory.
#
# A count-min sketch (Cormode and Muthukrishnan, 2005) with conservative update (Estan and Varghese,
# 2002): each row has a counter in each of a few tables, shared with other rows; the smallest is its
# estimate, which is never too low.


_ODD = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)
LARGE = 2.0**20


# [Note: decay] Instead of reducing old counts, new ones get a larger weight: the unit grows by a
# factor with every tick. A counter that is not incremented keeps its value, so estimates read at
# different times are comparable. When the unit becomes large, all counters are divided by it.
class DecayedCounts:
    """A sketch of exponentially decayed counts."""

    def __init__(self, width: int, half_life: float, depth: int = 4) -> None:
        self._bits = max(width - 1, 1).bit_length()
        # Counters, (depth, width).
        self.tables = np.zeros((depth, 1 << self._bits), np.float32)
        self._growth = 2.0 ** (1.0 / half_life)
        # Weight of one use now.
        self.unit = 1.0

    @property
    def nbytes(self) -> int:
        return self.tables.nbytes

    def tick(self) -> float:
        """Ages all counts; returns the factor by which to scale cached estimates (usually 1)."""
        self.unit *= self._growth
        if self.unit < LARGE:
            return 1.0
        factor = 1.0 / self.unit
        self.tables *= np.float32(factor)
        self.unit = 1.0
        return factor

    def add(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.float32]:
        """Counts uses of distinct rows, and returns their new estimates."""
        places = self._places(rows)
        now = self._smallest(places) + (counts * self.unit).astype(np.float32)
        for table, place in zip(self.tables, places, strict=True):
            np.maximum.at(table, place, now)
        return now

    def estimate(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Returns the estimates of rows, scaled so that a use now counts as `unit`."""
        return self._smallest(self._places(rows))

    def _places(self, rows: NDArray[np.int64]) -> list[NDArray[np.uint64]]:
        keys, shift = rows.astype(np.uint64), np.uint64(64 - self._bits)
        mixed = (keys ^ (keys >> np.uint64(31))) * np.uint64(0xFF51AFD7ED558CCD)
        return [((mixed ^ (mixed >> np.uint64(29))) * odd) >> shift for odd in self._odd()]

    def _odd(self) -> NDArray[np.uint64]:
        return _ODD[: len(self.tables)]

    def _smallest(self, places: list[NDArray[np.uint64]]) -> NDArray[np.float32]:
        found = self.tables[0][places[0]]
        for table, place in zip(self.tables[1:], places[1:], strict=True):
            found = np.minimum(found, table[place])
        return found


# Decides which rows of a large table a cache holds, one batch at a time.
#
# A batch is *announced* as soon as it is known, *decided* (`decide` selects the rows to load, their
# slots, and the rows to evict; it changes nothing) and *committed*. Between announcement and commit
# it is in the window. All rows of a batch are in the cache at once.


NEVER = 2**50
_SOON = 1e15  # key of rows in immediate use; all other keys are smaller
Slots = NDArray[np.int64]
HALF_LIVES = (8.0, 512.0)  # half-lives, in batches, to choose from if none is given


# [Note: look-ahead] Inside the window the future is known. Rows used there leave after all others,
# farthest use first: Belady's rule (1966), which minimizes misses if the window reaches to the end.
# Rows not used inside the window leave by decayed count, smallest first. Ties are broken by row
# number, so that decisions depend on the batches alone.
class CacheTooSmall(GulliverError):
    """A batch needs more rows than the cache holds."""

    def __init__(self, rows: int, held: int, slots: int) -> None:
        # Smallest number of slots that would suffice.
        self.least = rows + held
        beside = f" next to {held} rows that wait for an optimizer step" if held else ""
        super().__init__(
            f"a batch of {rows} distinct rows{beside} does not fit into a cache of {slots} slots; "
            f"use at least {self.least}"
        )


@dataclass
class RowRequest:
    """The distinct rows of a batch, with their counts."""

    # Distinct rows, ascending.
    rows: NDArray[np.int64]
    # Number of uses of each in the batch.
    counts: NDArray[np.int64]
    # Index of the batch among the announced ones; -1 if it was not announced.
    number: int
    # Index of the next known batch that uses each row, else `NEVER`.
    next_use: NDArray[np.int64]


@dataclass(frozen=True)
class RowPlan:
    """Rows that a batch loads into a cache and evicts from it."""

    request: RowRequest
    # Slot of each of its rows.
    slots: Slots
    # Indices of the rows that must be loaded.
    missing: NDArray[np.int64]
    # Slots of evicted rows; the last ones receive the `missing` rows.
    victims: Slots


@dataclass
class RowCounts:
    """Counters of row uses, hits and moves."""

    # Number of batches.
    batches: int = 0
    # Sum over batches of the number of distinct rows.
    rows: int = 0
    # Number of these rows that were loaded.
    misses: int = 0
    # Uses of rows.
    uses: int = 0
    # Uses of rows that were loaded.
    missed_uses: int = 0

    @property
    def hit_rate(self) -> float:
        return 1.0 - self.missed_uses / max(self.uses, 1)


class RowReplacement:
    """Decides which rows are in a cache."""

    def __init__(
        self,
        slots: int,
        rows: int,
        half_life: float | None = None,
        counters: int | None = None,
    ) -> None:
        self.slots = slots
        # Row in each slot, -1 if empty.
        self.slot_rows = np.full(slots, -1, np.int64)
        # Counters so far.
        self.counts = RowCounts()
        self.index = make_index(rows, slots)
        # The key of an empty slot is never the smallest.
        self._keys = np.full(slots, np.inf)
        self._scores = np.zeros(slots)
        self._free = slots
        self._window: deque[RowRequest] = deque()
        self._latest = HashIndex(1024, wide_keys=True, wide_values=True)
        self._announced = 0
        self._next_use = np.full(slots, NEVER, np.int64)
        lives = HALF_LIVES if half_life is None else (half_life,)
        self._sketches = [DecayedCounts(counters or 4 * slots, life) for life in lives]
        self._sketch = self._sketches[0]
        self._duel = HalfLifeTrial(slots, rows) if half_life is None else None

    @property
    def nbytes(self) -> int:
        """Bytes of the policy's own state, excluding the index."""
        arrays = (self.slot_rows, self._keys, self._scores, self._next_use)
        sketches = sum(sketch.nbytes for sketch in self._sketches)
        duel = self._duel.nbytes if self._duel else 0
        return sum(array.nbytes for array in arrays) + sketches + duel

    def announce(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> RowRequest:
        """Announces the next batch; `decide` must be called in the same order."""
        number, self._announced = self._announced, self._announced + 1
        request = RowRequest(rows, counts, number, np.full(len(rows), NEVER, np.int64))
        self._window.append(request)
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
        """Creates a request for an unannounced batch, to be passed to `decide` immediately."""
        next_use = np.full(len(rows), NEVER, np.int64)
        for request in reversed(self._window):
            if not len(request.rows):  # a batch of empty bags
                continue
            places = np.searchsorted(request.rows, rows)
            places[places == len(request.rows)] = 0
            next_use[request.rows[places] == rows] = request.number
        return RowRequest(rows, counts, -1, next_use)

    def decide(self, request: RowRequest, pinned: Slots | None = None) -> RowPlan:
        """Returns the rows that a batch loads and evicts."""
        slots = self.index.lookup(request.rows)
        missing = np.flatnonzero(slots < 0)
        kept = slots[slots >= 0]
        if pinned is not None and len(pinned):
            kept = np.union1d(kept, pinned)
        if len(missing) + len(kept) > self.slots:
            raise CacheTooSmall(
                len(request.rows), len(missing) + len(kept) - len(request.rows), self.slots
            )
        taken = min(len(missing), self._free)
        free = np.arange(self.slots - self._free, self.slots - self._free + taken)
        victims = self._smallest(len(missing) - taken, kept)
        slots[missing] = np.concatenate([free, victims])
        return RowPlan(request, slots, missing, victims)

    def commit(self, plan: RowPlan) -> None:
        request, slots, missing = plan.request, plan.slots, plan.missing
        if request.number >= 0:
            assert self._window[0] is request, (
                "batches are committed in the order in which they were announced"
            )
            self._window.popleft()
            self._latest.remove(request.rows[request.next_use == NEVER])
        self._free -= len(missing) - len(plan.victims)
        self.index.remove(self.slot_rows[plan.victims])
        self.index.insert(request.rows[missing], slots[missing])
        self.slot_rows[slots[missing]] = request.rows[missing]
        self._age(request)
        self._scores[slots] = self._count(request)
        self._expect(slots, request.next_use)
        counts = self.counts
        counts.batches += 1
        counts.rows += len(slots)
        counts.misses += len(missing)
        counts.uses += int(request.counts.sum())
        counts.missed_uses += int(request.counts[missing].sum())

    def skip(self, request: RowRequest) -> None:
        """Drops the first announced batch, which will not be used."""
        assert self._window[0] is request, (
            "batches are skipped in the order in which they were announced"
        )
        self._window.popleft()
        self._latest.remove(request.rows[request.next_use == NEVER])
        slots = self.index.lookup(request.rows)
        here = slots >= 0
        self._expect(slots[here], request.next_use[here])

    def grow(self, rows: int) -> None:
        self.index.grow(rows)
        for cache in self._duel.caches if self._duel else ():
            cache.grow(rows)

    def forget(self) -> None:
        """Empties the cache, but keeps history and announced batches."""
        used = self.slot_rows[: self.slots - self._free]
        self.index.remove(used)
        self.slot_rows[:], self._keys[:], self._free = -1, np.inf, self.slots
        self._next_use[:] = NEVER

    def _age(self, request: RowRequest) -> None:
        """Ages counts, and switches to the half-life that currently performs better."""
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
        """Counts a batch with all half-lives; returns the counts of the selected one."""
        found = [sketch.add(request.rows, request.counts) for sketch in self._sketches]
        return found[self._sketches.index(self._sketch)]

    def _expect(self, slots: Slots, next_use: NDArray[np.int64]) -> None:
        self._next_use[slots] = next_use
        self._keys[slots] = np.where(next_use != NEVER, _SOON - next_use, self._scores[slots])

    def _smallest(self, count: int, kept: Slots) -> Slots:
        """Returns the slots with the smallest keys, breaking ties by row."""
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


SAMPLE = 16  # the comparison of half-lives samples one in this many rows
MEMORY = 0.99  # decay per batch of the sample's miss counts
LEAD = 0.01  # fraction of the misses that another half-life must save to be selected


class HalfLifeTrial:
    """Compares half-lives by simulating a small cache for each, on a sample of the rows."""

    # A sample by row hash, in a cache scaled down equally, has about the miss rate of the full
    # cache (Waldspurger et al. 2017, "Cache modeling and optimization using miniature
    # simulations"). Selecting the better of two policies is set dueling (Qureshi et al. 2007).

    def __init__(self, slots: int, rows: int) -> None:
        small = max(slots // SAMPLE, 1)
        self.caches = [RowReplacement(small, rows, half_life=life) for life in HALF_LIVES]
        self.misses, self.best = np.zeros(len(HALF_LIVES)), 0

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes + cache.index.nbytes for cache in self.caches)

    def see(self, rows: NDArray[np.int64], counts: NDArray[np.int64]) -> int:
        """Feeds a batch to the simulated caches; returns the index of the half-life to use."""
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
