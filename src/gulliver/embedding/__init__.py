"""Embedding tables larger than the device: rows on the host or on disk, hot rows in a cache.

Start with `bag.py`: `CachedEmbeddingBag` runs torch's EmbeddingBag over cache slots, which hold
rows together with their optimizer state. `gulliver.solve.rows` decides which rows are cached.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.embedding.bag import CachedEmbeddingBag as CachedEmbeddingBag
    from gulliver.embedding.bag import EmbeddingCacheOptions as EmbeddingCacheOptions
    from gulliver.embedding.bag import LookAhead as LookAhead
    from gulliver.embedding.optimizers import RowState as RowState
    from gulliver.embedding.optimizers import RowWiseAdagrad as RowWiseAdagrad
    from gulliver.embedding.planning import TablesJob as TablesJob
    from gulliver.embedding.planning import TablesPlan as TablesPlan
    from gulliver.embedding.planning import plan_tables as plan_tables
    from gulliver.embedding.sharded import ShardedEmbeddingBag as ShardedEmbeddingBag

__getattr__, __dir__ = lazy_exports(__name__)
