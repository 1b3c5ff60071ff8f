"""Records each rank's collectives, finds ranks that run different ones, and detects lost ranks."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from gulliver.errors import GulliverError

KEPT = 64
"""Entries kept per group; ranks can be at most this many collectives apart."""

CODES = 2047
"""Number of purposes that tags distinguish; purpose 0 means none."""

TAGS = 1 << 20
"""Number of tags per purpose; other code may use lower tags. Gloo's tags have 31 bits."""

_NUMBERS = 1 << 15
"""Tags per purpose and wire format; many more than can be in flight."""

Entries = dict[str, list[tuple[int, str]]]
"""Number and purpose of collectives, by group name."""


# [Note: different programs] All ranks must submit the collectives of a group in the same order. A
# rank that calls modules in another order, or alone, would send part of one chunk while the others
# wait for another's: parts of equal size would be accepted, and others abort gloo's process
# (SIGABRT). So callers that know what a collective is for pass a `Purpose`. It is encoded in the
# tags of its messages, at no cost: messages that do not belong together never match, and wait. The
# last entries of each group are kept here. If a rank has submitted nothing for a second, its
# watchdog publishes them in the store and compares them with those of other ranks. If they differ,
# all ranks raise, or are ended if they are blocked in C++.
@dataclass(frozen=True)
class Purpose:
    """Purpose of a collective, for its tags and for error messages."""

    text: str = ""  # Continues "rank 1 ..."
    code: int = 0  # 1 to 2046; unique among purposes that may meet
    wire: int = 0  # Number of the wire format; see `with_wire`


ANY = Purpose()
PATIENCE_S = 1.0
"""Seconds of waiting after which a rank checks the others."""

READING_S = 2.0
"""Seconds between a waiting rank's checks of the others."""

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
"""Calls of torch that return only after all ranks have called them."""

OTHERWISE = "makes another collective call"


# [Note: tags] Messages are matched by tags. A tag is taken from a counter of the group when an
# operation is submitted, and encodes what the operation is for, if known (see `Purpose`). All ranks
# must submit the operations of a group in the same order; after that, nothing depends on the order
# in which they are posted.
class FlightRecorder:
    """Recent collectives of this process, by group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Maximum wait for other ranks; set by `init_world`.
        self.timeout_s = 600.0
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._exchanges: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.clear()

    def clear(self) -> None:
        self._rows: WeakKeyDictionary[Any, deque[tuple[int, str]]] = WeakKeyDictionary()
        self.count = self.waiting = 0
        # Line that describes how ranks differ, once known.
        self.difference = ""
        # Whether it has been raised.
        self.raised = False

    def next_tag(
        self, group: dist.ProcessGroup | None, count: int = 1, purpose: Purpose = ANY
    ) -> int:
        """Records a collective; returns the first of `count` tags reserved for it."""
        self.check()
        key = group or dist.group.WORLD
        with self._lock:
            number = self._numbers.get(key, 0)
            if number + count > _NUMBERS:
                number = 0
            self._numbers[key] = number + count
            self._note(key, number, purpose)
        return (1 + purpose.code) * TAGS + purpose.wire * _NUMBERS + number

    def note_exchange(self, group: dist.ProcessGroup | None, purpose: Purpose) -> None:
        # Exchanges are numbered separately, below collectives, whose tags must not change.
        self.check()
        key = group or dist.group.WORLD
        with self._lock:
            self._exchanges[key] = number = (self._exchanges.get(key, 0) + 1) % TAGS
            self._note(key, number - TAGS, purpose)

    def _note(self, group: Any, number: int, purpose: Purpose) -> None:
        row = self._rows.get(group)
        if row is None:
            row = self._rows[group] = deque(maxlen=KEPT)
        row.append((number, purpose.text))
        self.count += 1

    def check(self) -> None:
        if self.difference:
            if not self.raised:
                self.raised = True
                time.sleep(READING_S)  # otherwise other ranks would only see a closed connection
            raise GulliverError(self.difference)

    def entries(self) -> Entries:
        with self._lock:
            return {group.group_name: list(row) for group, row in self._rows.items()}


flight_recorder = FlightRecorder()
_sent_bytes, _sent_lock = 0, threading.Lock()


def count_sent(count: float) -> None:
    global _sent_bytes
    with _sent_lock:
        _sent_bytes += int(count)


def sent_bytes() -> int:
    # Our own messages are counted when they are posted. Collectives of a backend count as a ring:
    # (n - 1) / n of the tensor, twice for an all-reduce. Objects, broadcasts and the messages of
    # torch's DDP are not counted.
    return _sent_bytes


def wait_for(done: threading.Event) -> None:
    """Waits for a collective; raises if ranks run different ones."""
    if done.wait(PATIENCE_S):
        return
    flight_recorder.waiting += 1
    try:
        while not done.wait(PATIENCE_S):
            flight_recorder.check()
    finally:
        flight_recorder.waiting -= 1


def difference(sides: Mapping[int, Entries], standing: Mapping[int, str]) -> str:
    """Describes the first collective that differs between ranks; empty if none does."""
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


def blocking_collective() -> str:
    """Returns the torch collective that blocks the main thread; empty if none does."""
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
        f"ranks run different collectives: {each}; call the model, read its parameters and save on "
        "all ranks in the same order"
    )


# Reports within a bounded time that a rank is gone or has failed, and names it.
#
# Every rank increments a count under its own key of the shared store and watches the others'
# counts. If a count stops for too long, the rank has ended or hangs. The main thread learns of it
# when its collective fails; if it is blocked in one, the process is ended with a one-line message.


GRACE_S = 5.0
"""Seconds for the main thread to end on its own after a rank is lost."""

SUSPECTED_S = 8.0
"""Seconds of silence after which a rank counts as lost, once a collective has failed."""

STANDING_BEATS = 4
"""Number of heartbeats during a single call after which a rank counts as stuck."""

MESSAGE_LENGTH = 500
"""Maximum characters of an error that is sent to other ranks."""


# [Note: failures] A rank that raises in the middle of a joint operation, such as the steps of a
# pipeline, stays alive, and so do its connections: the others would wait for messages that it never
# sends. So it publishes, next to its count, which section failed and why. Ranks that are in the
# same section, by their own count, and do not leave it by themselves, are ended as above. Gloo has
# no call that would wake a thread waiting for a message.
#
# Ranks that run different collectives wait for each other forever; see the note at `watchdog.py`.
# All raise the same message about it, which is published next to the counts.
@dataclass
class _Status:
    """A rank's status in the store."""

    beat: int = 0  # Heartbeat, an increasing number
    passage: int = 0  # Number of the section that failed; 0 for none
    error: str = ""  # Error of that section
    end: str = ""  # Why it ends early; empty if it continues or is done
    done: bool = False  # Whether it ended regularly
    lost: int | None = None  # Another rank that was lost, because of which it ends
    reason: str = ""  # Why that rank ended
    differs: str = ""  # How ranks differ


