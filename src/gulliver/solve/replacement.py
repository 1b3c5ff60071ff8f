"""Moves of objects between a fast tier of memory and what lies behind it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, get_args

from gulliver.errors import GulliverError, nearest
from gulliver.solve.cycle import NEVER, Cycle, Event, Span, plan_cycle


class InsufficientMemory(GulliverError):
    """What is needed does not fit beside what is in use."""

    def __init__(self, text: str, budget: int = 0) -> None:
        super().__init__(text)
        self.budget = budget


class Move(Enum):
    """What happens to an object."""

    LOAD = "load"
    """The content is read into the fast tier."""
    MAKE = "make"
    """Memory is made for it: there is no content, or none that is needed."""
    WRITE = "write"
    """The object leaves the fast tier, and its content is written behind it."""
    DROP = "drop"
    """The object leaves the fast tier; its content lies behind it already."""
    FORGET = "forget"
    """The content is gone, wherever it lay."""


@dataclass(frozen=True)
class Action:
    """A move of one object."""

    # Kind of move.
    move: Move
    # Object that moves.
    key: Hashable
    # Why, in a few words.
    reason: str = ""
    # Whether memory that is made has to be filled with zeros.
    zero: bool = False


# What a fast tier of memory holds, and what goes to make room: decisions only.
#
# `Replacement` is told of every event (`Event`) and answers with the moves that it takes. It
# counts bytes and knows neither tensors nor time: a write under way has ended for it. So what it
# decides depends on the events alone, and a plan counts the moves of a run without running it.
#
# The events of a step are the schedule of the next (`Cycle`), and a hint: whatever is used is
# served. As long as it holds, an object stays or leaves as it was planned, and what comes next is
# loaded as soon as there is room, in the order of use. What was not planned makes room by farthest
# next use, half as far for what has to be written first.


Policy = Literal["planned", "farthest", "recent"]
LONGEST = 1 << 16
"""Events after which a step that nobody ends is ended."""
FARTHEST_JUMP = 4
"""The cursor skips at most this part of a step at once."""


# [Note: where we are] An event that is not the one expected has been left out of this step (then
# others before it are skipped, and the cursor jumps to it), or was put in (then it stays). Which of
# the two it was, the next event tells: both places are remembered.
@dataclass
class _Object:
    name: str
    nbytes: int
    resident: bool = False
    stored: bool = False
    claimed: bool = False  # here, or on its way, for a use that has not come yet
    early: bool = False  # loaded ahead of its use
    pins: int = 0
    last: int = 0


class Replacement:
    """Decides what a fast tier of a given size holds."""

    def __init__(
        self,
        budget: int,
        *,
        backed: bool = True,
        ahead: int | None = None,
        policy: Policy = "planned",
    ) -> None:
        if policy not in get_args(Policy):
            raise GulliverError(f"unknown policy {policy!r}: {nearest(policy, get_args(Policy))}")
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
        """Takes a new object; one that is filled is put into the fast tier."""
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
        """Unpins an object: after as many as there were uses it may leave."""
        found = self._objects[key]
        if not found.pins:
            raise GulliverError(f"{found.name} is not in use: each done() follows one use()")
        found.pins -= 1
        self._note(Event("done", key))
        actions = []
        if not found.pins:
            self.pinned -= found.nbytes
            cycle = self._planned()
            # At once: what is written early has made room when that is needed.
            if cycle and cycle.next_use(key, 0) != NEVER and not cycle.stays(key, self._cursor):
                actions.append(self._leave(found, key, "not needed for long"))
        return actions + self._look_ahead()

    def restore(self, key: Hashable) -> bool:
        """Puts back what was to leave and could not be written; False where there is no room."""
        found = self._objects[key]
        if self.used + found.nbytes > self.budget:
            return False
        found.stored = False
        self._enter(found)
        return True

    def undo(self, key: Hashable, stored: bool, arrived: bool) -> None:
        """Takes back a use that failed before the object was there."""
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
        """Says that the tier behind was given the content of an object that is not here."""
        self._objects[key].stored = True

    def changed(self, key: Hashable) -> None:
        """Says that an object in the fast tier was changed without a use."""
        self._objects[key].stored = False

    def revert(self, key: Hashable) -> list[Action]:
        """Drops an object that is not in use, if the tier behind has its content."""
        found = self._objects[key]
        gone = not found.resident or found.pins or not found.stored
        return [] if gone else [self._leave(found, key, "what is behind holds")]

    def discard(self, key: Hashable) -> list[Action]:
        """Forgets the content of an object, which is zeros from then on."""
        found = self._objects[key]
        if found.pins:
            raise GulliverError(f"{found.name} is in use and cannot be discarded before done()")
        self._note(Event("discard", key))
        return self._forget(found, key) + self._look_ahead()

    def allocate_buffer(self, nbytes: int, name: str) -> list[Action]:
        """Makes room for memory that is no object's."""
        actions = self._room(nbytes, name)
        self._note(Event("lend", nbytes))
        self.lent += nbytes
        self.used += nbytes
        self._grown()
        return actions + self._look_ahead()

    def free_buffer(self, nbytes: int) -> list[Action]:
        """Takes back what was lent."""
        self._note(Event("give", nbytes))
        self.lent -= nbytes
        self.used -= nbytes
        return self._look_ahead()

    def set_budget(self, nbytes: int) -> list[Action]:
        """Changes the size of the fast tier."""
        if nbytes < self.pinned + self.lent:
            raise GulliverError(
                f"a memory budget of {nbytes} bytes is too small: {self.pinned + self.lent} bytes "
                f"are in use now: give at least {max(self.minimum, self.pinned + self.lent)}"
            )
        before, self.budget = self.budget, nbytes
        try:
            actions = self._room(0, "a smaller budget")
        except GulliverError:
            self.budget = before
            raise
        cycle = self.cycle
        # Between steps it holds for all of the next; within one it may come back every time.
        expected = cycle is not None and any(event.what == "budget" for event in cycle.events)
        if self._record:
            self._note(Event("budget", nbytes))
        else:
            expected = False
        if nbytes != before and cycle is not None and not expected:
            self._begun = nbytes, *self._begun[1:]  # for good, as far as one can know
            self._plan(cycle.events[: cycle.step])
        return actions + self._look_ahead()

    def end_step(self) -> None:
        """Makes the events since the last call the schedule."""
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

    # What there is

    def is_resident(self, key: Hashable) -> bool:
        """Whether an object is in the fast tier."""
        return self._objects[key].resident

    def is_stored(self, key: Hashable) -> bool:
        """Whether the tier behind has the content of an object."""
        return self._objects[key].stored

    # The schedule

    def _state(self) -> tuple[int, int, dict[Hashable, int]]:
        return self.budget, self.lent, {key: o.pins for key, o in self._objects.items() if o.pins}

    def _plan(self, events: Sequence[Event]) -> None:
        if self.policy == "recent" or not self.backed:
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
        """Plans what is loaded ahead anew, from the cursor on."""
        self._head = self._cursor
        for found in self._objects.values():
            found.claimed = False
        if self.cycle is not None:
            self.cycle.slack[:] = self.cycle.base

    def _note(self, event: Event) -> None:
        """Records an event, and finds it on the schedule."""
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

    # Loading ahead

    def _look_ahead(self) -> list[Action]:
        """Loads what comes next, as far as there is room, in the order of use."""
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
        """Makes sure of an object for a use to come; False where that has to wait."""
        if position % cycle.length not in cycle.outer:
            return True
        span = cycle.span(position)
        if found.pins or (span and position - span.length >= self._cursor):
            # There is a use before it. What leaves after that cannot be loaded yet.
            return span is None or span.keep
        if event.fresh or not (found.resident or found.stored):
            return True
        early = not found.resident and not self._leads(position, span)
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

    def _leads(self, position: int, span: Span | None) -> bool:
        """Whether a use is so near that its object is to be loaded whatever else is ahead."""
        return position - (span.lead if span else 0) <= self._cursor

    def _prefetch(self, key: Hashable, found: _Object, actions: list[Action]) -> bool:
        """Loads an object ahead of use, in the place of what is not needed for long."""
        short = self.used + found.nbytes - self.budget
        victims = [victim for victim in self._idle() if self._is_left(*victim)] if short > 0 else []
        if sum(victim.nbytes for _, victim in victims) < short:
            return False
        for name, victim in self._enough_victims(victims, short):
            actions.append(self._leave(victim, name, f"room for {found.name}"))
        actions.append(Action(Move.LOAD, key, "needed next"))
        self._enter(found)
        found.early = True
        self._early += found.nbytes
        return True

    # Making room

    def _room(self, nbytes: int, name: str) -> list[Action]:
        """Decides what goes so that `nbytes` more fit."""
        short = self.used + nbytes - self.budget
        if short <= 0:
            return []
        held = self.pinned + self.lent if self.backed else self.used
        if held + nbytes > self.budget:
            why = "" if self.backed else " and there is no disk or host memory behind it"
            least = max(self.minimum, held + nbytes)
            # No name here may refer to it: with its traceback it would keep all callers' frames,
            # and the memory that they look at, until garbage is collected.
            raise InsufficientMemory(
                f"the memory budget of {self.budget} bytes is too small: {name} needs {nbytes} "
                f"bytes beside {held} in use{why}: give at least {least}",
                least,
            )
        idle = self._idle()
        left = [victim for victim in idle if self._is_left(*victim)]
        if self._planned() and sum(victim.nbytes for _, victim in left) >= short:
            idle = left
        chosen = self._enough_victims(idle, short)
        actions = [self._leave(found, key, f"room for {name}") for key, found in chosen]
        if idle is not left:
            self._restart()
        return actions

    def _idle(self) -> list[tuple[Hashable, _Object]]:
        """Returns what may leave, what is least worth keeping first."""
        idle = [(key, o) for key, o in self._objects.items() if o.resident and not o.pins]
        return sorted(idle, key=lambda pair: self._rank(*pair))

    def _rank(self, key: Hashable, found: _Object) -> tuple[float, int]:
        if self.cycle is None or self.policy == "recent":
            return 0.0, found.last
        distance = self.cycle.next_use(key, self._cursor) - self._cursor
        return -distance / (1 if found.stored else 2), found.last

    def _is_left(self, key: Hashable, found: _Object) -> bool:
        """Whether nothing is planned for an object that is here."""
        if self.cycle is None:
            return True
        return not found.claimed and not self.cycle.stays(key, self._cursor)

    def _enough_victims(
        self, victims: Iterable[tuple[Hashable, _Object]], short: int
    ) -> list[tuple[Hashable, _Object]]:
        """Returns the first of the victims that make enough room, without those in excess."""
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
        # Most bytes that were pinned and lent at once so far.
        self.minimum = max(self.minimum, self.pinned + self.lent)


