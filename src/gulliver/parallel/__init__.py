"""Exact parallel primitives."""

from gulliver.families import (
    OwnLoss,
    asks_routers,
    has_known_forward,
    hugging_face_of,
    own_loss,
)
from gulliver.parallel._aliases import check_unshared
from gulliver.parallel._dropout import Along, attention_with_dropout, drop, mix, word_of
from gulliver.parallel._new_state import has_stepped, take_new_state
from gulliver.parallel._optimizer import BoostedOptimizer, named_groups, named_trainables
from gulliver.parallel._saving import (
    Counter,
    OptimizerCheckpoint,
    persistent_buffers,
    refuse_extra_state,
)
from gulliver.parallel.zero import (
    OPTIMIZERS,
    BucketTuner,
    BufferSync,
    ZeroOptimizer,
    ZeroWires,
    check_by_chunk,
    check_optimizer,
    check_trainable,
    is_boosted,
    needs_whole,
    optimizer_table,
    state_sizes,
)

__all__ = [
    "OPTIMIZERS",
    "Along",
    "BoostedOptimizer",
    "BucketTuner",
    "BufferSync",
    "Counter",
    "OptimizerCheckpoint",
    "OwnLoss",
    "ZeroOptimizer",
    "ZeroWires",
    "asks_routers",
    "attention_with_dropout",
    "check_by_chunk",
    "check_optimizer",
    "check_trainable",
    "check_unshared",
    "drop",
    "has_known_forward",
    "has_stepped",
    "hugging_face_of",
    "is_boosted",
    "mix",
    "named_groups",
    "named_trainables",
    "needs_whole",
    "optimizer_table",
    "own_loss",
    "persistent_buffers",
    "refuse_extra_state",
    "state_sizes",
    "take_new_state",
    "word_of",
]
