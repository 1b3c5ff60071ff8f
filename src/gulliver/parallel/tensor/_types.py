"""Hugging Face types that have neither rules of their own in `_table.py` nor a plan for themselves.

Most are written in one of a few ways, which `GENERAL` names: separate queries, keys and values and
an output, two linear layers or three with a gate, experts. Types whose attention is written in
another way (`OPAQUE`) have their linear layers cut one by one, outputs gathered. A type is listed
here because `tests/family_sweep.py` holds it against one process; `docs/parity.md` says how.
"""

from __future__ import annotations

from gulliver.parallel.tensor._table import Family

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

_LATENT = {
    "q_b_proj": "column by heads",
    "kv_b_proj": "column by heads",
    "kv_a_proj_with_mqa": "latent",
    "self_attn.q_proj": "column by heads",
    "self_attn.o_proj": "row by heads",
}

GENERAL = Family({**_AROUND, **_MLP, **_ATTENTION}, rest=True)
OPAQUE = Family({**_AROUND, **_MLP}, rest=True)
BARE = Family(_AROUND, rest=True)
LATENT = Family(_LATENT, rest=True, own=True)

_PRENORM = Family(
    {
        **_AROUND,
        **_ATTENTION,
        # A norm of the whole stands beside the first of the two.
        "intermediate.dense": "column, gathered",
        "output.dense": "row, split",
        "attention.output.dense": "row by heads",
    },
    rest=True,
)

_GENERAL = (
    "bamba bart bert-generation biogpt bitnet blenderbot blenderbot-small camembert ctrl "
    "data2vec-text diffllama electra ernie gpt_bigcode gpt_neox_japanese gpt_oss "
    "hunyuan_v1_dense lfm2 lfm3 marian mbart megatron-bert modernbert-decoder mvp openai-gpt "
    "pegasus persimmon plbart recurrent_gemma rembert roberta roformer stablelm xlm "
    "xlm-roberta xlm-roberta-xl"
)
_OTHER = (
    "m2m_100 mt5 umt5 switch_transformers distilbert layoutlm deit dinov2 "
    "dinov2_with_registers ijepa vit_msn"
)
_OPAQUE = "codegen gptj mpt"
_BARE = "rwkv"

TYPES: dict[str, Family] = {
    **dict.fromkeys(_GENERAL.split(), GENERAL),
    **dict.fromkeys(_OTHER.split(), GENERAL),
    **dict.fromkeys(_OPAQUE.split(), OPAQUE),
    **dict.fromkeys(_BARE.split(), BARE),
    "deepseek_v3": LATENT,
    "roberta-prelayernorm": _PRENORM,
}
"""Type to how it is cut."""

REFUSED: dict[str, str] = {
    "moshi": "its layers keep a weight for each codebook",
}
"""Type to why its cut would not be exact."""

LISTS_OF_PARTS = ("xlm", "flaubert")
"""Types whose layers are lists of attentions, of norms and so on: no piece of a sequence could be
handed from block to block."""
