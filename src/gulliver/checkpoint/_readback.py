"""Reads a slice of each tensor of a file that was written, and compares it with what was meant.

The file is read by the safetensors package, which shares no code with what wrote it.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError

SLICE = 1024
"""Elements at the beginning of each tensor that are compared."""

_log = logging.getLogger("gulliver.export")


class ReadBack:
    """Slices of the tensors of a file, as they were before they were converted and written."""

    def __init__(self) -> None:
        self._meant: dict[str, Tensor] = {}

    def note(self, name: str, values: Tensor) -> None:
        """Keeps the first elements of a tensor; of several runs those of the first count."""
        if name not in self._meant:
            self._meant[name] = values.reshape(-1)[:SLICE].clone()

    def check(self, path: Path, called: str = "") -> None:
        """Compares the file with what was meant, and logs the largest difference."""
        from safetensors import safe_open

        most, which = 0.0, ""
        with safe_open(str(path), framework="pt") as file:
            for name, meant in self._meant.items():
                found = _beginning(file.get_slice(name), len(meant))
                wanted = meant.to(found.dtype)
                if not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
                    raise GulliverError(
                        f"{called or path}: tensor {name!r} reads back as other values than were "
                        "written: check the disk, and write it again"
                    )
                if found.dtype != meant.dtype and len(meant):
                    apart = (found.double() - meant.double()).abs()
                    if (largest := float(apart.nan_to_num(0.0).max())) > most:
                        most, which = largest, f" ({name})"
        count = len(self._meant)
        _log.info(
            "%s: read back %d tensors, largest difference %.3g%s",
            called or path,
            count,
            most,
            which,
        )


def _beginning(stored: Any, count: int) -> Tensor:
    """Returns the first elements of a tensor in a file, in their order."""
    shape = stored.get_shape()
    if not shape or not count:
        return stored[...].reshape(-1)[:count]
    places = list[slice]()
    for dim in range(len(shape)):
        below = math.prod(shape[dim + 1 :])
        places.append(slice(0, min(shape[dim], -(-count // below))))
    return stored[tuple(places)].reshape(-1)[:count]
