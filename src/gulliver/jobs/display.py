"""Progress display: a bar on a terminal, plain lines elsewhere; scalars for TensorBoard."""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gulliver.errors import GulliverError, missing_extra
from gulliver.io.files import named_errors, require_space

UNWRITTEN = 1 << 16
"""Maximum size of the TensorBoard write buffer in bytes."""
SECONDS_BETWEEN_LINES = 15.0
QUIET_SECONDS = 2.0
"""Seconds before a command shows its current work."""
UNBROKEN = 100_000
"""Line width if the output is not a terminal; no line is that long."""


def console() -> Console:
    """Returns the console for messages; standard output is reserved for results."""
    # Without markup: a folder may be called ``run[v2]``.
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


class _Report(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1 without saying why


def report_console() -> Console:
    """Returns the console for results; lines are wrapped only on a terminal."""
    made = _Report(highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = UNBROKEN
    return made


def print_json(values: Mapping[str, Any]) -> None:
    """Prints a command's results as JSON, with the version of its fields."""
    print(json.dumps({"schema": 1, **values}, indent=1, default=str))


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error what a slow command is doing (after 2 s); yields an updater."""
    now, ended, begun = [what], threading.Event(), time.monotonic()

    def show() -> None:
        if ended.wait(QUIET_SECONDS):
            return
        screen, wait = console(), SECONDS_BETWEEN_LINES
        with ExitStack() as stack:
            status = None
            if screen.is_terminal:
                status, wait = stack.enter_context(screen.status(now[0])), 0.25
            while True:
                text = f"{now[0]} ({time.monotonic() - begun:.0f} s)"
                status.update(text) if status else screen.print(text)
                if ended.wait(wait):
                    return

    def update(part: str) -> None:
        now[0] = f"{what}: {part}"

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield update
    finally:
        ended.set()
        thread.join()


def memory_in_use() -> int:
    """Peak bytes of this process: on the GPU if there is one, otherwise resident memory."""
    torch = sys.modules.get("torch")  # commands that need none start without its two seconds
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Display:
    """Progress bar of `total` steps, with a title and metrics."""

    # A context manager. On a terminal it is a live bar; elsewhere a line now and then, so that logs
    # stay readable. A disabled display shows nothing (ranks other than 0).

    def __init__(self, title: str, total: int, start: int = 0, enabled: bool = True) -> None:
        self.title, self.total, self.done, self.enabled = title, total, start, enabled
        self.console = console()
        self._first, self._started = start, time.monotonic()
        self._last_line = self._started
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        self._started = self._last_line = time.monotonic()
        if self.enabled and self.console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeElapsedColumn(),
                TextColumn("eta"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self.console)
            self._bar.add_task(self.title, total=self.total, completed=self.done, figures="")
            self._bar.start()
        return self

    def advance(self, steps: int = 1, **figures: str) -> None:
        """Counts finished steps; `figures` are shown verbatim."""
        self.done += steps
        text = "  ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items())
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done, figures=text)
            return
        now = time.monotonic()
        if self.enabled and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._line(text, now)

    def _line(self, text: str, now: float) -> None:
        rate = (self.done - self._first) / max(now - self._started, 1e-9)
        left = (self.total - self.done) / rate if rate else float("inf")
        self.console.print(f"{self.title} {self.done}/{self.total}  {text}  eta {left:.0f} s")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.enabled and kind is None:
            seconds = time.monotonic() - self._started
            self.console.print(f"{self.title} {self.done}/{self.total}  done in {seconds:.0f} s")


@dataclass(frozen=True)
class Scalars:
    """Writes a step's named scalars and images."""

    folder: Path
    writer: Any

    def __call__(self, name: str, value: float, step: int) -> None:
        if self.writer is not None:
            with named_errors(self.folder):
                self.writer.add_scalar(name, value, step)

    def picture(self, name: str, pixels: Any, step: int) -> None:
        """Writes an image, uint8 [H, W, 3]."""
        if self.writer is not None:
            with named_errors(self.folder):
                self.writer.add_image(name, pixels, step, dataformats="HWC")


@contextmanager
def tensorboard(folder: Path, step: int, enabled: bool) -> Iterator[Scalars]:
    """Yields a TensorBoard writer if enabled and installed; otherwise one that writes nothing."""
    if not enabled:
        yield Scalars(folder, None)
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        console().print(str(missing_extra("no TensorBoard log", "train")))
        yield Scalars(folder, None)
        return
    writer = SummaryWriter(str(folder), purge_step=step + 1)

    try:
        yield Scalars(folder, writer)
    finally:
        # On a full disk its thread ends at a value, and closing would wait for that one forever.
        with suppress(GulliverError):
            require_space(folder, UNWRITTEN)
            writer.close()
