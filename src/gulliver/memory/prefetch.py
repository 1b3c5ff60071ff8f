"""Prefetching: loads residents in the order of a pass, before their use; then releases them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Protocol

from gulliver.memory.buffers import Presence

# [Note: one order] If data comes from other ranks, all ranks must request it in one order,
# whichever residents they use. So a *pass* (a forward or a backward of a model) is a list of
# residents that every rank loads once, in that order, used or not. A use loads all residents of the
# pass up to the used one, and a few ahead. Residents that a rank does not use are loaded when a
# later one is used, or at the end of the pass. So ranks may use different residents, and none waits
# for a rank that sends nothing.
#
# [Note: out of order] If a resident is used again after its release (a tied weight, a module called
# twice), the pass ends and starts again, and the resident is kept from then on. Outside of passes,
# a used resident is loaded immediately.
#
# [Note: from forward to backward] A backward begins with the residents that its forward used last.
# So the last residents of a forward stay, one fewer than the maximum of a pass; they are not loaded
# again, and one more is in flight before backward uses the first.
#
# A `Mover` defines what a resident is and how it is loaded. With a mover that only counts, this
# class predicts the memory of a recorded step over time.


class Pass(Enum):
    """Kind of the current pass."""

    NONE = auto()
    FORWARD = auto()
    BACKWARD = auto()


class Mover(Protocol):
    """Loads and releases residents."""

    def bring(self, resident: Any, /) -> None:
        """Starts loading a resident; updates it if it is already loaded."""

    def finish(self, resident: Any, /) -> None: ...

    def release(self, resident: Any, /) -> None: ...


class Prefetcher:
    """Loads residents ahead of use, and releases them afterwards."""

    def __init__(
        self,
        residents: Sequence[Any],
        mover: Mover,
        ahead: int,
        every: bool = True,
        tight: bool = False,
    ) -> None:
        self.residents, self.mover, self.ahead = list(residents), mover, ahead
        self.every, self.tight = every, tight
        self.current = Pass.NONE
        # From forward to backward; see the note above.
        self._stay, self._left = ahead + 1 if every and not tight else 1, 0
        self._order: list[Any] = []
        self._at: dict[int, int] = {}
        self._issued = self._reached = 0
        self._needed: Sequence[Any] = ()

    def begin(self, kind: Pass) -> None:
        """Begins a pass, from the first resident, or in backward from the last."""
        untouched = self._reached == 0 and self._order == self.residents
        if kind is Pass.FORWARD and untouched and self._issued:
            self.current = kind  # begun by `prefetch`
        elif kind is Pass.FORWARD:
            self.release_all(held=False)
            self._set_order(self.residents[:])
            self.current = kind
        else:
            # The forward kept its last residents, which backward uses first.
            self._set_order(self.residents[::-1])
            self.current, self._issued = kind, self._left
            if self._left > 1:
                self._issue(self._left + 1)

    def _set_order(self, order: list[Any]) -> None:
        self._order, self._issued, self._reached = order, 0, 0
        for resident in order:
            resident.used = False
        self._at = {id(resident): place for place, resident in enumerate(order)}

    def prefetch(self) -> None:
        self.begin(Pass.FORWARD)
        self._issue(self.ahead)
        self.current = Pass.NONE

    def end_forward(self, keep_last: bool) -> None:
        """Ends a forward pass; `keep_last` keeps the last residents, with which backward begins."""
        self.complete()
        if keep_last:
            for resident in self.residents[: -self._stay]:
                self.mover.finish(resident)
                self._release_used(resident)
            self._left = min(self._stay, len(self.residents)) if self.every else 0
        else:
            self.release_all(held=False)
        self.current = Pass.NONE

    def end_backward(self) -> None:
        self.complete()
        self.release_all()

    def release_all(self, held: bool = True) -> None:
        """Releases all residents; with `held` also residents that a graph may refer to."""
        self.current, self._left = Pass.NONE, 0
        for resident in self.residents:
            if held or not resident.held:
                resident.held = False
                self.mover.release(resident)
            else:
                self.mover.finish(resident)

    def use(self, resident: Any) -> None:
        """Waits for a resident, prefetches the next ones and releases used ones."""
        if self.current is Pass.NONE:
            if resident.presence is Presence.ABSENT:
                self.mover.bring(resident)
            self.mover.finish(resident)
            return
        place = self._find(resident)
        if place is None:
            self.mover.finish(resident)
            return
        resident.used = True
        if self.tight and resident.kept and resident.presence is Presence.WHOLE:
            return  # it stays loaded, so earlier residents need not be released first
        # Most uses are of a loaded resident that was reached before.
        if place < self._reached and resident.presence is Presence.WHOLE:
            return
        self._reached = max(self._reached, place + 1)
        self._release_passed(place)  # before loading others, which need the room
        while self._issued <= place:
            self._issue(self._issued + 1)
            if self.tight:
                self._pass_by(self._issued - 2 - self.ahead, place - 1)
        if resident.presence is Presence.ABSENT:
            self.mover.bring(resident)
        self.mover.finish(resident)
        self._release_passed(place)
        self._issue(place + 1 + self.ahead)

    def use_together(self, residents: Sequence[Any]) -> None:
        self._needed = residents
        try:
            for resident in residents:
                self.use(resident)
        finally:
            self._needed = ()

    def complete(self) -> None:
        """Loads and releases the residents of the pass that this rank did not use."""
        while self._issued < len(self._order):
            self._issue(self._issued + 1)
            self._pass_by(self._issued - 2 - self.ahead, len(self._order))
        self._reached = len(self._order)

    def _release_passed(self, place: int) -> None:
        """Releases used residents before a position of the pass, except its predecessor."""
        end = place - 1
        if self.current is Pass.FORWARD:
            end = min(end, len(self._order) - self._stay)
        for passed in self._order[: max(0, end)]:
            # Skipped residents will be used later, or released at the end of the pass.
            if passed.presence is Presence.WHOLE and (passed.used or not self.every):
                self._release_used(passed)

    def _pass_by(self, place: int, end: int) -> None:
        if 0 <= place < end:
            self.mover.finish(self._order[place])
            self._release_used(self._order[place])

    def _issue(self, count: int) -> None:
        if not self.every:
            self._issued = max(self._issued, min(count, len(self._order)))
            return
        while self._issued < min(count, len(self._order)):
            resident = self._order[self._issued]
            self._issued += 1
            self.mover.bring(resident)

    def _release_used(self, passed: Any) -> None:
        wanted = passed.kept or passed.held or passed in self._needed
        if passed.presence is Presence.WHOLE and not wanted:
            self.mover.release(passed)

    def _find(self, resident: Any) -> int | None:
        """Returns a resident's position in the pass; starts a new pass if the pass is beyond it."""
        place = self._at.get(id(resident))
        if resident.presence is not Presence.ABSENT or not self.every:
            return place
        if place is None or place < self._issued:
            resident.kept = True
            self.complete()
            forward = self.current is Pass.FORWARD
            self._set_order(self.residents[:] if forward else self.residents[::-1])
            place = self._at[id(resident)]
        return place
