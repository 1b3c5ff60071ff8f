"""Chooses the engine that moves the bytes: the native one where it was built, else Python's."""

from __future__ import annotations

import logging
import os
from typing import Any

from gulliver.errors import GulliverError, nearest
from gulliver.io.engine import Engine
from gulliver.io.native import NativeEngine, native_problem
from gulliver.io.python_engine import PythonEngine

CHOICES = ("native", "threads", "python")
"""Values of ``$GULLIVER_IO``: native with io_uring where allowed, native without, Python."""
_said: set[str] = set()


def default_engine(**options: Any) -> Engine:
    """Makes the native engine where it was built, else the Python engine, which the log says once.

    ``$GULLIVER_IO`` forces one: ``native``, ``threads`` (native without io_uring) or ``python``.

    Args:
        options: arguments of `NativeEngine` but for `io_uring`.

    Raises:
        GulliverError: an unknown choice, or a native engine demanded that was not built.
    """
    choice = os.environ.get("GULLIVER_IO", "")
    if choice and choice not in CHOICES:
        raise GulliverError(f"GULLIVER_IO={choice!r} is unknown: {nearest(choice, CHOICES)}")
    problem = native_problem()
    if problem and choice in ("native", "threads"):
        raise GulliverError(f"GULLIVER_IO={choice} asks for the native engine, but {problem}")
    if problem and not choice and problem not in _said:
        # Once for each reason and process: every checkpointer and reader makes an engine.
        _said.add(problem)
        logging.getLogger("gulliver").warning(
            "I/O runs in Python threads, which compete for the GIL: %s", problem
        )
    if choice == "python" or problem:
        return PythonEngine(**options)
    return NativeEngine(io_uring=False if choice == "threads" else "auto", **options)
