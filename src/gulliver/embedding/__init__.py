"""Embedding tables larger than the device: rows on the host or on disk, hot rows in a cache.

Start with `bag.py`: `CachedEmbeddingBag` runs torch's EmbeddingBag over cache slots, which hold
rows together with their optimizer state. `gulliver.solve.rows` decides which rows are cached.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.embedding.bag import CachedEmbeddingBag, EmbeddingCacheOptions, LookAhead
    from gulliver.embedding.optimizers import RowState, RowWiseAdagrad
    from gulliver.embedding.planning import TablesJob, TablesPlan, plan_tables
    from gulliver.embedding.sharded import ShardedEmbeddingBag

__all__ = [
    "CachedEmbeddingBag",
    "EmbeddingCacheOptions",
    "LookAhead",
    "RowState",
    "RowWiseAdagrad",
    "ShardedEmbeddingBag",
    "TablesJob",
    "TablesPlan",
    "plan_tables",
]

__getattr__, __dir__ = lazy_exports(__name__)
