"""Tables larger than the device: rows on the host or a disk, the hot ones in a cache, exactly.

Read `_bag.py`, then `_records.py`: `CachedEmbeddingBag` is torch's EmbeddingBag over slots that
rows move into, with all that the optimizer knows of them. Which rows, `gulliver.solve` decides
(`RowReplacement`); `_lookahead.py` shows it the batches to come; `_columns.py` is what the rows lie
in; `_attached.py` ties an optimizer of `_optimizers.py` to them. `_sharded.py` shares tables among
ranks as `_planning.py` chooses; `_budget.py` shares memory among caches.
"""

from gulliver.embedding._bag import CachedEmbeddingBag, EmbeddingCacheOptions
from gulliver.embedding._budget import budget_tables
from gulliver.embedding._lookahead import LookAhead
from gulliver.embedding._optimizers import ROW_OPTIMIZERS, RowState, RowWiseAdagrad
from gulliver.embedding._planning import (
    DATA_SETS,
    PlannedTable,
    TablesJob,
    TablesPlan,
    plan_tables,
)
from gulliver.embedding._sharded import ShardedEmbeddingBag

__all__ = [
    "DATA_SETS",
    "ROW_OPTIMIZERS",
    "CachedEmbeddingBag",
    "EmbeddingCacheOptions",
    "LookAhead",
    "PlannedTable",
    "RowState",
    "RowWiseAdagrad",
    "ShardedEmbeddingBag",
    "TablesJob",
    "TablesPlan",
    "budget_tables",
    "plan_tables",
]
