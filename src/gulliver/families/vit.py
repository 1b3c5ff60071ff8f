"""ViT: a module of its own makes the tokens, of patches of a picture."""

from __future__ import annotations

from gulliver.families.opt import SEPARATE
from gulliver.families.record import Blocks, Family, Sequences, Tensors

VIT = Family(
    "vit",
    tensors=Tensors(
        {
            **SEPARATE,
            "attention.o_proj": "row by heads",
            "mlp.fc1": "column",
            "mlp.fc2": "row",
            "embeddings": "replicate",
            "projection": "replicate",
            "pooler.dense": "replicate",
            "classifier": "replicate",
        }
    ),
    blocks=Blocks(),
    sequences=Sequences(
        masks=("full",),
        entry="embeddings",
        exit="layernorm",
        masked=False,
        dropouts=("attention_probs_dropout_prob",),
    ),
)
