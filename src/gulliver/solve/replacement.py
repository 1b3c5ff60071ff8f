"""Decides which objects to move between a fast memory tier and the slower tier behind it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, get_args

from gulliver.errors import GulliverError, check_known
from gulliver.solve.cycle import NEVER, Cycle, Event, plan_cycle


class InsufficientMemory(GulliverError):
    """A request does not fit into the tier along with the objects in use."""

    def __init__(self, text: str, budget: int = 0) -> None:
        super().__init__(text)
        self.budget = budget


class Move(Enum):
    """Kind of move."""

    LOAD = "load"
    """The content is read into the fast tier."""
    MAKE = "make"
    """Memory is allocated without reading: there is no content, or it is not needed."""
    WRITE = "write"
    """The object leaves the fast tier, and its content is written to the slower tier."""
    DROP = "drop"
    """The object leaves the fast tier; the slower tier already has its content."""
    FORGET = "forget"
    """The content is discarded in all tiers."""


@dataclass(frozen=True)
class Action:
    """A move of one object."""

    # Kind of move.
    move: Move
    # Object that moves.
    key: Hashable
    # Reason, in a few words.
    reason: str = ""
    # Whether allocated memory must be zeroed.
    zero: bool = False


# Residency and eviction policy of a fast tier: decisions only.
#
# `Replacement` receives every event (`Event`) and returns the moves it requires. It counts bytes
# and knows neither tensors nor time: a write in flight has already completed for it. So its
# decisions depend on the events alone, and a planner can count the moves of a run without running
# it.
#
# The events of a step are the schedule of the next (`Cycle`), used as a hint: any use is served.
# While the schedule holds, an object stays or leaves as planned, and upcoming objects are loaded in
# order of use as soon as they fit. Otherwise objects are evicted by farthest next use, with half
# the distance for those that must be written first.


Policy = Literal["planned", "farthest"]
LONGEST = 1 << 16  # maximum number of events after which a step ends automatically
FARTHEST_JUMP = 4  # the cursor may skip at most 1 / FARTHEST_JUMP of a step at once


# [Note: where we are] An unexpected event means either that events of this step were skipped (the
# cursor jumps past them) or that an extra event was inserted (the cursor stays). The next event
# shows which, so both positions are remembered.
@dataclass
class _Object:
    name: str
    nbytes: int
    resident: bool = False
    stored: bool = False
    claimed: bool = False  # here or in flight, for a future use
    early: bool = False  # loaded ahead of its use
    pins: int = 0
    last: int = 0


class Replacement:
    """Decides which objects reside in a fast tier of a given size."""

    def __init__(
        self,
        budget: int,
        *,
        backed: bool = True,
        ahead: int | None = None,
        policy: Policy = "planned",
    ) -> None:
        check_known("policy", policy, get_args(Policy))
        self.budget, self.backed, self.ahead, self.policy = budget, backed, ahead, policy
        self.minimum = self.pinned = self.lent = self.used = 0
        self.cycle: Cycle | None = None
        self._objects: dict[Hashable, _Object] = {}
        self._record: list[Event] = []
        self._clock = self._cursor = self._head = self._early = self._phase = 0
        self._anchor: tuple[int, Hashable] | None = None
        self._begun: tuple[int, int, dict[Hashable, int]] = (budget, 0, {})

    # Events

    def add(self, key: Hashable, name: str, nbytes: int, filled: bool) -> list[Action]:
        """Adds an object; if `filled`, it has content and is placed in the fast tier."""
        found = _Object(name, nbytes)
        actions: list[Action] = []
        if filled:
            actions = self._room(nbytes, name)
            actions.append(Action(Move.MAKE, key, "added"))
            self._enter(found)
        self._objects[key] = found
        return actions

    def remove(self, key: Hashable) -> list[Action]:
        actions = self._forget(self._objects[key], key)
        del self._objects[key]
        return actions

    def use(self, key: Hashable, write: bool = False, fresh: bool = False) -> list[Action]:
        """Pins an object in the fast tier."""
        found = self._objects[key]
        actions: list[Action] = []
        if not found.resident:
            actions = self._room(found.nbytes, found.name)
            empty = fresh or not found.stored
            move = Move.MAKE if empty else Move.LOAD
            actions.append(Action(move, key, "used", zero=empty and not fresh))
            self._enter(found)
        self._unclaim(found)
        self._note(Event("use", key, write, fresh))
        found.last = self._clock
        if not found.pins:
            self.pinned += found.nbytes
        found.pins += 1
        self._grown()
        if write or fresh:
            found.stored = False
        return actions + self._look_ahead()

    def done(self, key: Hashable) -> list[Action]:
        """Unpins an object; it becomes evictable after as many calls as there were uses."""
        found = self._objects[key]
        if not found.pins:
            raise GulliverError(f"{found.name} is not in use; each done() must follow one use()")
        found.pins -= 1
        self._note(Event("done", key))
        actions = []
        if not found.pins:
            self.pinned -= found.nbytes
            cycle = self._planned()
            # Immediately: an early write frees memory before it is needed.
            if cycle and cycle.next_use(key, 0) != NEVER and not cycle.stays(key, self._cursor):
                actions.append(self._leave(found, key, "not needed soon"))
        return actions + self._look_ahead()

    def restore(self, key: Hashable) -> bool:
        """Reverts an eviction whose write failed; False if the object no longer fits."""
        found = self._objects[key]
        if self.used + found.nbytes > self.budget:
            return False
        found.stored = False
        self._enter(found)
        return True

    def undo(self, key: Hashable, stored: bool, arrived: bool) -> None:
        """Reverts a use that failed before the object was loaded."""
        found = self._objects[key]
        found.pins -= 1
        if not found.pins:
            self.pinned -= found.nbytes
        found.stored = stored
        if not arrived:
            found.resident = False
            self.used -= found.nbytes
        if self._record and self._record[-1][:2] == ("use", key):
            self._record.pop()

    def keep(self, key: Hashable) -> None:
        """Records that the slower tier received the content of a non-resident object."""
        self._objects[key].stored = True

    def changed(self, key: Hashable) -> None:
        """Records that a resident object was modified without a use."""
        self._objects[key].stored = False

    def revert(self, key: Hashable) -> list[Action]:
        """Drops an idle object if the slower tier has its content."""
        found = self._objects[key]
        gone = not found.resident or found.pins or not found.stored
        return [] if gone else [self._leave(found, key, "the tier behind has its content")]

    def discard(self, key: Hashable) -> list[Action]:
        """Discards the content of an object, which then reads as zeros."""
        found = self._objects[key]
        if found.pins:
            raise GulliverError(f"{found.name} is in use; call done() before discard()")
        self._note(Event("discard", key))
        return self._forget(found, key) + self._look_ahead()

    def allocate_buffer(self, nbytes: int, name: str) -> list[Action]:
        """Reserves memory that belongs to no object."""
        actions = self._room(nbytes, name)
        self._note(Event("lend", nbytes))
        self.lent += nbytes
        self.used += nbytes
        self._grown()
        return actions + self._look_ahead()

    def free_buffer(self, nbytes: int) -> list[Action]:
        self._note(Event("give", nbytes))
        self.lent -= nbytes
        self.used -= nbytes
        return self._look_ahead()

    def set_budget(self, nbytes: int) -> list[Action]:
        if nbytes < self.pinned + self.lent:
            raise GulliverError(
                f"a memory budget of {nbytes} bytes is too small because "
                f"{self.pinned + self.lent} bytes are in use; use at least "
                f"{max(self.minimum, self.pinned + self.lent)}"
            )
        before, self.budget = self.budget, nbytes
        try:
            actions = self._room(0, "a smaller budget")
        except GulliverError:
            self.budget = before
            raise
        cycle = self.cycle
        # A change between steps applies to the whole next step; one within a step may recur.
        expected = cycle is not None and any(event.what == "budget" for event in cycle.events)
        if self._record:
            self._note(Event("budget", nbytes))
        else:
            expected = False
        if nbytes != before and cycle is not None and not expected:
            self._begun = nbytes, *self._begun[1:]  # permanently, as far as is known
            self._plan(cycle.events[: cycle.step])
        return actions + self._look_ahead()

    def end_step(self) -> None:
        """Adopts the events since the last call as the schedule."""
        record, self._record = self._record, []
        cycle, self._anchor, begun = self.cycle, None, self._state()
        if cycle is not None and record == cycle.events[: cycle.step] and begun == self._begun:
            self._phase = (self._phase + 1) % cycle.repeats
            if not self._phase:
                self._head = max(self._head - cycle.length, 0)
                cycle.slack[:] = [*cycle.slack[cycle.length :], *cycle.base[: cycle.length]]
        elif record:
            self._begun, self._cursor, self._phase = begun, 0, 0
            self._plan(record)
        self._cursor = self._phase * cycle.step if cycle is not None else 0

    # Queries

    def is_stored(self, key: Hashable) -> bool:
        return self._objects[key].stored

    # The schedule

    def _state(self) -> tuple[int, int, dict[Hashable, int]]:
        return self.budget, self.lent, {key: o.pins for key, o in self._objects.items() if o.pins}

    def _plan(self, events: Sequence[Event]) -> None:
        if not self.backed:
            return
        sizes = {key: found.nbytes for key, found in self._objects.items()}
        if self.cycle is not None:
            self._cursor -= self._phase * self.cycle.step
        self._phase = 0
        if self.policy == "planned":
            self.cycle = plan_cycle(events, sizes, *self._begun, self.ahead)
        else:
            self.cycle = Cycle(events, sizes, *self._begun, rounds=0)
        self._restart()

    def _planned(self) -> Cycle | None:
        return self.cycle if self.policy == "planned" and self.backed else None

    def _restart(self) -> None:
        self._head = self._cursor
        for found in self._objects.values():
            found.claimed = False
        if self.cycle is not None:
            self.cycle.slack[:] = self.cycle.base

    def _note(self, event: Event) -> None:
        self._clock += 1
        self._record.append(event)
        if len(self._record) >= LONGEST:
            self.end_step()
        cycle = self.cycle
        if cycle is None:
            return
        end = (self._phase + 1) * cycle.step
        if self._cursor < end and cycle.matches(self._cursor, event):
            self._cursor += 1
            if self._anchor is not None and self._anchor[1] != event.key:
                self._anchor = None
            return
        back, self._anchor = self._anchor, None
        if back is not None and back[0] < end and cycle.matches(back[0], event):
            self._jump(back[0] + 1)
            return
        place = cycle.after(event, self._cursor, end) if event.what == "use" else None
        if place is not None and place - self._cursor <= max(cycle.step // FARTHEST_JUMP, 16):
            self._anchor = self._cursor, event.key
            self._jump(place + 1)

    def _jump(self, cursor: int) -> None:
        self._cursor = cursor
        self._restart()

    # Lookahead

    def _look_ahead(self) -> list[Action]:
        """Loads upcoming objects in order of use, as far as they fit."""
        cycle, actions = self._planned(), []
        if cycle is None:
            return actions
        self._head = max(self._head, self._cursor)
        while self._head < self._cursor + cycle.length:
            event = cycle.events[self._head % cycle.length]
            found = self._objects.get(event.key) if event.what == "use" else None
            if found and not self._claim(cycle, self._head, event, found, actions):
                break
            self._head += 1
        return actions

    def _claim(
        self, cycle: Cycle, position: int, event: Event, found: _Object, actions: list[Action]
    ) -> bool:
        """Reserves an object for a future use; False if it has to wait."""
        if position % cycle.length not in cycle.outer:
            return True
        span = cycle.span(position)
        if found.pins or (span and position - span.length >= self._cursor):
            # It is used before. If it leaves after that use, it cannot be loaded yet.
            return span is None or span.keep
        if event.fresh or not (found.resident or found.stored):
            return True
        early = not found.resident and position - (span.lead if span else 0) > self._cursor
        if early and self.ahead is not None and self._early + found.nbytes > self.ahead:
            return False
        keep, lead = (span.keep, span.lead) if span else (False, 0)
        claimed = slice(self._cursor, max(position - lead, self._cursor))
        if not keep and claimed.start < claimed.stop:
            part = cycle.slack[claimed]
            if int(part.min()) < found.nbytes:
                return False
        if not found.resident and not self._prefetch(event.key, found, actions):
            return False
        if not keep:
            cycle.slack[claimed] -= found.nbytes
        found.claimed = True
        return True

    def _prefetch(self, key: Hashable, found: _Object, actions: list[Action]) -> bool:
        """Loads an object ahead of its use, replacing objects that are not needed soon."""
        short = self.used + found.nbytes - self.budget
        victims = [victim for victim in self._idle() if self._is_left(*victim)] if short > 0 else []
        if sum(victim.nbytes for _, victim in victims) < short:
            return False
        for name, victim in self._enough_victims(victims, short):
            actions.append(self._leave(victim, name, f"evicted for {found.name}"))
        actions.append(Action(Move.LOAD, key, "needed next"))
        self._enter(found)
        found.early = True
        self._early += found.nbytes
        return True

    # Evictions

    def _room(self, nbytes: int, name: str) -> list[Action]:
        short = self.used + nbytes - self.budget
        if short <= 0:
            return []
        held = self.pinned + self.lent if self.backed else self.used
        if held + nbytes > self.budget:
            why = "" if self.backed else ", and there is no disk or host memory behind it"
            least = max(self.minimum, held + nbytes)
            # No local may refer to the error: with its traceback it would keep all callers' frames,
            # and the memory they reference, until garbage collection.
            raise InsufficientMemory(
                f"the memory budget of {self.budget} bytes is too small: {name} needs {nbytes} "
                f"bytes in addition to {held} in use{why}; use at least {least}",
                least,
            )
        idle = self._idle()
        left = [victim for victim in idle if self._is_left(*victim)]
        if self._planned() and sum(victim.nbytes for _, victim in left) >= short:
            idle = left
        chosen = self._enough_victims(idle, short)
        actions = [self._leave(found, key, f"evicted for {name}") for key, found in chosen]
        if idle is not left:
            self._restart()
        return actions

    def _idle(self) -> list[tuple[Hashable, _Object]]:
        idle = [(key, o) for key, o in self._objects.items() if o.resident and not o.pins]
        return sorted(idle, key=lambda pair: self._rank(*pair))

    def _rank(self, key: Hashable, found: _Object) -> tuple[float, int]:
        if self.cycle is None:
            return 0.0, found.last
        distance = self.cycle.next_use(key, self._cursor) - self._cursor
        return -distance / (1 if found.stored else 2), found.last

    def _is_left(self, key: Hashable, found: _Object) -> bool:
        if self.cycle is None:
            return True
        return not found.claimed and not self.cycle.stays(key, self._cursor)

    def _enough_victims(
        self, victims: Iterable[tuple[Hashable, _Object]], short: int
    ) -> list[tuple[Hashable, _Object]]:
        """Returns the first victims that free enough memory, minus those not needed for it."""
        chosen: list[tuple[Hashable, _Object]] = []
        for victim in victims:
            if short <= 0:
                break
            chosen.append(victim)
            short -= victim[1].nbytes
        for victim in chosen[::-1]:
            if victim[1].nbytes <= -short:
                chosen.remove(victim)
                short += victim[1].nbytes
        return chosen

    def _enter(self, found: _Object) -> None:
        found.resident = True
        self.used += found.nbytes

    def _leave(self, found: _Object, key: Hashable, reason: str) -> Action:
        move = Move.DROP if found.stored else Move.WRITE
        self._unclaim(found)
        found.resident, found.stored = False, True
        self.used -= found.nbytes
        return Action(move, key, reason)

    def _forget(self, found: _Object, key: Hashable) -> list[Action]:
        if not found.resident and not found.stored:
            return []
        self._unclaim(found)
        if found.resident:
            self.used -= found.nbytes
        if found.pins:
            self.pinned -= found.nbytes
        found.resident = found.stored = False
        return [Action(Move.FORGET, key)]

    def _unclaim(self, found: _Object) -> None:
        found.claimed = False
        if found.early:
            found.early = False
            self._early -= found.nbytes

    def _grown(self) -> None:
        # Peak of pinned plus lent bytes so far.
        self.minimum = max(self.minimum, self.pinned + self.lent)


# The middle one of three memory tiers: decisions only.
#
# The first tier decides as if there were two (`Replacement`). An object that it loads must be in
# the middle tier until it has been copied, and its writes are copied there. These count as uses of
# the middle tier's objects, for which a second `Replacement` decides what stays, what moves on to
# the last tier, and what is prefetched for the next step's loads. So both depend only on the events
# of the first tier, whether the moves are executed or only counted.


# [Note: loads in flight] A loaded object stays in the middle tier from the decision until its use
# in the first, because only then it has certainly been copied. Loads run far ahead if the first
# tier has memory. If they held all of the middle tier, nothing could be written there, so if memory
# runs out the oldest load is waited for.
class Tier(Protocol):
    """A tier whose contents follow from the moves of the faster tier."""

    def use(self, key: Hashable, fresh: bool, /) -> None:
        """Pins an object; `fresh` if it will be overwritten."""

    def done(self, key: Hashable, /) -> None: ...

    def discard(self, key: Hashable, /) -> None: ...


class Transit:
    """Routes transfers of the fast tier through a middle tier."""

    def __init__(self, tier: Tier, behind: int) -> None:
        self._tier, self._behind = tier, behind
        self._sizes: dict[Hashable, int] = {}
        self._stays: dict[Hashable, bool] = {}
        self._filled: set[Hashable] = set()
        self._coming: dict[Hashable, None] = {}

    @property
    def used(self) -> int:
        """Bytes of objects with content in this tier or slower ones."""
        return sum(self._sizes[key] for key in self._filled)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sizes

    def add(self, key: Hashable, nbytes: int) -> None:
        self._sizes[key] = nbytes
        if nbytes > self._behind:
            self._stays[key] = False
        else:
            self._behind -= nbytes

    def remove(self, key: Hashable) -> None:
        nbytes = self._sizes.pop(key)
        self._behind += nbytes if self._stays.pop(key, None) is None else 0
        self._filled.discard(key)

    def fill(self, key: Hashable) -> None:
        self._filled.add(key)

    def needs_memory(self, key: Hashable) -> bool:
        """Whether an object that must stay in this tier has no memory yet."""
        return not self._stays.get(key, True)

    def expect(self, key: Hashable) -> None:
        """Begins a load into the faster tier; `end_prefetch` ends it."""
        if key not in self._coming:
            self._use(key, fresh=False)
            self._coming[key] = None

    def end_prefetch(self, key: Hashable) -> None:
        """Ends a load: the object has arrived or is no longer needed."""
        if key in self._coming:
            del self._coming[key]
            self._tier.done(key)

    def lost(self, key: Hashable) -> None:
        """Ends a failed load and unpins its object."""
        self._coming.pop(key, None)

    def begin_write(self, key: Hashable) -> None:
        self._use(key, fresh=True)

    def end_write(self, key: Hashable) -> None:
        """Marks an evicted object's content as in flight."""
        if self.needs_memory(key):
            self._stays[key] = True  # its pin is kept
        else:
            self._tier.done(key)

    def forget(self, key: Hashable) -> None:
        if key in self._filled:
            self._filled.remove(key)
            if key not in self._stays:
                self._tier.discard(key)

    def _use(self, key: Hashable, fresh: bool) -> None:
        while True:
            try:
                return self._tier.use(key, fresh)
            except InsufficientMemory:
                if not self._coming:
                    raise
            self.end_prefetch(next(iter(self._coming)))


