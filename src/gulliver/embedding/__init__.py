"""Tables larger than the device: rows on the host or a disk, the hot ones in a cache, exactly.

Read `bag.py`, then `_records.py`: `CachedEmbeddingBag` is torch's EmbeddingBag over slots that
rows move into, with all that the optimizer knows of them. Which rows, `gulliver.solve` decides
(`RowReplacement`); `_lookahead.py` shows it the batches to come; `records.py` is what the rows lie
in; `optimizers.py` ties an optimizer of `_optimizers.py` to them. `_sharded.py` shares tables among
ranks as `_planning.py` chooses; `_budget.py` shares memory among caches.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.embedding.bag import CachedEmbeddingBag, EmbeddingCacheOptions, LookAhead
    from gulliver.embedding.optimizers import RowState, RowWiseAdagrad
    from gulliver.embedding.planning import TablesJob, TablesPlan, budget_tables, plan_tables
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
    "budget_tables",
    "plan_tables",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "gulliver.embedding.bag": ["CachedEmbeddingBag", "EmbeddingCacheOptions", "LookAhead"],
        "gulliver.embedding.optimizers": ["RowState", "RowWiseAdagrad"],
        "gulliver.embedding.planning": ["TablesJob", "TablesPlan", "budget_tables", "plan_tables"],
        "gulliver.embedding.sharded": ["ShardedEmbeddingBag"],
    },
)
