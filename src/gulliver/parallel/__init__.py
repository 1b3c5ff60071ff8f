"""Exact parallel primitives."""

from gulliver.families import (
    hugging_face_of,
)
from gulliver.parallel._aliases import check_unshared
from gulliver.parallel._dropout import Along, attention_with_dropout, drop, mix, word_of
from gulliver.parallel._new_state import has_stepped, take_new_state
from gulliver.parallel._optimizer import BoostedOptimizer, named_groups, named_trainables
from gulliver.parallel._saving import (
    Counter,
    persistent_buffers,
    refuse_extra_state,
)
from gulliver.parallel.zero import ZeroOptimizer, is_boosted
from gulliver.parallel.zero._elementwise import (
    OPTIMIZERS,
    check_by_chunk,
    check_optimizer,
    check_trainable,
    needs_whole,
    optimizer_table,
    state_sizes,
)
from gulliver.parallel.zero._statistics import BufferSync
from gulliver.parallel.zero._tuner import BucketTuner

__all__ = [
    "OPTIMIZERS",
    "Along",
    "BoostedOptimizer",
    "BucketTuner",
    "BufferSync",
    "Counter",
    "ZeroOptimizer",
    "attention_with_dropout",
    "check_by_chunk",
    "check_optimizer",
    "check_trainable",
    "check_unshared",
    "drop",
    "has_stepped",
    "hugging_face_of",
    "is_boosted",
    "mix",
    "named_groups",
    "named_trainables",
    "needs_whole",
    "optimizer_table",
    "persistent_buffers",
    "refuse_extra_state",
    "state_sizes",
    "take_new_state",
    "word_of",
]
