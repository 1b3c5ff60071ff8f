"""What a table keeps of every row, in host memory or on a disk: columns, and formats of cold rows.

A record is a row of every column: the weight, and each state that an optimizer has for a row. A
column reads and writes rows by their numbers, and says how many bytes that takes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from gulliver.errors import GulliverError, nearest
from gulliver.io import require_space
from gulliver.memory import before_write, check_disk_folder

Cold = Literal["exact", "bf16", "int8"]
COLD = ("exact", "bf16", "int8")
WEIGHT = "weight"


# [Note: cold rows] By choice the weights that lie here are narrower than those in the cache: bf16,
# or int8 with a scale for each row. They are rounded when a changed row leaves the cache, up or
# down at random with a chance in proportion, so that the error has no direction: its expectation is
# 0, and its size less than one step, 2^-7 of the value in bf16 and 1/127 of the row's largest value
# in int8 (or 1.2e-38, where that is more). A row with inf or nan has no scale: int8 refuses it by
# number. Random numbers follow from the seed and the number of the write, so that a run repeats.
class Place:
    """A place where columns lie: host memory, or files in a folder that go with the process."""

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


class Column(Protocol):
    """A column of all rows."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        ...

    def read(self, rows: Tensor) -> Tensor:
        """Returns a copy of rows."""
        ...

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Replaces distinct rows."""
        ...

    def whole(self) -> Tensor:
        """Returns all rows, without a copy where they are kept as they are."""
        ...

    def fill(self, values: Tensor) -> None:
        """Replaces all rows."""
        ...

    def grow(self, values: Tensor) -> None:
        """Adds rows at the end."""
        ...

    def take(self, other: Any) -> None:
        """Replaces all rows by those of a column of the same kind and size, as it keeps them."""
        ...


class ExactColumn:
    """A column that keeps values as they are."""

    def __init__(self, place: Place, values: Tensor) -> None:
        self._place, self._values = place, values

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
        self._values = self._place.zeros(shape, before.dtype)
        self._values[: len(before)], self._values[len(before) :] = before, values

    def take(self, other: ExactColumn) -> None:
        """Replaces all rows by those of another column."""
        self.fill(other._values)


class RoundedColumn:
    """A column of weights in bf16 or int8, rounded at random when they are written."""

    def __init__(self, place: Place, values: Tensor, cold: Cold, seed: int = 0) -> None:
        self._place, self._dtype, self._cold = place, values.dtype, cold
        self._generator = torch.Generator().manual_seed(seed)
        kind = torch.bfloat16 if cold == "bf16" else torch.int8
        self._values = place.zeros(tuple(values.shape), kind)
        self._scales = place.zeros((len(values), 1), torch.float32) if cold == "int8" else None
        self.fill(values)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._values.nbytes + (0 if self._scales is None else self._scales.nbytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.nbytes // max(len(self._values), 1)

    def read(self, rows: Tensor) -> Tensor:
        """Returns rows in the dtype of the cache."""
        values = self._values.index_select(0, rows).to(self._dtype)
        if self._scales is not None:
            values *= self._scales.index_select(0, rows).to(self._dtype)
        return values

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Replaces distinct rows by values rounded at random."""
        before_write([self._values] if self._scales is None else [self._values, self._scales])
        if self._scales is None:
            self._values.index_copy_(0, rows, round_bf16(values, self._generator))
            return
        _check_finite(rows, values)
        rounded, scales = round_int8(values, self._generator)
        self._values.index_copy_(0, rows, rounded)
        self._scales.index_copy_(0, rows, scales)

    def whole(self) -> Tensor:
        """Returns a copy of all rows in the dtype of the cache."""
        return self.read(torch.arange(len(self._values)))

    def fill(self, values: Tensor) -> None:
        """Replaces all rows, a block at a time."""
        for rows in torch.arange(len(values)).split(2**16):
            self.write(rows, values[rows])

    def grow(self, values: Tensor) -> None:
        """Adds rows at the end."""
        before = self._values
        count, rows = len(before), torch.arange(len(before), len(before) + len(values))
        self._values = self._place.zeros((count + len(values), before.shape[1]), before.dtype)
        self._values[:count] = before
        if self._scales is not None:
            scales = self._place.zeros((count + len(values), 1), torch.float32)
            scales[:count] = self._scales
            self._scales = scales
        self.write(rows, values)

    def take(self, other: RoundedColumn) -> None:
        """Replaces all rows by those of another column, without rounding them again."""
        self._values.copy_(other._values)
        if self._scales is not None and other._scales is not None:
            self._scales.copy_(other._scales)
        self._generator.set_state(other._generator.get_state())


def round_bf16(values: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds to bf16, up or down at random, in proportion to the distance."""
    # What lies beyond the largest number of bf16, 3.39e38, becomes that one.
    bits = values.float().view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, generator=generator, dtype=torch.int32)
    finite = values.isfinite()
    # What is added reaches the upper half as often as the lower half is large.
    rounded = (torch.where(finite, bits + noise, bits) & -(2**16)).view(torch.float32)
    largest = torch.finfo(torch.bfloat16).max
    return torch.where(finite, rounded.clamp(-largest, largest), rounded).to(torch.bfloat16)


def round_int8(values: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rounds each row to multiples of a 127th of its largest value; returns them and the scales."""
    # A scale is never below the smallest normal number, 1.2e-38: a row of smaller values is rounded
    # to multiples of that.
    values = values.float()
    scales = (values.abs().amax(1, keepdim=True) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    steps = values / scales
    noise = torch.rand(values.shape, generator=generator)
    return (steps + noise).floor().clamp(-127, 127).to(torch.int8), scales


def _check_finite(rows: Tensor, values: Tensor) -> None:
    """Refuses what a scale for each row cannot say."""
    # One sum tells of any; a sum that overflows is looked at more closely.
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        row = int(rows[(~values.isfinite()).any(1).nonzero()[0]])
        raise GulliverError(
            f"row {row} of the table has inf or nan, which cold='int8' cannot keep: take "
            "cold='exact', or look for where training diverges"
        )


def make_weight_column(place: Place, values: Tensor, cold: str, seed: int) -> Column:
    """Makes the column of weights."""
    if cold not in COLD:
        raise GulliverError(f"cold={cold!r} is unknown: {nearest(cold, COLD)}")
    if cold == "exact":
        return ExactColumn(place, values)
    if values.dtype != torch.float32:
        raise GulliverError(f"cold={cold!r} rounds float32, not {values.dtype}: take cold='exact'")
    return RoundedColumn(place, values, cold, seed)  # type: ignore[arg-type]
