"""Products of the extension `gulliver.precision.int8._kernels`, where it was built."""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import Any

from gulliver.errors import GulliverError, nearest

INTERFACE = 1
"""Version of the extension's interface; both sides count up when their calls change."""
INSTRUCTIONS = ("avx512-vnni", "avx2", "none")
"""Values of ``$GULLIVER_INT8``; the first that the processor has is taken where it is not set."""


def kernels_problem() -> str | None:
    """Says why there are no native products; None where there are some."""
    try:
        built = importlib.import_module("gulliver.precision.int8._kernels")
    except ImportError as error:
        return f"its extension is not built ({error})"
    if built.INTERFACE != INTERFACE:
        return "its extension has another version: rebuild it with pip install -e ."
    wanted = os.environ.get("GULLIVER_INT8", "")
    if wanted and wanted not in INSTRUCTIONS:
        raise GulliverError(f"GULLIVER_INT8={wanted!r} is unknown: {nearest(wanted, INSTRUCTIONS)}")
    if wanted == "none":
        return "GULLIVER_INT8=none"
    names = built.instructions()
    if not names:
        return "this processor has neither AVX512-VNNI nor AVX2"
    if wanted and wanted not in names:
        return f"this processor has no {wanted}"
    return None


@cache
def native_table() -> tuple[str, Any] | None:
    """Returns the instructions' name and their products; None where there are none."""
    if kernels_problem() is not None:
        return None
    built: Any = importlib.import_module("gulliver.precision.int8._kernels")
    name = os.environ.get("GULLIVER_INT8") or built.instructions()[0]
    return name, built.Table(name)
