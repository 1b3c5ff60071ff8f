"""Tensor parallelism: layers sharded over ranks, with plain local parameters.

    plan = plan_tensor(model, 4)          # from the model's own plan, its family, or rules=
    apply_tensor(model, plan, line)       # in place; sequence="split_gather" cuts activations too

`plan` decides how each module is cut, by the `styles` that exist; `apply` replaces modules by the
`layers`, whose communication is in `entry` and `collectives`.
"""

from gulliver.layout import deal
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
from gulliver.parallel.tensor._embedding import ColumnEmbedding, VocabularyEmbedding
from gulliver.parallel.tensor._linear import ColumnLinear, RowLinear
from gulliver.parallel.tensor._loss import cross_entropy
from gulliver.parallel.tensor._modules import DROPOUTS, best_match, dropouts_of
from gulliver.parallel.tensor._placed import Placed, TensorPlan
from gulliver.parallel.tensor._plan import plan_tensor
from gulliver.parallel.tensor._quantized import QuantizedColumn, QuantizedRow
from gulliver.parallel.tensor._shared import SharedSequence
from gulliver.parallel.tensor._table import DRAWN_ALIKE, STYLES, How

__all__ = [
    "DRAWN_ALIKE",
    "DROPOUTS",
    "STYLES",
    "ColumnConvolution",
    "ColumnEmbedding",
    "ColumnLinear",
    "How",
    "Placed",
    "QuantizedColumn",
    "QuantizedRow",
    "RowConvolution",
    "RowLinear",
    "SequenceMode",
    "SharedSequence",
    "TensorPlan",
    "VocabularyEmbedding",
    "apply_tensor",
    "best_match",
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
