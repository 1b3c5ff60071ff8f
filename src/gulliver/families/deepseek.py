"""DeepSeek-V3: latent attention, whose projections by heads its own plan leaves whole."""

from __future__ import annotations

from gulliver.families.hugging_face import BLOCKS
from gulliver.families.record import Family, Tensors

DEEPSEEK = Family(
    "deepseek_v3",
    tensors=Tensors(
        {
            "q_b_proj": "column by heads",
            "kv_b_proj": "column by heads",
            "kv_a_proj_with_mqa": "latent",
            "self_attn.q_proj": "column by heads",
            "self_attn.o_proj": "row by heads",
        },
        rest=True,
        own=True,
    ),
    blocks=BLOCKS,
)
