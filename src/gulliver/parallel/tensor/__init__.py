"""Tensor parallelism: layers cut over ranks, with plain local parameters.

    plan = plan_tensor(model, 4)          # from the model's own plan, the table, or rules=
    apply_tensor(model, plan, line)       # in place; sequence="split_gather" cuts activations too

Read `_plan.py` and `_apply.py` for how a model is treated, `_linear.py` and `_entry.py` for what
its layers do, `_table.py` for what is known of models.
"""

from gulliver.parallel.tensor._apply import (
    SequenceMode,
    apply_tensor,
    check_mode,
    materialize,
)
from gulliver.parallel.tensor._collectives import (
    copy,
    gather,
    gather_partial,
    reduce,
    reduce_split,
    split,
)
from gulliver.parallel.tensor._convolution import ColumnConvolution, RowConvolution
from gulliver.parallel.tensor._deal import deal
from gulliver.parallel.tensor._embedding import ColumnEmbedding, VocabularyEmbedding
from gulliver.parallel.tensor._linear import ColumnLinear, RowLinear
from gulliver.parallel.tensor._loss import cross_entropy
from gulliver.parallel.tensor._plan import (
    DROPOUTS,
    Placed,
    TensorPlan,
    dropouts_of,
    plan_tensor,
)
from gulliver.parallel.tensor._shared import SharedSequence
from gulliver.parallel.tensor._table import DRAWN_ALIKE, FAMILIES, STYLES, Family, How

__all__ = [
    "DRAWN_ALIKE",
    "DROPOUTS",
    "FAMILIES",
    "STYLES",
    "ColumnConvolution",
    "ColumnEmbedding",
    "ColumnLinear",
    "Family",
    "How",
    "Placed",
    "RowConvolution",
    "RowLinear",
    "SequenceMode",
    "SharedSequence",
    "TensorPlan",
    "VocabularyEmbedding",
    "apply_tensor",
    "check_mode",
    "copy",
    "cross_entropy",
    "deal",
    "dropouts_of",
    "gather",
    "gather_partial",
    "materialize",
    "plan_tensor",
    "reduce",
    "reduce_split",
    "split",
]
