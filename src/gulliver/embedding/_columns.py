"""Columns: what a table keeps of every row, in host memory or on a disk.

A record is a row of every column: the weight, and each state that an optimizer has for a row. A
column reads and writes rows by their numbers, and says how many bytes that takes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from gulliver.io import require_space
from gulliver.memory import before_write, check_disk_folder

WEIGHT = "weight"


class RowStorage:
    """Memory that columns lie in: the host's, or files in a folder that end with the process."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            check_disk_folder(self.folder)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Makes a tensor of zeros that lies here; its pages are there when they are written."""
        if self.folder is None:
            return torch.zeros(shape, dtype=dtype)
        count = int(torch.Size(shape).numel())
        require_space(self.folder, count * dtype.itemsize)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="gulliver-rows-") as file:
            # The file has no name as soon as it is mapped: nothing is left behind, however we end.
            flat = torch.from_file(file.name, shared=True, size=max(count, 1), dtype=dtype)
        return flat[:count].view(shape)


class Column:
    """A column of all rows."""

    def __init__(self, storage: RowStorage, values: Tensor) -> None:
        self._storage, self._values = storage, values

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._values.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._values.nbytes // max(len(self._values), 1)

    def read(self, rows: Tensor) -> Tensor:
        """Returns a copy of rows."""
        return self._values.index_select(0, rows)

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Replaces distinct rows."""
        before_write([self._values])
        self._values.index_copy_(0, rows, values)

    def whole(self) -> Tensor:
        """Returns all rows, without a copy."""
        return self._values

    def fill(self, values: Tensor) -> None:
        """Replaces all rows."""
        before_write([self._values])
        self._values.copy_(values)

    def grow(self, values: Tensor) -> None:
        """Adds rows at the end."""
        before, shape = self._values, (len(self._values) + len(values), *values.shape[1:])
        self._values = self._storage.zeros(shape, before.dtype)
        self._values[: len(before)], self._values[len(before) :] = before, values
