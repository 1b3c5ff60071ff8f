"""Sequence (context) parallelism: exact attention over sequences sharded over several ranks.

    groups = make_groups(SequencePlan(ulysses=2, inner=2, layout="zigzag"))
    x = shard(embedded, groups)                                # [batch, local length, hidden]
    out = attention(q, k, v, groups, mask=Mask(causal=True))   # [batch, heads, local length, dim]

`layout` assigns positions to ranks, `mask` finds the blocks to compute, `kernels` compute and merge
them, `ring` and `heads` exchange tensors, and `attend` combines these.

A *ring rank* is a position in the ring: one rank, or with Ulysses the group of ranks that share the
tokens at that position.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.hardware.attention import AttentionShape as Shape
    from gulliver.parallel.sequence.attend import attention
    from gulliver.parallel.sequence.choice import SplitPrediction, choose
    from gulliver.parallel.sequence.layout import SequencePlan, make_groups
    from gulliver.parallel.sequence.mask import Mask
    from gulliver.parallel.sequence.sharding import (
        mean_loss,
        position_ids,
        shard,
        shard_labels,
        swap_sharded_dim,
        unshard,
    )

__all__ = [
    "Mask",
    "SequencePlan",
    "Shape",
    "SplitPrediction",
    "attention",
    "choose",
    "make_groups",
    "mean_loss",
    "position_ids",
    "shard",
    "shard_labels",
    "swap_sharded_dim",
    "unshard",
]

__getattr__, __dir__ = lazy_exports(__name__)
