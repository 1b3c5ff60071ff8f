"""Gemma 2 and 3: scaled embeddings, four norms to a block, windows in most layers.

Gemma 2 caps the scores of its attention (`attn_logit_softcapping`), which no ring carries; Gemma 3
has norms of queries and keys in place of that. Both may cap their last logits, which is done column
by column, so that the loss of logits that stay apart is theirs.
"""

from __future__ import annotations

from dataclasses import replace

from gulliver.families.llama import WINDOWED
from gulliver.families.record import SHARED_BY_TENSOR, Blocks, Family, Sequences

GEMMA2 = Family(
    "gemma2",
    blocks=Blocks(),
    sequences=Sequences(
        SHARED_BY_TENSOR,
        causal=True,
        masks=(),
        why="its attention caps the scores, which no ring carries",
    ),
)
GEMMA3 = Family(
    "gemma3",
    types=("gemma3_text",),
    blocks=Blocks(),
    sequences=replace(WINDOWED, refused=("attn_logit_softcapping", "use_bidirectional_attention")),
)
