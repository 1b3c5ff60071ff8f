"""T5: an encoder and a decoder, whose first blocks compute a bias for all the others."""

from __future__ import annotations

from gulliver.families.bloom import BIASED
from gulliver.families.record import SHARED_BY_TENSOR, Blocks, Family, Sequences, Tensors

T5 = Family(
    "t5",
    tensors=Tensors(
        {
            **{
                f"{attention}.{name}": "column by heads"
                for attention in ("SelfAttention", "EncDecAttention")
                for name in "qkv"
            },
            "SelfAttention.o": "row by heads",
            "EncDecAttention.o": "row by heads",
            "relative_attention_bias": "embedding by heads",
            "DenseReluDense.wi": "column",
            "DenseReluDense.wi_0": "column",
            "DenseReluDense.wi_1": "column",
            "DenseReluDense.wo": "row",
            "shared": "vocabulary",
            "embed_tokens": "vocabulary",
            "lm_head": "head",
        }
    ),
    blocks=Blocks(
        lists=("encoder.block", "decoder.block"),
        extra=2,
        first_only="layer.0.SelfAttention.relative_attention_bias",
    ),
    sequences=Sequences(SHARED_BY_TENSOR, masks=(), why=BIASED),
)
