"""Rows for ids that nobody has counted: any 64-bit integers, admitted when they have come often.

An id that is new shares row 0 with all others that are; a sketch counts it, and when it has come
`admit_after` times it is given a row of its own. So a table holds what recurs, and what occurs once
costs no row and no collision with an id that has one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.options import whole_number
from gulliver.solve import DecayedCounts, HashIndex

SHARED = 0
"""Row of ids that have none of their own."""


class DynamicIds:
    """A map from ids to rows of a table, which grows as ids are admitted.

    Args:
        rows: number of rows of the table, the shared one among them.
        admit_after: uses after which an id has a row of its own; counted by a sketch, which may
            count others with it and so admit one too early, never too late.

    Attributes:
        admitted: ids that have a row.
        left_out: uses of ids that would have been admitted, had there been a row left.

    Raises:
        GulliverError: fewer than two rows, or no use to be admitted after.

    Example:
        >>> ids = DynamicIds(rows=1_000_000, admit_after=3)
        >>> output = table(ids.rows_of(raw)[:, None])
    """

    def __init__(self, rows: int, admit_after: int = 2) -> None:
        self.rows, self.admit_after = (
            whole_number("rows", rows),
            whole_number("admit_after", admit_after),
        )
        if self.rows < 2:
            raise GulliverError(f"rows={rows}: give at least 2, row {SHARED} is shared")
        if self.admit_after < 1:
            raise GulliverError(f"admit_after={admit_after}: give at least 1")
        self._index = HashIndex(1024, wide_keys=True)
        self._counts = DecayedCounts(4 * self.rows, math.inf)
        self.admitted = self.left_out = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the map and the counts."""
        return self._index.nbytes + self._counts.nbytes

    def rows_of(self, ids: Tensor, learn: bool = True) -> Tensor:
        """Returns the row of each id.

        Args:
            ids: any int64.
            learn: whether the ids are counted, and admitted where they have come often enough.

        Returns:
            Rows, of the shape of `ids`.

        Raises:
            GulliverError: the ids are not integers.
        """
        if ids.dtype not in (torch.int64, torch.int32):
            raise GulliverError(f"ids must be int64 or int32, not {ids.dtype}")
        keys, inverse, counts = torch.unique(
            ids.cpu().long(), return_inverse=True, return_counts=True
        )
        known, rows = keys.numpy(), self._index.lookup(keys.numpy())
        if learn:
            self._admit(known, rows, counts.numpy())
        rows[rows < 0] = SHARED
        return torch.from_numpy(rows)[inverse].view(ids.shape).to(ids.device)

    def grow(self, rows: int) -> None:
        """Knows that the table has more rows now.

        Raises:
            GulliverError: it has not.
        """
        if rows <= self.rows:
            raise GulliverError(f"rows={rows}: there are {self.rows} already")
        self.rows = rows

    def _admit(self, keys: Any, rows: Any, counts: Any) -> None:
        new = np.flatnonzero(rows < 0)
        often = self._counts.add(keys[new], counts[new]) >= self.admit_after
        wanted = new[often]
        taken = wanted[: self.rows - 1 - self.admitted]
        self.left_out += int(counts[wanted[len(taken) :]].sum())
        numbers = np.arange(len(taken)) + self.admitted + 1
        self._index.insert(keys[taken], numbers)
        rows[taken] = numbers
        self.admitted += len(taken)

    def state_dict(self) -> dict[str, Any]:
        """Returns ids, rows and counts, to go on from."""
        keys, rows = self._index.items()
        return {
            "keys": torch.from_numpy(keys),
            "rows": torch.from_numpy(rows),
            "counts": torch.from_numpy(self._counts.tables.copy()),
            "left_out": self.left_out,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has returned.

        Raises:
            GulliverError: it is of a map of another size.
        """
        if (
            tuple(state["counts"].shape) != self._counts.tables.shape
            or len(state["keys"]) >= self.rows
        ):
            raise GulliverError(
                f"the state is of a map with other rows than {self.rows}: make it with those it "
                "had, and grow() it then"
            )
        self._index = HashIndex(max(len(state["keys"]), 1024), wide_keys=True)
        self._index.insert(state["keys"].numpy(), state["rows"].numpy())
        self._counts.tables[:] = state["counts"].numpy()
        self.admitted, self.left_out = len(state["keys"]), state["left_out"]
