"""A flight recorder of the collectives that each rank starts, to find ranks that disagree."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from gulliver.errors import GulliverError

KEPT = 64
"""Entries of a group; no rank is further ahead of another that waits for it."""

CODES = 2047
"""Purposes that tags can tell apart; 0 is for those of no purpose."""

Entries = dict[str, list[tuple[int, str]]]
"""Numbers of collectives, and what they are for, by the names of groups."""


# [Note: different programs] All ranks must hand in the collectives of a group in one order. One
# that calls modules in another order, or alone, would send a part of one chunk where the others
# wait for another's: parts of one size would be taken, and others end gloo's process with SIGABRT.
# So whoever knows what a collective is for passes a `Purpose`. It is a part of the tags of its
# messages, which costs nothing: what does not belong together never meets, and waits. The last
# entries of each group are kept here. The watchdog (`_watchdog.py`) of a rank that has handed in
# nothing for a second puts them into the store and compares them with those of the others. Where
# they differ all ranks raise, or are ended where they wait in C++.
@dataclass(frozen=True)
class Purpose:
    """What a collective is for."""

    text: str = ""  # Continues "rank 1 ..."
    code: int = 0  # Number, 1 to 2046; no two purposes that may meet have the same
    wire: int = 0  # Number of the wire format; see `with_wire`


ANY = Purpose()
PATIENCE_S = 1.0
"""Waiting so long, one looks whether the others come at all."""

READING_S = 2.0
"""The others look once a second for what a rank has said."""

MEETINGS = frozenset(
    {
        "all_gather",
        "all_gather_object",
        "all_reduce",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "monitored_barrier",
        "reduce",
        "scatter",
    }
)
"""Calls of torch that end when all ranks have made them."""

OTHERWISE = "makes another call that all ranks have to make"


class FlightRecorder:
    """The collectives that this process has started, by group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Clears the records of a world that has ended."""
        self._rows: WeakKeyDictionary[Any, deque[tuple[int, str]]] = WeakKeyDictionary()
        self.count = self.waiting = 0
        # A line about what ranks do differently, once it is known.
        self.difference = ""
        # Whether that has been raised.
        self.raised = False

    def note(self, group: Any, number: int, purpose: Purpose) -> None:
        """Records a collective."""
        self.check()
        with self._lock:
            row = self._rows.get(group)
            if row is None:
                row = self._rows[group] = deque(maxlen=KEPT)
            row.append((number, purpose.text))
            self.count += 1

    def check(self) -> None:
        """Raises if ranks are known to differ."""
        if self.difference:
            if not self.raised:
                self.raised = True
                time.sleep(READING_S)  # else the others see but a connection that is closed
            raise GulliverError(self.difference)

    def entries(self) -> Entries:
        """The last entries of each group."""
        with self._lock:
            return {group.group_name: list(row) for group, row in self._rows.items()}


flight_recorder = FlightRecorder()


def wait_for(done: threading.Event) -> None:
    """Waits for a collective; raises if the ranks turn out to run different ones."""
    if done.wait(PATIENCE_S):
        return
    flight_recorder.waiting += 1
    try:
        while not done.wait(PATIENCE_S):
            flight_recorder.check()
    finally:
        flight_recorder.waiting -= 1


def difference(sides: Mapping[int, Entries], standing: Mapping[int, str]) -> str:
    """Describes the first collective in which ranks differ; empty if there is none."""
    groups = sorted({group for entries in sides.values() for group in entries})
    for group in groups:
        found = {rank: dict(e[group]) for rank, e in sides.items() if group in e}
        numbers = sorted({number for entries in found.values() for number in entries})
        for number in numbers:
            does = {rank: e[number] for rank, e in found.items() if number in e}
            for rank, call in standing.items():
                if rank in found and number > max(found[rank]):
                    does[rank] = f"waits in {call} for all ranks"
            if any(does.values()) and len(set(does.values())) > 1:
                return _line(does)
    return ""


def standing_in() -> str:
    """Name of the torch collective that the main thread is in; empty if there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        name = frame.f_code.co_name
        if name in MEETINGS and frame.f_globals.get("__name__") == dist.distributed_c10d.__name__:
            of_all = frame.f_locals.get("group") in (None, dist.group.WORLD)
            return f"torch.distributed.{name}" if of_all else ""
        frame = frame.f_back
    return ""


def _line(does: Mapping[int, str]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank in sorted(does):
        by_text.setdefault(does[rank] or OTHERWISE, []).append(rank)
    each = ", ".join(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {text}"
        for text, ranks in by_text.items()
    )
    return (
        f"the ranks do different things: {each}; call the model, read its parameters and save on "
        "all ranks alike, in one order"
    )
