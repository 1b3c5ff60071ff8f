"""Built-in records of model families; see `docs/families.md`.

Unless a record says otherwise, the blocks are the longest list of equal modules and return a plain
hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from gulliver.families.hugging_face import BLOCKS, GENERAL
from gulliver.families.record import (
    SHARED_BY_SEQUENCE,
    SHARED_BY_TENSOR,
    Blocks,
    Family,
    Sequences,
    Tensors,
)


def _tensors(patterns: Mapping[str, str], **options: Any) -> Tensors:
    """Creates the rules from the patterns of each style, which are separated by spaces."""
    rules = {name: style for style, names in patterns.items() for name in names.split()}
    return Tensors(rules, **options)


def _general(replicated: str = "", **rules: str) -> Tensors:
    """Returns the general rules, and the modules to replicate; others need a rule of the user."""
    return Tensors({**GENERAL.rules, **rules, **dict.fromkeys(replicated.split(), "replicate")})


# Llama, Mistral and Qwen2: decoders with rotary positions and their own tensor plan.
#
# Attention supports sequence parallelism, including windows if the type has them.
DECODER = Sequences(causal=True, masks=("causal", "padding", "documents"), by_positions=True)
WINDOWED = Sequences(
    causal=True, masks=("causal", "window", "padding", "documents"), by_positions=True
)

LLAMA = Family("llama", blocks=Blocks(), sequences=DECODER)
MISTRAL = Family("mistral", blocks=Blocks(), sequences=WINDOWED)
QWEN2 = Family("qwen2", blocks=Blocks(), sequences=WINDOWED)


# Qwen3: a Llama that normalizes queries and keys per head.
#
# The norms' weights are replicated on all tensor ranks, each with other heads: tensor parallelism
# detects this and sums their gradients.
QWEN3 = Family("qwen3", blocks=Blocks(), sequences=WINDOWED)


# Gemma 2 and 3: scaled embeddings, four norms per block, windows in most layers.
#
# Gemma 2 caps attention scores (`attn_logit_softcapping`), which ring attention does not support;
# Gemma 3 has norms of queries and keys instead. Both may cap the final logits elementwise, so the
# loss of sharded logits is exact.
GEMMA2 = Family(
    "gemma2",
    blocks=Blocks(),
    sequences=Sequences(
        SHARED_BY_TENSOR,
        causal=True,
        masks=(),
        why="its attention caps scores, which ring attention does not support",
    ),
)
GEMMA3 = Family(
    "gemma3",
    types=("gemma3_text",),
    blocks=Blocks(),
    sequences=replace(WINDOWED, refused=("attn_logit_softcapping", "use_bidirectional_attention")),
)


# Mixtral: a Mistral with a mixture of experts in each block.
#
# [Note: experts] The weights of a layer's experts are one tensor, ``[experts, out, in]``. The
# tensor axis shards the features inside every expert, so that all ranks have equal work for any
# routing; routers are small and replicated. Each rank's experts then need all tokens, which rules
# out modes that split tokens between blocks (`split_gather`, `ring`). If sequences have their own
# ranks, a token's rank has its experts too, and they need no communication.
#
# The load-balancing loss is not a sum over tokens: it multiplies two means over all of them. So the
# router logits, which are small, are gathered, and each rank computes the loss of the whole.
MIXTRAL = Family(
    "mixtral",
    blocks=Blocks(),
    sequences=replace(
        WINDOWED,
        modes=SHARED_BY_SEQUENCE,
        why="its experts are sharded over the tensor axis, and need all tokens",
    ),
    experts=True,
)


# DeepSeek-V3: latent attention; its own plan does not shard the projections by heads.
DEEPSEEK = Family(
    "deepseek_v3",
    tensors=_tensors(
        {
            "column by heads": "q_b_proj kv_b_proj self_attn.q_proj",
            "row by heads": "self_attn.o_proj",
            "latent": "kv_a_proj_with_mqa",
        },
        rest=True,
        own=True,
    ),
    blocks=BLOCKS,
)


# GPT-2: fused queries, keys and values, and weights of shape ``[inputs, outputs]``.
GPT2 = Family(
    "gpt2",
    tensors=_tensors(
        {
            "q; k; v by heads": "attn.c_attn",
            "k; v by heads": "crossattention.c_attn",
            "column by heads": "crossattention.q_attn",
            "row by heads": "attn.c_proj crossattention.c_proj",
            "column": "mlp.c_fc",
            "row": "mlp.c_proj",
            "vocabulary": "wte",
            "head": "lm_head",
            "replicate": "wpe score classifier",
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


# OPT: positions are computed from the padding mask, and two modules run after the blocks.
def _counted(mask: Tensor) -> Tensor:
    """Returns positions: the number of non-padding tokens before each token in its row."""
    return (mask.long().cumsum(1) * mask - 1).long()


OPT = Family(
    "opt",
    tensors=_general("embed_positions project_in project_out score qa_outputs"),
    blocks=Blocks(after=("final_layer_norm", "project_out")),
    sequences=Sequences(
        causal=True,
        masks=("causal", "padding"),
        positions=_counted,
        dropouts=("attention_dropout", "dropout", "layerdrop"),
    ),
)


# BLOOM: each head's query, key and value are adjacent, and scores have a bias (ALiBi).
BIASED = "its attention adds a bias to the scores, which ring attention does not support"

BLOOM = Family(
    "bloom",
    tensors=_tensors(
        {
            # Each head's q, k and v are adjacent, so heads are sharded as in a single projection.
            "column by heads": "self_attention.query_key_value",
            "row by heads": "self_attention.dense",
            "column": "mlp.dense_h_to_4h",
            "row": "mlp.dense_4h_to_h",
            "vocabulary": "word_embeddings",
            "head": "lm_head",
            "replicate": "score classifier",
        },
        sliced={"self_attention": ("alibi",)},
    ),
    blocks=Blocks(extra=1),
    sequences=Sequences(SHARED_BY_TENSOR, causal=True, masks=(), why=BIASED),
)


# BERT: an encoder with bidirectional attention.
BERT = Family(
    "bert",
    tensors=_general(
        "position_embeddings token_type_embeddings pooler.dense transform.dense seq_relationship "
        "classifier qa_outputs"
    ),
    blocks=Blocks(),
    sequences=Sequences(
        exit="encoder",
        dropouts=("attention_probs_dropout_prob",),
        refused=("add_cross_attention",),
    ),
)


# T5: an encoder and a decoder, whose first blocks compute a bias for all others.
T5 = Family(
    "t5",
    tensors=_general(),
    blocks=Blocks(
        lists=("encoder.block", "decoder.block"),
        extra=2,
        first_only="layer.0.SelfAttention.relative_attention_bias",
    ),
    sequences=Sequences(SHARED_BY_TENSOR, masks=(), why=BIASED),
)


# Whisper: an audio encoder with convolutional tokens, and a text decoder.
WHISPER = Family(
    "whisper",
    tensors=_general("conv1 conv2 embed_positions", proj_out="head"),
    blocks=Blocks(lists=("encoder.layers", "decoder.layers")),
    sequences=Sequences(
        SHARED_BY_TENSOR, masks=(), why="its encoder creates tokens by convolution"
    ),
)


# ViT: a separate module creates tokens from patches of a picture.
VIT = Family(
    "vit",
    tensors=_general("embeddings projection pooler.dense classifier"),
    blocks=Blocks(),
    sequences=Sequences(
        masks=("full",),
        entry="embeddings",
        exit="layernorm",
        masked=False,
        dropouts=("attention_probs_dropout_prob",),
    ),
)


# STDiT3, the video model: alternating spatial and temporal blocks, with its own sequence modes.
STDIT3 = Family(
    "STDiT3",
    classes=("STDiT3",),
    tensors=_tensors(
        {
            "q; k; v by heads": "attn.qkv",
            "k; v by heads": "cross_attn.kv_linear",
            "column by heads": "cross_attn.q_linear",
            "row by heads": "attn.proj cross_attn.proj",
            "summed": "attn.q_norm attn.k_norm",
            "column": "mlp.fc1",
            "row": "mlp.fc2",
            # Modules that do not process tokens are small and replicated.
            "replicate": "x_embedder.proj x_embedder_cond.proj x_embedder_cond_mask.proj "
            "t_embedder.mlp.* fps_embedder.mlp.* t_block.* y_proj.fc1 y_proj.fc2 rope "
            "spatial_blocks.* temporal_blocks.* final_layer final_layer.linear",
        }
    ),
    blocks=Blocks(
        lists=("spatial_blocks", "temporal_blocks"),
        interleaved=True,
        everywhere=("t_embedder", "fps_embedder", "t_block", "y_embedder", "rope"),
    ),
    sequences=Sequences(
        SHARED_BY_SEQUENCE,
        why="its tokens are split by frames or by spatial positions, with its own sequence modes",
    ),
)
