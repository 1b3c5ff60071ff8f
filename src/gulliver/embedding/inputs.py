"""Validates the inputs of a forward pass, and converts them to bags of rows.

Ids are checked per table before anything is modified. `Bags` contains the arguments of torch's
``embedding_bag`` for the concatenation of all tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gulliver.errors import GulliverError, check_known

Given = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Table:
    """A table that shares a cache with others.

    Attributes:
        name: name in error messages.
        rows: number of rows.
        first: index of its first row in the concatenated table.
        padding: padding index; None for no padding.
    """

    name: str
    rows: int
    first: int = 0
    padding: int | None = None


@dataclass(frozen=True)
class Bags:
    """Bags of embedding rows, concatenated."""

    # Row indices in the concatenated table, flat; -1 for padding.
    rows: Tensor
    # Start of each bag.
    offsets: Tensor
    # Weight of each id; None for none.
    weights: Tensor | None = None
    # Number of tables whose bags are concatenated and will be placed side by side; 0 for plain
    # bags, -1 for ids ordered by sample.
    tables: int = 0

    def __len__(self) -> int:
        return len(self.offsets)

    def part(self, begin: int, stop: int) -> Bags:
        first = int(self.offsets[begin])
        last = int(self.offsets[stop]) if stop < len(self.offsets) else len(self.rows)
        weights = None if self.weights is None else self.weights[first:last]
        return Bags(self.rows[first:last], self.offsets[begin:stop] - first, weights)


def check_ids(table: Table, ids: Tensor) -> None:
    if ids.is_floating_point():
        raise GulliverError(f"table {table.name!r}: ids must be integers, not {ids.dtype}")
    if not ids.numel():
        return
    low, high = (int(edge) for edge in ids.aminmax())
    if low >= 0 and high < table.rows:
        return
    flat = ids.reshape(-1)
    place = int(((flat < 0) | (flat >= table.rows)).nonzero()[0])
    raise GulliverError(
        f"table {table.name!r} has rows 0 to {table.rows - 1}; id {int(flat[place])} at position "
        f"{place} of {flat.numel()} is out of range"
    )


def rows_of(table: Table, ids: Tensor) -> Tensor:
    """Validates ids, and converts them to rows of the concatenated table, flat, on the host."""
    check_ids(table, ids)
    ids = ids.detach().reshape(-1).cpu().long()
    rows = ids + table.first
    return rows if table.padding is None else rows.masked_fill_(ids == table.padding, -1)


def one_table(
    table: Table,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    last: bool,
) -> Bags:
    """Converts the inputs of a single table to bags, following torch's rules."""
    rows = rows_of(table, ids)
    where = f"table {table.name!r}"
    if ids.dim() == 2:
        if offsets is not None:
            raise GulliverError(f"{where}: two-dimensional ids already define bags; omit offsets")
        width = ids.shape[1]
        offsets = torch.arange(len(ids)) * width
    elif ids.dim() != 1:
        raise GulliverError(f"{where}: ids must have 1 or 2 dims, not {ids.dim()}")
    elif offsets is None:
        raise GulliverError(f"{where}: one-dimensional ids need offsets, the start of each bag")
    else:
        offsets = _checked_offsets(where, offsets, len(rows), last)
    if weights is not None:
        if weights.shape != ids.shape:
            shapes = f"{tuple(weights.shape)}, ids {tuple(ids.shape)}"
            raise GulliverError(
                f"{where}: per_sample_weights must have the shape of the ids: {shapes}"
            )
        weights = weights.reshape(-1)
    return Bags(rows, offsets, weights)


def _checked_offsets(where: str, offsets: Tensor, count: int, last: bool) -> Tensor:
    if offsets.dim() != 1 or offsets.is_floating_point():
        raise GulliverError(f"{where}: offsets must be one-dimensional integers")
    offsets = offsets.detach().cpu().long()
    if last and not len(offsets):
        raise GulliverError(f"{where}: include_last_offset=True needs at least the last offset")
    if len(offsets) and int(offsets[0]) != 0:
        raise GulliverError(f"{where}: the first offset must be 0, not {int(offsets[0])}")
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if len(falls):
        place = int(falls[0]) + 1
        pair = f"{int(offsets[place])} follows {int(offsets[place - 1])}"
        raise GulliverError(f"{where}: offsets must not decrease, but offset {place} does: {pair}")
    end = int(offsets[-1]) if len(offsets) else 0
    if end > count or (last and end != count):
        right = f"{count}, the number of ids" if last else f"at most {count}, the number of ids"
        raise GulliverError(f"{where}: the last offset is {end}; it must be {right}")
    return offsets[:-1] if last else offsets


def check_lengths(tables: Sequence[Table], parts: Sequence[Bags]) -> None:
    for table, part in zip(tables, parts, strict=True):
        if len(part) != len(parts[0]):
            raise GulliverError(
                f"table {table.name!r} has {len(part)} bags, but table {tables[0].name!r} has "
                f"{len(parts[0])}; every table needs one bag per sample"
            )


def several_tables(
    tables: list[Table],
    ids: Given,
    offsets: Given | None,
    weights: Given | None,
    last: bool,
) -> Bags:
    if isinstance(ids, Tensor):
        return _one_each(tables, ids, offsets, weights)
    names = [table.name for table in tables]
    for given in (ids, offsets or {}, weights or {}):
        if isinstance(given, Tensor):
            raise GulliverError(
                "ids are a dict by table name, so offsets and per_sample_weights must also be dicts"
            )
        for name in given:
            check_known("table", name, names)
    missing = [name for name in names if name not in ids]
    if missing:
        raise GulliverError(
            f"table {missing[0]!r} has no ids; pass empty bags for samples without ids"
        )
    parts = []
    for table in tables:
        of_table = (
            given.get(table.name) if isinstance(given, Mapping) else None
            for given in (offsets, weights)
        )
        parts.append(one_table(table, ids[table.name], *of_table, last))  # type: ignore[arg-type]
    check_lengths(tables, parts)
    for part in parts:
        if (part.weights is None) != (parts[0].weights is None):
            raise GulliverError(
                "per_sample_weights are missing for some tables; pass them for all tables, or "
                "omit them"
            )
    firsts = torch.tensor([0, *(len(part.rows) for part in parts)]).cumsum(0)[:-1]
    starts = [part.offsets + first for part, first in zip(parts, firsts, strict=True)]
    held = [part.weights for part in parts if part.weights is not None]
    return Bags(
        torch.cat([part.rows for part in parts]),
        torch.cat(starts),
        torch.cat(held) if held else None,
        len(tables),
    )


def _one_each(
    tables: list[Table], ids: Tensor, offsets: Given | None, weights: Given | None
) -> Bags:
    if ids.dim() != 2 or ids.shape[1] != len(tables):
        raise GulliverError(
            f"ids of {len(tables)} tables must have shape (samples, {len(tables)}), one id per "
            f"table, or be a dict by name, but have shape {tuple(ids.shape)}"
        )
    if offsets is not None:
        raise GulliverError("offsets do not apply to one id per table; omit them")
    rows = torch.stack([rows_of(t, ids[:, n]) for n, t in enumerate(tables)], 1).reshape(-1)
    if weights is not None and (isinstance(weights, Mapping) or weights.shape != ids.shape):
        raise GulliverError("per_sample_weights must have the shape of the ids")
    flat = None if weights is None else weights.reshape(-1)
    return Bags(rows, torch.arange(len(rows)), flat, -1)
