"""What is kept in a fast tier of memory, and what goes to make room: decisions only.

`Replacement` is told of every access and answers with the moves that it takes. It counts bytes and
knows neither tensors nor time: a write under way has ended for it. So what it decides depends on
the accesses alone, and a simulation decides what a run does.

The accesses of a step are the schedule of the next. It is a hint: whatever is used is served.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from gulliver.errors import GulliverError

NEVER = 1 << 60
"""Position of a use that is not on the schedule."""


class Move(Enum):
    """What happens to an object."""

    LOAD = "load"
    """Its content is read into the fast tier."""
    MAKE = "make"
    """Memory is made for it: there is no content, or none that is needed."""
    WRITE = "write"
    """It leaves the fast tier, and its content is written behind it."""
    DROP = "drop"
    """It leaves the fast tier; its content lies behind it already."""
    FORGET = "forget"
    """Its content is gone, wherever it lay."""


@dataclass(frozen=True)
class Action:
    """A move of one object.

    Attributes:
        move: kind of move.
        key: object that moves.
        reason: why, in a few words.
        zero: of memory that is made, whether it has to be filled with zeros.
    """

    move: Move
    key: Hashable
    reason: str = ""
    zero: bool = False


@dataclass
class _Object:
    name: str
    nbytes: int
    resident: bool = False
    stored: bool = False
    pins: int = 0
    last: int = 0

    @property
    def empty(self) -> bool:
        return not self.resident and not self.stored


class Replacement:
    """Decides what a fast tier of a given size holds.

    Args:
        budget: size of the fast tier, in bytes.
        backed: whether there is a tier behind it; without one nothing can leave.
    """

    def __init__(self, budget: int, *, backed: bool = True) -> None:
        self.budget, self.backed = budget, backed
        self.minimum = 0
        self.pinned = self.lent = self.used = 0
        self._objects: dict[Hashable, _Object] = {}
        self._clock = self._cursor = 0
        self._record: list[Hashable] = []
        self._schedule: list[Hashable] = []
        self._positions: dict[Hashable, list[int]] = {}

    def add(self, key: Hashable, name: str, nbytes: int, filled: bool) -> list[Action]:
        """Takes a new object; one that is filled is put into the fast tier.

        Raises:
            GulliverError: there is no room for it.
        """
        found = _Object(name, nbytes)
        actions: list[Action] = []
        if filled:
            actions = self._room(nbytes, name)
            actions.append(Action(Move.MAKE, key, "added"))
            self._enter(found)
        self._objects[key] = found
        return actions

    def remove(self, key: Hashable) -> list[Action]:
        """Forgets an object."""
        actions = self.discard(key)
        del self._objects[key]
        return actions

    def use(self, key: Hashable, write: bool = False, fresh: bool = False) -> list[Action]:
        """Pins an object in the fast tier.

        Raises:
            GulliverError: there is no room for it beside all that is pinned; nothing was changed.
        """
        found = self._objects[key]
        actions: list[Action] = []
        if not found.resident:
            actions = self._room(found.nbytes, found.name)
            empty = fresh or not found.stored
            move = Move.MAKE if empty else Move.LOAD
            actions.append(Action(move, key, "used", zero=empty and not fresh))
            self._enter(found)
        self._note(key)
        found.last = self._clock
        if not found.pins:
            self.pinned += found.nbytes
        found.pins += 1
        self.minimum = max(self.minimum, self.pinned + self.lent)
        if write or fresh:
            found.stored = False
        return actions

    def done(self, key: Hashable) -> list[Action]:
        """Unpins an object."""
        found = self._objects[key]
        if not found.pins:
            raise GulliverError(f"{found.name} is not in use: each done() follows one use()")
        found.pins -= 1
        if not found.pins:
            self.pinned -= found.nbytes
        return []

    def discard(self, key: Hashable) -> list[Action]:
        """Forgets the content of an object."""
        found = self._objects[key]
        if found.pins:
            raise GulliverError(
                f"{found.name} is in use and cannot be discarded: done() comes first"
            )
        if found.empty:
            return []
        if found.resident:
            found.resident = False
            self.used -= found.nbytes
        found.stored = False
        return [Action(Move.FORGET, key)]

    def lend(self, nbytes: int, name: str) -> list[Action]:
        """Makes room for memory that is no object's.

        Raises:
            GulliverError: there is no room beside all that is pinned; nothing was changed.
        """
        actions = self._room(nbytes, name)
        self.lent += nbytes
        self.used += nbytes
        self.minimum = max(self.minimum, self.pinned + self.lent)
        return actions

    def give(self, nbytes: int) -> list[Action]:
        """Takes back what was lent."""
        self.lent -= nbytes
        self.used -= nbytes
        return []

    def set_budget(self, nbytes: int) -> list[Action]:
        """Changes the size of the fast tier.

        Raises:
            GulliverError: what is pinned and lent does not fit; nothing was changed.
        """
        if nbytes < self.pinned + self.lent:
            raise GulliverError(
                f"a memory budget of {nbytes} bytes is too small: {self.pinned + self.lent} bytes "
                "are in use now"
            )
        before, self.budget = self.budget, nbytes
        try:
            return self._room(0, "budget")
        except GulliverError:
            self.budget = before
            raise

    def end_step(self) -> None:
        """Makes the accesses since the last call the schedule."""
        self._schedule, self._record, self._cursor = self._record, [], 0
        self._positions = {}
        for position, key in enumerate(self._schedule):
            self._positions.setdefault(key, []).append(position)

    def is_resident(self, key: Hashable) -> bool:
        """Whether an object is in the fast tier."""
        return self._objects[key].resident

    def is_stored(self, key: Hashable) -> bool:
        """Whether the tier behind has the content of an object."""
        return self._objects[key].stored

    def _enter(self, found: _Object) -> None:
        found.resident = True
        self.used += found.nbytes

    def _note(self, key: Hashable) -> None:
        self._clock += 1
        self._record.append(key)
        positions = self._positions.get(key, ())
        place = bisect_left(positions, self._cursor)
        if place < len(positions):
            self._cursor = positions[place] + 1

    def _next_use(self, key: Hashable) -> int:
        positions = self._positions.get(key)
        if not positions:
            return NEVER
        place = bisect_left(positions, self._cursor)
        if place < len(positions):
            return positions[place]
        return positions[0] + len(self._schedule)

    def _room(self, nbytes: int, name: str) -> list[Action]:
        """Decides what goes so that `nbytes` more fit."""
        short = self.used + nbytes - self.budget
        idle = [key for key, o in self._objects.items() if o.resident and not o.pins]
        if short > 0 and (not self.backed or self.pinned + self.lent + nbytes > self.budget):
            least = max(self.minimum, self.pinned + self.lent + nbytes)
            if not self.backed:
                least = max(least, self.used + nbytes)
            raise GulliverError(
                f"the memory budget of {self.budget} bytes is too small: {name} needs {nbytes} "
                f"bytes beside {least - nbytes} in use: give at least {least}"
            )
        actions = []
        if short > 0:
            idle.sort(key=lambda key: (-self._next_use(key), self._objects[key].last))
            for key in idle:
                if short <= 0:
                    break
                found = self._objects[key]
                move = Move.DROP if found.stored else Move.WRITE
                actions.append(Action(move, key, f"room for {name}"))
                found.resident, found.stored = False, True
                self.used -= found.nbytes
                short -= found.nbytes
        return actions
