"""How memory is shared by tables that have caches of their own, such as tables of other widths."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.solve import MissCurve, lru_misses, share_cache

POINTS = 24
"""Sizes of a cache that misses are counted at."""


def budget_tables(
    batches: Mapping[str, list[Tensor]],
    rows: Mapping[str, int],
    row_bytes: Mapping[str, int],
    budget: int,
) -> dict[str, int]:
    """Chooses the slots of each table's cache from batches that were seen.

    Misses are those of least recently used rows, counted for all sizes at once: a curve that can
    be had in one pass, and near enough to share memory by.

    Args:
        batches: ids of some batches, by table.
        rows: number of rows of each table.
        row_bytes: bytes of a record on the device: weight and optimizer state.
        budget: bytes of all caches together.

    Returns:
        Slots by table, for `CachedEmbeddingBag`'s `cache`.

    Raises:
        GulliverError: the largest batches do not fit, naming the smallest budget.
    """
    curves = {name: _curve(batches[name], rows[name], row_bytes[name]) for name in rows}
    found = share_cache(list(curves.values()), budget)
    if found is None:
        least = sum(curve.sizes[0] * curve.row_bytes for curve in curves.values())
        raise GulliverError(
            f"budget={budget} bytes holds no batch of every table: give at least {least}"
        )
    return dict(zip(rows, found.sizes, strict=True))


def _curve(batches: list[Tensor], rows: int, row_bytes: int) -> MissCurve:
    distinct = [batch.unique().numpy() for batch in batches]
    least = max((len(batch) for batch in distinct), default=1)
    sizes = np.unique(np.geomspace(max(least, 1), rows, POINTS).round().astype(np.int64))
    uses = np.concatenate(distinct)
    misses = lru_misses(uses, sizes.tolist())
    return MissCurve(tuple(sizes.tolist()), tuple(map(float, misses)), row_bytes)
