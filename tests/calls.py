"""Counts the calls that a thread makes: a measure of work in Python that load does not disturb."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_of(run: Callable[[], Any]) -> Counter[str]:
    """Calls of Python's and of C's functions by this thread while `run` runs, by name."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            found[f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}"] += 1
        elif event == "c_call":
            found[f"{frame.f_code.co_filename.rpartition('/')[2]}> {arg.__qualname__}"] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found
