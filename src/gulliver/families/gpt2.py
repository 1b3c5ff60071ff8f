"""GPT-2: fused queries, keys and values, and weights that lie ``[inputs, outputs]``."""

from __future__ import annotations

from gulliver.families.record import Blocks, Family, Sequences, Tensors

GPT2 = Family(
    "gpt2",
    tensors=Tensors(
        {
            "attn.c_attn": "q; k; v by heads",
            "attn.c_proj": "row by heads",
            "crossattention.q_attn": "column by heads",
            "crossattention.c_attn": "k; v by heads",
            "crossattention.c_proj": "row by heads",
            "mlp.c_fc": "column",
            "mlp.c_proj": "row",
            "wte": "vocabulary",
            "wpe": "replicate",
            "lm_head": "head",
            "score": "replicate",
            "classifier": "replicate",
        }
    ),
    blocks=Blocks(),
    sequences=Sequences(
        causal=True,
        masks=("causal", "padding", "documents"),
        by_positions=True,
        dropouts=("attn_pdrop",),
        refused=("reorder_and_upcast_attn", "add_cross_attention"),
    ),
)
