"""Keeps a process within a memory limit: measures its memory and adapts the manager's budget.

By default glibc keeps freed memory, below a threshold that grows up to 32 MiB, for later
allocations. After backward, the memory of activations would stay resident when chunks need it, so
malloc is set to return freed memory to the system while a limit is set.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from gulliver.errors import GulliverError
from gulliver.memory.symbolic import ActivationPeak

# From malloc.h: parameters of mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MAPPED = 1 << 20
"""Minimum bytes of allocations that are mapped separately and returned when freed."""
# Once set, glibc's thresholds no longer adapt, and their previous values cannot be queried. So they
# are reset to the values that they reach in a training process, or to those of the environment.
_GROWN_MMAP, _GROWN_TRIM = 32 << 20, 64 << 20
_ALL = (1 << 31) - 1


# [Note: page faults] The price is that each large tensor of a step begins on pages that the system
# clears one by one: 0.7 million faults in a step of 250 M parameters and 512 tokens, a tenth of its
# time. If steps do not wait for memory, it is kept after all (`FreedMemory.keep`), and takes up to
# two fifths more room, because freed blocks do not fit the next tensors exactly.
class FreedMemory:
    """Makes malloc return freed memory to the system until the last instance is closed."""

    _open = 0

    def __init__(self) -> None:
        # Reason why memory cannot be returned here; empty if it can.
        self.reason = _reason()
        self._libc = None if self.reason else ctypes.CDLL(None)
        if self._libc is not None:
            FreedMemory._open += 1
            self.keep(False)

    def keep(self, keeps: bool) -> None:
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, _GROWN_MMAP if keeps else MAPPED)
            self._libc.mallopt(_M_TRIM_THRESHOLD, _ALL if keeps else MAPPED)
            if not keeps:
                self.trim()

    def trim(self) -> None:
        """Returns free pages between used ones to the system; slow, as it scans all heaps."""
        if self._libc is not None:
            trim_heaps()

    def close(self) -> None:
        libc, self._libc = self._libc, None
        if libc is None:
            return
        FreedMemory._open -= 1
        if not FreedMemory._open:
            libc.mallopt(_M_MMAP_THRESHOLD, _said("MALLOC_MMAP_THRESHOLD_", _GROWN_MMAP))
            libc.mallopt(_M_TRIM_THRESHOLD, _said("MALLOC_TRIM_THRESHOLD_", _GROWN_TRIM))


def trim_heaps() -> None:
    if not _reason():
        ctypes.CDLL(None).malloc_trim(0)


def _said(name: str, default: int) -> int:
    """Returns the value of a glibc environment variable, if glibc would accept it."""
    text = os.environ.get(name, "")
    return min(int(text), (1 << 31) - 1) if text.isdecimal() else default


def _reason() -> str:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        version = None
    if not version or not version.startswith("glibc"):
        return (
            "freed memory stays in the process's heaps: returning it is supported with glibc's "
            "malloc only"
        )
    preloaded = os.environ.get("LD_PRELOAD", "")
    for other in ("jemalloc", "tcmalloc", "mimalloc"):
        if other in preloaded:
            return (
                f"freed memory is returned as {other} decides: setting this is supported with "
                "glibc's malloc only"
            )
    return ""


# Memory of a process outside of the manager: activations, temporaries and everything else.
#
# On a CPU, a thread reads the process's memory a few hundred times per second; on CUDA, the caching
# allocator has the peak. `Footprint` only records the peak of each step.


PAGE = os.sysconf("SC_PAGE_SIZE")
INTERVAL_S = 0.002


class Gauge(Protocol):
    """Measures the process's memory in the fast tier."""

    def used(self) -> int: ...

    def most(self) -> int:
        """Peak bytes since the last call, if the gauge tracks them; otherwise current bytes."""
        ...

    def close(self) -> None: ...


