"""What a process uses besides what a manager holds: activations, temporary and all other memory.

On a CPU a thread reads the process's own memory a few hundred times a second; on CUDA the caching
allocator knows. `Footprint` keeps the most of each step. It decides nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from gulliver.memory._malloc import trim_heaps

PAGE = os.sysconf("SC_PAGE_SIZE")
INTERVAL_S = 0.002


class Gauge(Protocol):
    """Reads how many bytes of the fast tier the process uses for any purpose."""

    def used(self) -> int:
        """Bytes that are used now."""
        ...

    def most(self) -> int:
        """Most bytes since the last call, as far as the gauge knows by itself."""
        ...

    def close(self) -> None:
        """Frees what the gauge has open."""
        ...


class ProcessGauge:
    """Anonymous resident memory of this process: what a limit cannot take back."""

    # Pages of files (libraries, mapped checkpoints) are the system's to drop, so they do not count.

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)

    def used(self) -> int:
        """Bytes that are used now."""
        fields = os.pread(self._file, 128, 0).split(None, 3)
        return (int(fields[1]) - int(fields[2])) * PAGE

    most = used

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


class CudaGauge:
    """Memory of a CUDA device that PyTorch's caching allocator has given out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int:
        """Bytes that are used now."""
        return int(torch.cuda.memory_stats(self._device).get("allocated_bytes.all.current", 0))

    def most(self) -> int:
        """Most bytes since the last call: the allocator misses none."""
        peak = torch.cuda.memory_stats(self._device).get("allocated_bytes.all.peak", 0)
        torch.cuda.reset_peak_memory_stats(self._device)
        return int(peak)

    def close(self) -> None:
        """Frees nothing: there is nothing open."""


@dataclass(frozen=True)
class StepFootprint:
    """Memory of a step."""

    # Most bytes that no manager holds.
    other: int
    total: int


class Footprint:
    """Measures memory that is no model state, in steps.

    Args:
        held: tells the bytes of the fast tier that the manager holds now.
        device: device whose memory is the fast tier.
        base: bytes that were used before there was a model; None takes what is used now and not
            held: then nothing of the model may lie outside of the manager.
        interval: seconds between two looks, on a CPU.
        gauge: gauge to read; None takes the device's.

    Attributes:
        alarm: total bytes from which `alarmed` is set; None for none.
        alarmed: set as soon as a look saw more than that, until `clear_alarm`.

    Raises:
        OSError: the system has no /proc.
    """

    def __init__(
        self,
        held: Callable[[], int],
        device: torch.device | str = "cpu",
        *,
        base: int | None = None,
        interval: float = INTERVAL_S,
        gauge: Gauge | None = None,
    ) -> None:
        device = torch.device(device)
        self.gauge = gauge or (CudaGauge(device) if device.type == "cuda" else ProcessGauge())
        self._held, self._interval = held, interval
        if base is None:
            # What was freed and kept by malloc would leave later, and the base be too high.
            trim_heaps()
            base = self.gauge.used() - held()
        self.base = base
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
        """Sets `alarmed` as soon as a look sees more than this total."""
        self.alarm = alarm

    def clear_alarm(self) -> None:
        """The alarm was reacted to; the next look may give another."""
        self.alarmed = False

    def now(self) -> tuple[int, int]:
        """Bytes that no manager holds, and all, above the base; counted as seen."""
        return self._look(self.gauge.used)

    def end_step(self) -> StepFootprint:
        """Returns what the step used that ends now; the next begins."""
        self._look(self.gauge.most)
        with self._lock:
            step = StepFootprint(self._other, self._total)
            self._restart()
        return step

    def close(self) -> None:
        """Stops looking."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.gauge.close()

    def _restart(self) -> None:
        self._other = self._total = 0

    def _look(self, read: Callable[[], int]) -> tuple[int, int]:
        # Reading lets other threads run. Where the manager took or gave memory meanwhile, the look
        # is rather too low by that than too high: the next one is right.
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
