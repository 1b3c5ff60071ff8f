"""BLOOM: each head's query, key and value lie together, and scores get a bias (ALiBi)."""

from __future__ import annotations

from gulliver.families.record import SHARED_BY_TENSOR, Blocks, Family, Sequences, Tensors

BIASED = "its attention adds a bias to the scores, which no ring carries"

BLOOM = Family(
    "bloom",
    tensors=Tensors(
        {
            # Each head's q, k and v lie together, so that heads are cut as of one projection.
            "self_attention.query_key_value": "column by heads",
            "self_attention.dense": "row by heads",
            "mlp.dense_h_to_4h": "column",
            "mlp.dense_4h_to_h": "row",
            "word_embeddings": "vocabulary",
            "lm_head": "head",
            "score": "replicate",
            "classifier": "replicate",
        },
        sliced={"self_attention": ("alibi",)},
    ),
    blocks=Blocks(extra=1),
    sequences=Sequences(SHARED_BY_TENSOR, causal=True, masks=(), why=BIASED),
)