class ProcessGauge:
    """Anonymous resident memory of this process."""

    # Pages of files (libraries, mapped checkpoints) are the system's to drop, so they do not count.

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)

    def used(self) -> int:
        fields = os.pread(self._file, 128, 0).split(None, 3)
        return (int(fields[1]) - int(fields[2])) * PAGE

    most = used

    def close(self) -> None:
        os.close(self._file)


class CudaGauge:
    """CUDA memory allocated by PyTorch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("allocated_bytes.all.current", 0))

    def most(self) -> int:
        peak = torch.cuda.memory_stats(self._device).get("allocated_bytes.all.peak", 0)
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(peak)

    def close(self) -> None: ...


@dataclass(frozen=True)
class StepFootprint:
    """Peak memory of a step."""

    # Peak bytes outside of the manager.
    other: int
    total: int


class Footprint:
    """Measures how much memory each step uses besides model state.

    Args:
        held: function that returns the manager's bytes in the fast tier.
        device: device whose memory is the fast tier.
        interval: seconds between measurements, on a CPU.
        gauge: gauge to read; None for the device's.

    Attributes:
        alarm: total bytes above which `alarmed` is set; None to disable.
        alarmed: whether a measurement has exceeded `alarm` since `clear_alarm`.

    Raises:
        OSError: the system has no /proc.
    """

    def __init__(
        self,
        held: Callable[[], int],
        device: torch.device | str = "cpu",
        *,
        interval: float = INTERVAL_S,
        gauge: Gauge | None = None,
    ) -> None:
        device = torch.device(device)
        self.gauge = gauge or (CudaGauge(device) if device.type == "cuda" else ProcessGauge())
        self._held, self._interval = held, interval
        # Memory that malloc has kept would be returned later, so the base would be too high.
        trim_heaps()
        # Bytes used before the model was created.
        self.base = self.gauge.used() - held()
        self.alarm: int | None = None
        self.alarmed = False
        self._lock = threading.Lock()
        self._restart()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if device.type != "cuda":
            self._thread = threading.Thread(target=self._watch, name="footprint", daemon=True)
            self._thread.start()

    def watch(self, alarm: int) -> None:
        self.alarm = alarm

    def clear_alarm(self) -> None:
        self.alarmed = False

    def now(self) -> tuple[int, int]:
        """Returns the current bytes outside the manager, and in total, above the base."""
        return self._look(self.gauge.used)

    def end_step(self) -> StepFootprint:
        self._look(self.gauge.most)
        with self._lock:
            step = StepFootprint(self._other, self._total)
            self._restart()
        return step

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.gauge.close()

    def _restart(self) -> None:
        self._other = self._total = 0

    def _look(self, read: Callable[[], int]) -> tuple[int, int]:
        # Other threads run during the reading. If the manager allocates or frees meanwhile, the
        # result may be too low but not too high; the next reading corrects it.
        before = self._held()
        total = read() - self.base
        other = max(0, total - max(before, self._held()))
        with self._lock:
            self._other, self._total = max(self._other, other), max(self._total, total)
        if self.alarm is not None and total > self.alarm:
            self.alarmed = True
        return other, total

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self._look(self.gauge.used)


# The manager's budget: the part of the limit that activations and all other memory leave.
#
# `BudgetRule` decides from numbers alone, so that the same measurements give the same budgets.
# `BudgetController` gives it the measurements of a `Footprint`, and its decisions to a manager.


MARGIN_SHARE, MARGIN_BYTES = 32, 1 << 20
UNSEEN_SHARE, UNSEEN_BYTES = 8, 16 << 20
RISE_SHARE = 4
STEADY_SHARE = 4
"""Changes of the budget below margin / `STEADY_SHARE` are skipped; each needs a new schedule."""
WINDOW = 8
KEPT_SHARE, KEPT_BYTES = 0.4, 64 << 20
"""If freed memory is kept: reserve as a share of unmanaged memory; minimum bytes of the latter."""
FEW_WAITS, MANY_WAITS = 0.1, 0.25
"""Shares of step time spent waiting below which freed memory is kept, and above which it is not."""


# [Note: the loop] The budget of a step is the limit minus a margin minus the peak of other memory
# in the last steps (before the first step, its prediction). It falls immediately and rises by a
# quarter of the room per step, so that alternating sequence lengths do not move chunks to and fro.
# Each change needs a new schedule of all moves, which takes longer than a small step, so
# differences below a quarter of the margin, which are usual between steps, are ignored.
#
# Within a step, an alarm half a margin below the limit lowers the budget at the next position by
# twice the missing amount, because usage that grew so far continues to grow. The budget never falls
# below the bytes that the manager needs at the same time; a warning is then logged.
#
# [Note: freed memory] If steps hardly wait for transfers and there is room, freed memory is kept
# for the next tensors, which avoids page faults; budgets then leave room for fragmentation. The
# first alarm, or steps that wait, end this permanently.
@dataclass(frozen=True)
class Change:
    """A change to a budget."""

    step: int
    at: str
    before: int
    after: int
    why: str

    def __str__(self) -> str:
        where = f" at {self.at}" if self.at else ""
        sizes = f"{_mib(self.before)} -> {_mib(self.after)}"
        return f"step {self.step}{where}: budget {sizes}: {self.why}"


class BudgetRule:
    """Computes budgets from measurements."""

    def __init__(self, limit: int, minimum: int = 0) -> None:
        self.limit, self.minimum = limit, minimum
        # Whether freed memory is kept; None before the decision; False is final.
        self.keeps: bool | None = None
        # Reason for the decision, with numbers.
        self.keeps_why = ""
        self.margin = limit // MARGIN_SHARE + MARGIN_BYTES
        self.step = 0
        self.changes: list[Change] = []
        self._peaks: deque[int] = deque(maxlen=WINDOW)
        self.budget = 0

    @property
    def alarm(self) -> int:
        """Total bytes above which the budget is lowered during a step."""
        return self.limit - self.margin // 2

    def begin(self, predicted: ActivationPeak | None, decides: str = "") -> int:
        known = None if predicted is None else predicted.bytes
        other = 0 if known is None else with_unseen(known)
        room = self.limit - self.margin - other
        if room < self.minimum:
            raise GulliverError(_too_small(self, predicted, decides))
        if predicted is not None and known is not None:
            return self._set(room, "", f"{_mib(other)} predicted in {predicted.where}")
        why = predicted.reason if predicted is not None else "no prediction"
        return self._set(max(self.minimum, room // 4), "", f"first step, {why}")

    def end_step(self, other: int, waits: float | None = None) -> int:
        self.step += 1
        self._peaks.append(other)
        if waits is not None:
            self._decide_keeping(other, waits)
        most = max(self._peaks)
        room = max(self.limit - self.margin - most, self.minimum)
        why = f"other memory took {_mib(most)}"
        steady = self.margin // STEADY_SHARE
        if abs(room - self.budget) <= steady and self.budget >= self.minimum:
            return self.budget
        if room < self.budget:
            return self._set(room, "", why)
        rise = max((room - self.budget) // RISE_SHARE, min(room - self.budget, steady))
        return self._set(self.budget + rise, "", why)

    def _decide_keeping(self, other: int, waits: float) -> None:
        if self.keeps and waits > MANY_WAITS:
            self.stop_keeping(f"a step waits {waits:.0%} of its time")
        if self.keeps is not None or waits > FEW_WAITS or other < KEPT_BYTES:
            return
        more = other + int(KEPT_SHARE * other)
        if self.limit - self.margin - more < self.minimum + self.minimum // RISE_SHARE:
            return
        self._peaks.append(more)
        self._set_keeping(True, f"freed memory is kept: a step waits for {waits:.0%} of its time")

    def stop_keeping(self, why: str, at: str = "") -> None:
        self._set_keeping(False, f"freed memory is returned: {why}", at)

    def _set_keeping(self, keeps: bool, why: str, at: str = "") -> None:
        self.keeps, self.keeps_why = keeps, why
        self.changes.append(Change(self.step, at, self.budget, self.budget, why))

    def press(self, other: int, total: int, at: str = "") -> int:
        if total <= self.alarm:
            return self.budget
        expected = self.limit - self.margin - self.budget
        missing = max(other - expected, total - self.alarm)
        room = max(self.limit - self.margin - expected - 2 * missing, self.minimum)
        if room >= self.budget:
            return self.budget
        why = f"{_mib(total)} of {_mib(self.limit)} used, {_mib(other)} by other memory"
        return self._set(room, at, why)

    def grow(self, needed: int, other: int) -> int:
        room = self.limit - self.margin - other
        if needed > room:
            return self.budget
        self.minimum = max(self.minimum, needed)
        # With a reserve, because views of freed memory may live a little longer.
        wanted = needed + (room - needed) // RISE_SHARE
        return self._set(max(self.budget, wanted), "", "more is in use at once")

    def hold_minimum(self) -> int:
        return self._set(max(self.budget, self.minimum), "", "so much is in use at once")

    def _set(self, budget: int, at: str, why: str) -> int:
        if budget != self.budget:
            self.changes.append(Change(self.step, at, self.budget, budget, why))
            self.budget = budget
        return budget


class Budgeted(Protocol):
    """Methods of a manager that `BudgetController` needs."""

    @property
    def minimum(self) -> int: ...

    def set_budget(self, nbytes: int) -> None: ...


class BudgetController:
    """Keeps a process within its memory limit.

    Args:
        limit: bytes that the process may use above the footprint's base.
        manager: manager of model states.
        footprint: measurements of the process; None relies on the prediction (without /proc).
        predicted: predicted memory of a step.
        minimum: planned peak of the manager's bytes in use.
        decides: description of what determines `minimum`.
        keeps: whether freed memory may be kept when steps hardly wait for transfers.

    Attributes:
        steps: footprint of each finished step.

    Raises:
        GulliverError: the limit is too small for a step; the error names the smallest that works.
    """

    def __init__(
        self,
        limit: int,
        manager: Budgeted,
        footprint: Footprint | None,
        predicted: ActivationPeak | None = None,
        minimum: int = 0,
        decides: str = "",
        keeps: bool = True,
    ) -> None:
        self._keeps = keeps
        self.rule = BudgetRule(limit, max(minimum, manager.minimum))
        self._least, self._warned = minimum or manager.minimum, False
        self.steps: list[StepFootprint] = []
        self._manager, self._footprint = manager, footprint
        self._predicted = 0 if predicted is None else predicted.bytes or 0
        manager.set_budget(self.rule.begin(predicted, decides))
        self._freed = FreedMemory()
        if footprint is not None:
            footprint.watch(self.rule.alarm)

    def check(self, at: str = "") -> None:
        """Lowers the budget if the process has come close to its limit.

        Args:
            at: position in the step, for the log.
        """
        footprint = self._footprint
        if footprint is None or not footprint.alarmed:
            return
        # Kept freed memory is returned first, which may be sufficient.
        if self.rule.keeps:
            self.rule.stop_keeping("the limit is near", at)
            self._follow_keeping()
        self._freed.trim()
        other, total = footprint.now()
        self._apply(self.rule.press(other, total, at))
        footprint.clear_alarm()

    def grow(self, needed: int) -> bool:
        """Raises the budget if the limit allows; returns whether it did.

        Args:
            needed: minimum budget.
        """
        other = self._predicted if self._footprint is None else self._footprint.now()[0]
        budget = self.rule.grow(needed, other)
        if budget < needed:
            return False
        self._manager.set_budget(budget)
        return True

    def least_limit(self, needed: int) -> str:
        """Describes the limit required for a budget.

        Args:
            needed: minimum budget.
        """
        other = self._predicted if self._footprint is None else self._footprint.now()[0]
        least = math.ceil(_limit_for(needed + other) / 2**20)
        return f"with {_mib(other)} besides state, a limit of about {least}MiB"

    def end_step(self, waits: float | None = None) -> None:
        """Ends a step: records its measurements, and sets the next budget.

        Args:
            waits: share of the step's time spent waiting for transfers; None if unknown.
        """
        if self._footprint is None:
            return
        step, kept = self._footprint.end_step(), self.rule.keeps
        self.steps.append(step)
        self.rule.minimum = max(self.rule.minimum, self._manager.minimum)
        self._apply(self.rule.end_step(step.other, waits if self._keeps else None))
        if self.rule.keeps != kept:
            self._follow_keeping()
        self._warn(step.other)

    def _follow_keeping(self) -> None:
        self._freed.keep(bool(self.rule.keeps))
        logging.getLogger("gulliver").info("memory limit: %s", self.rule.keeps_why)

    def _warn(self, other: int) -> None:
        limit, least = self.rule.limit, self._least
        if other + least <= limit or self._warned:
            return
        self._warned = True
        logging.getLogger("gulliver").warning(
            "a step takes more than the memory limit of %s: %s of state at once and %s besides "
            "(activations and workspaces); the smallest limit that works is %dMiB",
            _mib(limit),
            _mib(least),
            _mib(other),
            math.ceil(_limit_for(least + other) / 2**20),
        )

    def explain(self) -> str:
        """Describes each budget change on its own line."""
        return "\n".join(map(str, self.rule.changes))

    def close(self) -> None:
        self._freed.close()
        if self._footprint is not None:
            self._footprint.close()

    def _apply(self, budget: int) -> None:
        try:
            self._manager.set_budget(budget)
        except GulliverError:
            # More bytes are in use now: use that budget, and try again at the end of the step.
            self.rule.minimum = max(self.rule.minimum, self._manager.minimum)
            self._manager.set_budget(self.rule.hold_minimum())


def with_unseen(nbytes: int) -> int:
    """Adds kernel workspaces, and first-use memory of threads and libraries, to a prediction."""
    return nbytes + nbytes // UNSEEN_SHARE + min(nbytes, UNSEEN_BYTES)


def room_without_unseen(nbytes: int) -> int:
    small = nbytes * UNSEEN_SHARE // (2 * UNSEEN_SHARE + 1)
    large = (nbytes - UNSEEN_BYTES) * UNSEEN_SHARE // (UNSEEN_SHARE + 1)
    return max(small, large) if large >= UNSEEN_BYTES else min(small, UNSEEN_BYTES)


def smallest_limit(minimum: int, predicted: int) -> int:
    return _limit_for(minimum + with_unseen(predicted))


def _limit_for(need: int) -> int:
    limit = (need + MARGIN_BYTES) * MARGIN_SHARE // (MARGIN_SHARE - 1) - 2
    while limit - limit // MARGIN_SHARE - MARGIN_BYTES < need:
        limit += 1
    return limit


def _too_small(rule: BudgetRule, predicted: ActivationPeak | None, decides: str) -> str:
    other = predicted.bytes if predicted is not None and predicted.bytes is not None else 0
    least = smallest_limit(rule.minimum, other)
    needs = [f"{_mib(rule.minimum)} at once for {decides or 'model states'}"]
    if predicted is not None and other:
        needs.append(f"{_mib(with_unseen(other))} for activations in {predicted.where}")
    return (
        f"a memory limit of {_mib(rule.limit)} is too small: a step needs {' and '.join(needs)}; "
        f"with {_mib(MARGIN_BYTES)} and 1/{MARGIN_SHARE} of it, which stay free, "
        f"the smallest limit that works is {math.ceil(least / 2**20)}MiB"
    )


def _mib(nbytes: int) -> str:
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:.1f} MiB"