class Watchdog:
    """Publishes this rank's heartbeats and checks the other ranks', in a daemon thread."""

    def __init__(self, store: dist.Store, rank: int, size: int, silence_s: float) -> None:
        self._store, self.rank, self.size, self.silence_s = store, rank, size, silence_s
        self._stop = threading.Event()
        self._known = threading.Event()
        self._suspected = threading.Event()
        self.lost: int | None = None
        self.reason = ""
        self._status = _Status()
        self._others = [other for other in range(size) if other != rank]
        self._heard = {other: (_Status(), time.monotonic()) for other in self._others}
        self._passages, self._inside = 0, False
        self._position = _Position()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._heard = {other: (_Status(), time.monotonic()) for other in self._others}
        self._thread.start()

    def stop(self, failure: str | None = None) -> None:
        """Publishes this rank's normal exit, so that others do not report it as lost."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.lost is not None:
            self._status.lost, self._status.reason = self.lost, self.reason  # not this rank's fault
        elif failure is not None:
            self._status.end = f"failed {failure}"
        self._status.done = True
        # Without a store, there is nobody left to notify.
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._publish()

    def enter(self) -> None:
        self._passages += 1
        self._inside = True

    def leave(self, error: BaseException | None) -> None:
        self._inside = False
        if error is None or self._failure() is not None or flight_recorder.raised:
            return
        lines = str(error).strip().splitlines() or [""]
        self._status.passage = self._passages
        self._status.error = f"{type(error).__name__}: {lines[0][:MESSAGE_LENGTH]}"
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._publish()

    def wait_for_reason(self) -> str | None:
        """Waits for a lost or failed rank to be reported, up to the silence limit."""
        # For ranks whose collective has failed, a rank that ended regularly counts as lost too.
        self._suspected.set()
        until = time.monotonic() + self.silence_s * 1.5 + GRACE_S
        while time.monotonic() < until and not self._known.wait(0.1):
            if failure := self._failure():
                return failure
            flight_recorder.check()
        if failure := self._failure():
            return failure  # a failed rank may have ended meanwhile: its failure is the cause
        return None if self.lost is None else f"rank {self.lost} was lost: it {self.reason}"

    def _publish(self) -> None:
        self._store.set(str(self.rank), json.dumps(asdict(self._status)))

    def _watch(self) -> None:
        interval = min(1.0, self.silence_s / 10)
        stuck_since: float | None = None
        while not self._stop.wait(interval):
            self._status.beat += 1
            try:
                self._publish()
                for other in self._others:
                    self._read_status(other)
                self._compare()
            except (RuntimeError, dist.DistError):
                # Rank 0's process, or its launcher, holds the store.
                self._declare(0, "ended, and its store with it")
                return
            if lost := self._lost() or self._is_silent():
                self._declare(*lost)
                return
            differs = flight_recorder.difference if not flight_recorder.raised else ""
            if not (differs or self._same_passage_failed()):
                stuck_since = None
                continue
            stuck_since = stuck_since or time.monotonic()
            if time.monotonic() - stuck_since > GRACE_S:
                self._end(differs or self._failure() or "")

    def _compare(self) -> None:
        if flight_recorder.difference:
            return
        reported = [status.differs for status, _ in self._heard.values() if status.differs]
        mine = self._position.look()
        if mine is not None and not reported:
            self._store.set(f"{self.rank}/handed-in", json.dumps((*mine, self._status.beat)))
            sides, standing = {self.rank: mine[0]}, {}
            for other in self._others:
                if not self._store.check([f"{other}/handed-in"]):
                    continue
                sides[other], call, beat = json.loads(self._store.get(f"{other}/handed-in"))
                # The rank may have continued since; what it submitted stays valid.
                if call and flight_recorder.waiting and beat >= self._heard[other][0].beat - 1:
                    standing[other] = call
            reported = [difference(sides, standing)]
        if reported and reported[0]:
            self._status.differs = reported[0]
            self._publish()
            flight_recorder.difference = reported[0]
            if blocking_collective():
                self._end(reported[0])  # only a closed connection would wake it there

    def _read_status(self, other: int) -> None:
        said = self._store.get(str(other)) if self._store.check([str(other)]) else b""
        status = _Status(**json.loads(said)) if said else _Status()
        if status != self._heard[other][0] or status.done:
            self._heard[other] = status, time.monotonic()

    def _failure(self) -> str | None:
        for other, (status, _) in self._heard.items():
            if status.passage:
                return f"rank {other} failed: {status.error}"
        return None

    def _same_passage_failed(self) -> bool:
        statuses = [status for status, _ in self._heard.values()]
        return self._inside and any(status.passage == self._passages for status in statuses)

    def _lost(self) -> tuple[int, str] | None:
        for other, (status, _) in self._heard.items():
            if status.end:
                return other, status.end
            if status.lost is not None and status.lost != self.rank:
                return status.lost, status.reason
            if status.done and self._suspected.is_set():
                return other, "ended, having made fewer steps or calls than this one"
        return None

    def _is_silent(self) -> tuple[int, str] | None:
        longest = self.silence_s
        if self._suspected.is_set():
            longest = min(SUSPECTED_S, longest)
        now = time.monotonic()
        for other, (_, heard) in self._heard.items():
            if now - heard > longest:
                return other, f"was not heard of for {longest:.0f} s"
        return None

    def _declare(self, rank: int, reason: str) -> None:
        """Interrupts the main thread; ends the process if that thread is stuck."""
        self.lost, self.reason = rank, reason
        self._known.set()
        if not self._stop.wait(GRACE_S):
            self._end(self._failure() or f"rank {rank} was lost (it {reason})")

    def _end(self, reason: str) -> None:
        print(f"gulliver: {reason}: rank {self.rank} ends", file=sys.stderr, flush=True)
        os._exit(1)


class _Position:
    def __init__(self) -> None:
        self._count, self._call, self._beats = 0, "", 0

    def look(self) -> tuple[Entries, str] | None:
        call = blocking_collective()
        same = (flight_recorder.count, call) == (self._count, self._call)
        self._beats = self._beats + 1 if same else 0
        self._count, self._call = flight_recorder.count, call
        if not self._beats or not flight_recorder.count:
            return None
        return flight_recorder.entries(), call if self._beats >= STANDING_BEATS else ""


_watchdog: Watchdog | None = None


def current_watchdog() -> Watchdog | None:
    return _watchdog


def set_watchdog(watchdog: Watchdog | None) -> None:
    global _watchdog
    _watchdog = watchdog


@contextmanager
def guard() -> Iterator[None]:
    """Re-raises transport errors in the block as an error that names the failed rank, if known."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, GulliverError) or _watchdog is None or not _is_transport(error):
            raise
        reason = _watchdog.wait_for_reason()
        if reason is None:
            raise
        raise GulliverError(f"{reason}, so the other ranks cannot continue") from error


@contextmanager
def together() -> Iterator[None]:
    """Marks a section that needs all ranks: an error in the block ends all ranks."""
    # All ranks mark the same passages in the same order, and an error in one is final.
    watchdog = _watchdog
    if watchdog is None:
        yield
        return
    watchdog.enter()
    try:
        yield
    except BaseException as error:
        # `guard` reports what failed because another rank is gone.
        watchdog.leave(None if _is_transport(error) else error)
        raise
    watchdog.leave(None)


def _is_transport(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(
        word in text for word in ("gloo", "connection", "socket", "nccl", "peer", "timed out")
    )
