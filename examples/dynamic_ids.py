"""Rows for ids that nobody has counted: any 64-bit integers, admitted when they have come often.

An id that is new shares row 0 with all others that are; its uses are counted, and when it has come
`admit_after` times it is given a row of its own. So a table holds what recurs, and what occurs once
costs no row and no collision with an id that has one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.options import whole_number
from gulliver.solve import HashIndex

SHARED = 0
"""Row of ids that have none of their own."""
LEAST = 1024
"""Ids that a generation of counts takes at least."""


# [Note: exact counts that forget] Ids without a row are counted one by one, in two generations of
# as many ids as the table has rows. When the young generation is full it becomes the old one, and
# the old one is dropped; an id that comes again moves to the young one with its count. No id is
# ever counted for another, so none is admitted too early, however many there are (a count-min
# sketch of the same memory admits ids that came once as soon as there are more of them than
# counters). An id is forgotten, and so admitted later, only if at least `rows` others came between
# two of its uses.
class DynamicIds:
    """A map from ids to rows of a table, which grows as ids are admitted.

    Args:
        rows: number of rows of the table, the shared one among them.
        admit_after: uses after which an id has a row of its own. They are counted exactly; an id is
            forgotten if at least `rows` (or 1,024) other ids without a row came since its last use.

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
        self._counts = RecentCounts(max(self.rows, LEAST))
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
        self.rows, self._counts.most = rows, max(rows, LEAST)

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
            "counts": [torch.from_numpy(part) for part in self._counts.parts()],
            "left_out": self.left_out,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has returned.

        Raises:
            GulliverError: it has more ids than there are rows.
        """
        if len(state["keys"]) >= self.rows:
            raise GulliverError(
                f"the state has {len(state['keys'])} ids, and rows={self.rows} has place for "
                f"{self.rows - 1}: make the map with at least {len(state['keys']) + 1} rows"
            )
        self._index = HashIndex(max(len(state["keys"]), LEAST), wide_keys=True)
        self._index.insert(state["keys"].numpy(), state["rows"].numpy())
        self._counts = RecentCounts(max(self.rows, LEAST))
        self._counts.restore([part.numpy() for part in state["counts"]])
        self.admitted, self.left_out = len(state["keys"]), state["left_out"]


class RecentCounts:
    """Exact counts of the keys that came of late."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._young, self._old = self._empty(), self._empty()

    @staticmethod
    def _empty() -> HashIndex:
        return HashIndex(LEAST, wide_keys=True, wide_values=True)

    @property
    def nbytes(self) -> int:
        """Bytes of both generations."""
        return self._young.nbytes + self._old.nbytes

    def add(self, keys: Any, counts: Any) -> Any:
        """Counts uses of distinct keys; returns all that are known of them."""
        young = self._young.lookup(keys)
        found = counts + np.where(young >= 0, young, self._old.lookup(keys).clip(0))
        self._young.remove(keys[young >= 0])
        self._young.insert(keys, found)
        if len(self._young) >= self.most:
            self._young, self._old = self._empty(), self._young
        return found

    def parts(self) -> list[Any]:
        """Returns keys and counts of both generations."""
        return [*self._young.items(), *self._old.items()]

    def restore(self, parts: list[Any]) -> None:
        """Takes over what `parts` returned."""
        self._young.insert(*parts[:2])
        self._old.insert(*parts[2:])
