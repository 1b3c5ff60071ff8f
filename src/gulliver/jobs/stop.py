"""Stops a job at the end of a step after a signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Records SIGTERM and SIGINT as a request to stop after the current step."""

    def __init__(self) -> None:
        self.wanted = False

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handles signals in the block; a second SIGINT interrupts immediately."""
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._note) for number in signals}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = True