# What a middle tier of memory does for the tier before it: decisions only.
#
# Of three tiers the first decides as if there were two (`Replacement`). What it loads has to be
# in the middle one until it has been copied, what it writes is copied there: these are uses of
# the middle tier's objects, by which a `Replacement` of its own decides what lies there, what
# goes on to the last tier, and what is read from there ahead of the next step's loads. So both
# follow from the events of the first tier alone, whoever carries them out, or only counts.


# [Note: loads under way] An object that is loaded stays in the middle tier from the decision until
# its use in the first, since only then it has certainly been copied. Loads run far ahead where the
# first tier has room. If all of the middle tier were held by them, nothing could be written there,
# and so the oldest is waited for where there is no room.
class Tier(Protocol):
    """A tier whose objects are named by those of the tier before it."""

    def use(self, key: Hashable, fresh: bool, /) -> None:
        """Pins an object; fresh if it will be overwritten."""

    def done(self, key: Hashable, /) -> None:
        """Unpins it."""

    def discard(self, key: Hashable, /) -> None:
        """Forgets its content."""


class Transit:
    """Uses a middle tier as the moves of the tier before it ask for."""

    def __init__(self, tier: Tier, behind: int) -> None:
        self._tier, self._behind = tier, behind
        self._sizes: dict[Hashable, int] = {}
        self._stays: dict[Hashable, bool] = {}
        self._filled: set[Hashable] = set()
        self._coming: dict[Hashable, None] = {}

    @property
    def used(self) -> int:
        """Bytes of the objects that have content here or behind."""
        return sum(self._sizes[key] for key in self._filled)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sizes

    def add(self, key: Hashable, nbytes: int) -> None:
        """Takes a new object, which has no content yet."""
        self._sizes[key] = nbytes
        if nbytes > self._behind:
            self._stays[key] = False
        else:
            self._behind -= nbytes

    def remove(self, key: Hashable) -> None:
        """Forgets an object, which its tier forgets, too, in use or not."""
        nbytes = self._sizes.pop(key)
        self._behind += nbytes if self._stays.pop(key, None) is None else 0
        self._filled.discard(key)

    def fill(self, key: Hashable) -> None:
        """Says that an object has content from now on."""
        self._filled.add(key)

    def needs_memory(self, key: Hashable) -> bool:
        """Whether an object that has to stay here has no memory yet."""
        return not self._stays.get(key, True)

    def expect(self, key: Hashable) -> None:
        """Begins a load into the tier before; `end_prefetch` ends it."""
        if key not in self._coming:
            self._use(key, fresh=False)
            self._coming[key] = None

    def end_prefetch(self, key: Hashable) -> None:
        """Says that an object is in the tier before, or no longer wanted there."""
        if key in self._coming:
            del self._coming[key]
            self._tier.done(key)

    def lost(self, key: Hashable) -> None:
        """Says that a load has failed, and its object is pinned no more."""
        self._coming.pop(key, None)

    def begin_write(self, key: Hashable) -> None:
        """Makes room for an object that leaves the tier before."""
        self._use(key, fresh=True)

    def end_write(self, key: Hashable) -> None:
        """Says that its content is on its way."""
        if self.needs_memory(key):
            self._stays[key] = True  # its pin is not given back
        else:
            self._tier.done(key)

    def forget(self, key: Hashable) -> None:
        """Says that the content of an object is out of date."""
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
    """Decides for a middle tier what the moves of the tier before it take, without making them."""

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
        """Does what a move of the tier before asks for."""
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
        """Says that an object is used in the tier before, and perhaps changed."""
        self._transit.end_prefetch(key)
        if write:
            self._transit.forget(key)

    # What `Transit` asks for.

    def use(self, key: Hashable, fresh: bool) -> None:
        """Pins an object."""
        self._run(self.core.use(key, fresh=fresh))

    def done(self, key: Hashable) -> None:
        """Unpins it."""
        self._run(self.core.done(key))

    def discard(self, key: Hashable) -> None:
        """Forgets its content."""
        self._run(self.core.discard(key))
