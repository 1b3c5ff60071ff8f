"""Gathers many small pieces of memory into one, by native threads or by Python."""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gulliver.io._native import native_problem
from gulliver.io._types import StridedView


def gather(target: int, segments: NDArray[np.int64]) -> None:
    """Copies pieces of memory one behind the other; returns when all are copied."""
    table = np.ascontiguousarray(segments, dtype=np.int64).reshape(-1, 2)
    if os.environ.get("GULLIVER_IO") != "python" and native_problem() is None:
        importlib.import_module("gulliver.io._core").gather(target, table)
    else:
        gather_slowly(target, table, {})


def gather_slowly(target: int, table: NDArray[np.int64], views: Mapping[int, StridedView]) -> None:
    """Copies pieces of memory one behind the other, in Python."""
    for number, (begin, nbytes) in enumerate(table.tolist()):
        if number in views and nbytes:
            view = views[number]
            found = _elements(view)[begin // view.itemsize : (begin + nbytes) // view.itemsize]
            np.frombuffer(memory_at(target, nbytes), found.dtype)[:] = found
        else:
            ctypes.memmove(target, begin, nbytes)
        target += nbytes


def memory_at(address: int, nbytes: int) -> memoryview:
    """Returns memory of this process as a writable buffer, without a copy."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address))


def _elements(view: StridedView) -> np.flatiter:
    """Returns the elements of a view in row-major order."""
    # Opaque elements: numpy has no bfloat16, and a copy needs their size only.
    kind = np.dtype((np.void, view.itemsize))
    spans = zip(view.sizes, view.strides, strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in spans)
    memory = np.frombuffer(memory_at(view.address, reach * view.itemsize), kind)
    steps = [stride * view.itemsize for stride in view.strides]
    return np.lib.stride_tricks.as_strided(memory, view.sizes, steps, writeable=False).flat