class MiddleReplacement:
    """Decides the moves of a middle tier from those of the faster tier, without executing them."""

    def __init__(
        self,
        budget: int,
        behind: int,
        run: Callable[[Iterable[Action]], None],
        policy: Policy = "planned",
    ) -> None:
        self.core, self._run = Replacement(budget, policy=policy), run
        self._transit = Transit(self, behind)

    def follow(self, action: Action, nbytes: int) -> None:
        key, transit = action.key, self._transit
        if action.move is Move.LOAD:
            transit.expect(key)
        elif action.move is not Move.MAKE:
            transit.end_prefetch(key)
        if action.move is Move.WRITE:
            if key not in transit:
                self._run(self.core.add(key, str(key), nbytes, filled=False))
                transit.add(key, nbytes)
            transit.fill(key)
            transit.begin_write(key)
            transit.end_write(key)
        elif action.move is Move.FORGET:
            transit.forget(key)

    def used(self, key: Hashable, write: bool) -> None:
        """Records that an object is used, and possibly modified, in the faster tier."""
        self._transit.end_prefetch(key)
        if write:
            self._transit.forget(key)

    # Interface for `Transit`.

    def use(self, key: Hashable, fresh: bool) -> None:
        self._run(self.core.use(key, fresh=fresh))

    def done(self, key: Hashable) -> None:
        self._run(self.core.done(key))

    def discard(self, key: Hashable) -> None:
        self._run(self.core.discard(key))
