"""Sequence (context) parallelism: exact attention over sequences sharded over several ranks.

    groups = make_groups(SequencePlan(ulysses=2, inner=2, layout="zigzag"))
    x = shard(embedded, groups)                                # [batch, local length, hidden]
    out = attention(q, k, v, groups, mask=Mask(causal=True))   # [batch, heads, local length, dim]

`layout` says which rank holds which positions, `mask` which tiles of two ranks' tokens are
computed; `kernels` compute blocks and merge them, `ring` and `heads` exchange them, and `attend`
joins these.

A *ring rank* is a position in the ring: one rank, or with Ulysses the group of ranks that hold the
tokens of that position together.
"""

from gulliver.hardware import AttentionBytes as Volume
from gulliver.hardware import AttentionShape as Shape
from gulliver.parallel.sequence._attention import attention
from gulliver.parallel.sequence._choose import Chosen, SplitPrediction, choose, predict, volume
from gulliver.parallel.sequence._decode import decode
from gulliver.parallel.sequence._layout import Layout, Tail
from gulliver.parallel.sequence._mask import Mask
from gulliver.parallel.sequence._plan import (
    SequenceGroups,
    SequencePlan,
    make_groups,
    make_mixed_groups,
)
from gulliver.parallel.sequence._shard import (
    mean_loss,
    position_ids,
    shard,
    shard_labels,
    show,
    unshard,
    unshard_tail,
)
from gulliver.parallel.sequence._swap import swap_sharded_dim

__all__ = [
    "Chosen",
    "Layout",
    "Mask",
    "SequenceGroups",
    "SequencePlan",
    "Shape",
    "SplitPrediction",
    "Tail",
    "Volume",
    "attention",
    "choose",
    "decode",
    "make_groups",
    "make_mixed_groups",
    "mean_loss",
    "position_ids",
    "predict",
    "shard",
    "shard_labels",
    "show",
    "swap_sharded_dim",
    "unshard",
    "unshard_tail",
    "volume",
]
