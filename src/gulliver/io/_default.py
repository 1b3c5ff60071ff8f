"""Which engine moves the bytes: the native one where it was built, else its Python twin."""

from __future__ import annotations

import logging
import os

from gulliver.errors import GulliverError, nearest
from gulliver.io._engine import Auto, Engine
from gulliver.io._native import NativeEngine, native_problem
from gulliver.io._twin import TwinEngine

CHOICES = ("native", "threads", "python")
"""Values of ``$GULLIVER_IO``: native with io_uring where allowed, native without, the twin."""
_said: set[str] = set()


def default_engine(
    *,
    page_bytes: int = 4 * 2**20,
    pages: int = 16,
    copiers: int = 2,
    writers: int = 2,
    queue: int = 4096,
    direct: Auto = "auto",
) -> Engine:
    """Makes the native engine where it was built, else the twin, which is said once in the log.

    ``$GULLIVER_IO`` forces one: ``native``, ``threads`` (native without io_uring) or ``python``.

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
        _said.add(problem)
        logging.getLogger("gulliver").warning(
            "I/O runs in Python threads, which compete for the GIL: %s", problem
        )
    if choice == "python" or problem:
        return TwinEngine(
            page_bytes=page_bytes,
            pages=pages,
            copiers=copiers,
            writers=writers,
            queue=queue,
            direct=direct,
        )
    return NativeEngine(
        page_bytes=page_bytes,
        pages=pages,
        copiers=copiers,
        writers=writers,
        queue=queue,
        direct=direct,
        io_uring=False if choice == "threads" else "auto",
    )
