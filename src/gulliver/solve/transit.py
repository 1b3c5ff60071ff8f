"""What a middle tier of memory does for the tier before it: decisions only.

Of three tiers the first decides as if there were two (`Replacement`). What it loads has to be in
the middle one until it has been copied, what it writes is copied there: these are uses of the
middle tier's objects, by which a `Replacement` of its own decides what lies there, what goes on to
the last tier, and what is read from there ahead of the next step's loads. So both follow from the
events of the first tier alone, whoever carries them out, or only counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Protocol

from gulliver.solve.replacement import Action, Move, NoRoom, Policy, Replacement


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

    def needs_place(self, key: Hashable) -> bool:
        """Whether an object that has to stay here has no memory yet."""
        return not self._stays.get(key, True)

    def expect(self, key: Hashable) -> None:
        """Begins a load into the tier before; `landed` ends it."""
        if key not in self._coming:
            self._use(key, fresh=False)
            self._coming[key] = None

    def landed(self, key: Hashable) -> None:
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
        if self.needs_place(key):
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
            except NoRoom:
                if not self._coming:
                    raise
            self.landed(next(iter(self._coming)))


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
            transit.landed(key)
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
        self._transit.landed(key)
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
