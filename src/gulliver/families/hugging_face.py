"""Generic support for Hugging Face models, by names and structure, with exceptions by type.

Most transformers models follow one of a few patterns. Tensors: a type has its own plan (`tp_plan`),
or its layers have the names in `GENERAL` (separate queries, keys, values and output; two linear
layers, or three with a gate; experts). Types with other attention layers (`OPAQUE`) have their
linear layers sharded one by one, with gathered outputs. Blocks: the longest list of equal blocks,
surrounded by modules named in `BLOCKS`.

`tests/models/family_sweep.py` compares each listed type with a single process; see
`docs/parity.md`. Types that need more are in `records.py`.
"""

from __future__ import annotations

from dataclasses import replace

from gulliver.families.record import Blocks, Family, Tensors

BLOCKS = Blocks(
    extra=-1,
    after=(
        "lm_head",
        "cls",
        "classifier",
        "embed_out",
        "output_projection",
        "generator_predictions",
        "generator_lm_head",
        "vocab_transform",
        "vocab_layer_norm",
        "vocab_projector",
        "pred_layer",
        "final_layer_norm",
        "final_norm",
        "project_out",
    ),
    everywhere=("layernorm_embedding", "emb_norm", "embed_layer_norm", "embeddings_project"),
    encoders=("encoder.layers", "encoder.layer", "encoder.block"),
)
"""Names in transformers of modules that run before or after the blocks, and of encoder blocks."""

HUGGING_FACE = Family("Hugging Face", blocks=BLOCKS)
"""Record for other types: the model's own plan, longest list of blocks, and own loss."""

_AROUND = {
    **dict.fromkeys(("embed_tokens", "word_embeddings", "wte", "embed_in", "shared"), "vocabulary"),
    **dict.fromkeys(("lm_head", "embed_out", "output_projection", "lm_head.decoder"), "head"),
    **dict.fromkeys(("predictions.decoder", "generator_lm_head"), "head"),
}

_MLP = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3", "fc1", "mlp.c_fc", "fc_in"), "column"),
    **dict.fromkeys(("intermediate.dense", "dense_h_to_4h", "lin1"), "column"),
    **dict.fromkeys(("DenseReluDense.wi", "DenseReluDense.wi_0", "DenseReluDense.wi_1"), "column"),
    **dict.fromkeys(("down_proj", "w2", "fc2", "mlp.c_proj", "fc_out", "lin2"), "row"),
    **dict.fromkeys(("output.dense", "dense_4h_to_h", "DenseReluDense.wo"), "row"),
    "experts": "experts",
}

_ATTENTION = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "column by heads"),
    **dict.fromkeys(("o_proj", "attn.out_proj", "self_attn.out_proj"), "row by heads"),
    **dict.fromkeys(("encoder_attn.out_proj", "attention.out_proj"), "row by heads"),
    **dict.fromkeys(("self.query", "self.key", "self.value"), "column by heads"),
    **dict.fromkeys(("attention.query", "attention.key", "attention.value"), "column by heads"),
    **dict.fromkeys(("attention.output.dense", "crossattention.output.dense"), "row by heads"),
    **dict.fromkeys(("q_lin", "k_lin", "v_lin"), "column by heads"),
    "out_lin": "row by heads",
    **{f"{a}.{n}": "column by heads" for a in ("SelfAttention", "EncDecAttention") for n in "qkv"},
    **dict.fromkeys(("SelfAttention.o", "EncDecAttention.o"), "row by heads"),
    "relative_attention_bias": "embedding by heads",
}

GENERAL = Tensors({**_AROUND, **_MLP, **_ATTENTION}, rest=True)
OPAQUE = Tensors({**_AROUND, **_MLP}, rest=True)
BARE = Tensors(_AROUND, rest=True)
_PRENORM = Tensors(
    {
        **_AROUND,
        **_ATTENTION,
        # A norm over the whole is next to the first of the two.
        "intermediate.dense": "column, gathered",
        "output.dense": "row, split",
        "attention.output.dense": "row by heads",
    },
    rest=True,
)

_WRITTEN = {
    "bamba bart bert-generation biogpt bitnet blenderbot blenderbot-small camembert ctrl "
    "data2vec-text diffllama electra ernie gpt_bigcode gpt_neox_japanese gpt_oss "
    "hunyuan_v1_dense lfm2 lfm3 marian mbart megatron-bert modernbert-decoder mvp openai-gpt "
    "pegasus persimmon plbart recurrent_gemma rembert roberta roformer stablelm xlm "
    "xlm-roberta xlm-roberta-xl m2m_100 mt5 umt5 switch_transformers distilbert layoutlm deit "
    "dinov2 dinov2_with_registers ijepa vit_msn": GENERAL,
    "codegen gptj mpt": OPAQUE,
    "rwkv": BARE,
    "roberta-prelayernorm": _PRENORM,
    "moshi": Tensors(own=True, refused="its layers have a weight per codebook"),
}
"""Sharding of tensors, by model type."""

_MORE = "its blocks return more than the hidden state, which later blocks read"
_UNSTAGED = {
    "glm_moe_dsa hy_v4 gpt_neox_japanese": _MORE,
    "inkling_text inkling2_text": "its blocks read results of modules before them",
    "mt5 longt5": "its first block computes a bias for all others",
    "mpnet": "all its blocks use a bias computed outside of them",
    "xlm flaubert": "its layers are lists of modules, not blocks",
    "switch_transformers": "its encoder passes on more than the hidden state",
    "recurrent_gemma": "its blocks keep state between calls",
    "roformer": "its blocks read positions that the encoder around them embeds",
    "ibert squeezebert": "its blocks pass on more than a hidden state",
    "nllb-moe": "its encoder passes on the choices of its routers",
    "hrm_text": "it runs its blocks several times",
}
"""Model types that cannot be split into pipeline stages, with the reason."""


def _types() -> tuple[Family, ...]:
    tensors = {kind: how for kinds, how in _WRITTEN.items() for kind in kinds.split()}
    reasons = {kind: why for kinds, why in _UNSTAGED.items() for kind in kinds.split()}
    return tuple(
        Family(
            kind,
            tensors=tensors.get(kind),
            blocks=replace(
                BLOCKS, refused=reasons.get(kind, ""), parts=kind in ("xlm", "flaubert")
            ),
        )
        for kind in dict.fromkeys((*tensors, *reasons))
    )


TYPES = _types()
