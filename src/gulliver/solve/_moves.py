"""Moves of objects between a fast tier of memory and what lies behind it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum

from gulliver.errors import GulliverError


class NoRoom(GulliverError):
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
