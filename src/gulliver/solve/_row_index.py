"""Finds the slot of a row: a hash table of 32-bit numbers, or an array where that is smaller.

All of it works on arrays of keys at once. `HashIndex` is open addressing with linear probing, at
most half full; a key that is removed leaves a mark that probes pass, and the table is laid out
again when marks become many. `DenseIndex` has an entry for every row there is.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Values = NDArray[np.int64]
EMPTY, REMOVED, _CLAIMED = -1, -2, -3
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class RowIndex(Protocol):
    """A map from rows to numbers of 0 and more."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        ...

    def lookup(self, keys: Keys) -> Values:
        """Returns the value of each key, -1 where there is none."""
        ...

    def insert(self, keys: Keys, values: Values) -> None:
        """Adds distinct keys that are not there."""
        ...

    def remove(self, keys: Keys) -> None:
        """Removes distinct keys that are there."""
        ...

    def grow(self, rows: int) -> None:
        """Takes keys below `rows` from now on."""
        ...


class DenseIndex:
    """An index with 4 bytes for each row there is."""

    def __init__(self, rows: int) -> None:
        self._slots = np.full(rows, EMPTY, np.int32)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._slots.nbytes

    def lookup(self, keys: Keys) -> Values:
        """Returns the value of each key, -1 where there is none."""
        return self._slots[keys].astype(np.int64)

    def insert(self, keys: Keys, values: Values) -> None:
        """Adds distinct keys that are not there."""
        self._slots[keys] = values

    def remove(self, keys: Keys) -> None:
        """Removes distinct keys that are there."""
        self._slots[keys] = EMPTY

    def grow(self, rows: int) -> None:
        """Takes keys below `rows` from now on."""
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
        """Bytes that it takes."""
        return self._keys.nbytes + self._values.nbytes

    def __len__(self) -> int:
        return self._count

    def lookup(self, keys: Keys) -> Values:
        """Returns the value of each key, -1 where there is none."""
        found = np.full(len(keys), EMPTY, np.int64)
        places = self._places(keys)
        hits = places >= 0
        found[hits] = self._values[places[hits]]
        return found

    def insert(self, keys: Keys, values: Values) -> None:
        """Adds distinct keys that are not there."""
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
            # Of several that want one place, that which wrote last has it.
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
        """Removes distinct keys that are there."""
        places = self._places(keys)
        assert (places >= 0).all(), "what is removed is there"
        self._values[places] = REMOVED
        self._marks += len(keys)
        self._count -= len(keys)

    def grow(self, rows: int) -> None:
        """Takes keys below `rows` from now on."""
        if rows > 2**31 and self._key_type is np.int32:
            self._key_type = np.int64
            self._rebuild(self._capacity // 2)

    def items(self) -> tuple[Keys, Values]:
        """Returns all keys and their values."""
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
        """Returns where each key is in the table, -1 for what is not there."""
        found = np.full(len(keys), -1, np.int64)
        open_, places = np.arange(len(keys)), self._first(keys)
        while len(open_):
            values = self._values[places]
            same = (values >= 0) & (self._keys[places] == keys[open_])
            found[open_[same]] = places[same]
            left = ~same & (values != EMPTY)
            open_, places = open_[left], (places[left] + 1) & (self._capacity - 1)
        return found


def _capacity(entries: int) -> int:
    return 1 << max(2 * entries - 1, 7).bit_length()


def index_bytes(rows: int, slots: int) -> int:
    """Bytes of the index of `slots` of `rows` rows, as `make_index` makes it."""
    return min(4 * rows, _capacity(slots) * (12 if rows > 2**31 else 8))


def make_index(rows: int, slots: int) -> RowIndex:
    """Makes the smaller of the two kinds of index of `slots` of `rows` rows."""
    if 4 * rows <= index_bytes(rows, slots):
        return DenseIndex(rows)
    return HashIndex(slots, wide_keys=rows > 2**31)
