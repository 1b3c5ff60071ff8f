"""Many small pieces of memory, one behind the other: at once, and by native threads."""

from __future__ import annotations

import ctypes
import importlib
import os

import numpy as np
from numpy.typing import NDArray

from gulliver.io._native import native_problem


def gather(target: int, segments: NDArray[np.int64]) -> None:
    """Copies pieces of memory one behind the other; returns when all are copied.

    Args:
        target: address; there has to be room for all.
        segments: (n, 2), address and bytes of each.
    """
    table = np.ascontiguousarray(segments, dtype=np.int64).reshape(-1, 2)
    if os.environ.get("GULLIVER_IO") != "python" and native_problem() is None:
        importlib.import_module("gulliver.io._core").gather(target, table)
        return
    for address, nbytes in table.tolist():
        ctypes.memmove(target, address, nbytes)
        target += nbytes
