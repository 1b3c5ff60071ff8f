"""Places of the rows of a table among ranks, and first values that do not depend on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gulliver.embedding._inputs import Table
from gulliver.errors import GulliverError, nearest

BLOCK = 4096
"""Rows that are drawn from one seed."""


@dataclass(frozen=True)
class TablePlacement:
    """The way in which ranks share a table."""

    # ``whole``, ``column`` or ``row``.
    kind: str
    # Rank that has it, where it is whole.
    rank: int = 0

    @classmethod
    def read(cls, text: str, ranks: int) -> TablePlacement:
        """Reads ``column``, ``row`` or ``whole:RANK``."""
        kind, _, rank = text.partition(":")
        if kind not in ("whole", "column", "row") or (kind == "whole") != bool(rank):
            right = nearest(text, ["column", "row", "whole:0"])
            raise GulliverError(f"placement {text!r} is unknown: {right}")
        if rank and not (rank.isdigit() and int(rank) < ranks):
            raise GulliverError(f"placement {text!r}: there are the ranks 0 to {ranks - 1}")
        return cls(kind, int(rank or 0))


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns what of so many rows or columns a rank has: first, and one past the last."""
    return size * rank // ranks, size * (rank + 1) // ranks


class FirstRows:
    """First values of rows, the same on whichever rank."""

    def __init__(self, tables: list[Table], dim: int, given: Tensor | None, seed: int) -> None:
        rows = tables[-1].first + tables[-1].rows
        if given is not None and tuple(given.shape) != (rows, dim):
            raise GulliverError(f"_weight is {tuple(given.shape)}, the tables {(rows, dim)}")
        self._tables = {table.name: (n, table) for n, table in enumerate(tables)}
        self._dim, self._given, self._seed = dim, given, seed
        self.dtype = torch.float32 if given is None else given.dtype

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        """Returns the rows from `begin` to `stop` of a table."""
        number, table = self._tables[name]
        if self._given is not None:
            return self._given[table.first + begin : table.first + stop].detach().cpu()
        blocks = []
        for block in range(begin // BLOCK, -(-stop // BLOCK)):
            draw = torch.Generator().manual_seed(_seed_of(self._seed, number, block))
            values = torch.randn(BLOCK, self._dim, generator=draw, dtype=self.dtype)
            first = block * BLOCK
            blocks.append(values[max(begin - first, 0) : stop - first])
        made = torch.cat(blocks)
        if table.padding is not None and begin <= table.padding < stop:
            made[table.padding - begin] = 0
        return made


def _seed_of(*numbers: int) -> int:
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % (2**63 - 1)
    return seed
