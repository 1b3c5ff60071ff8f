"""A tiny model of every Hugging Face type, with a batch: what `tests/models/family_sweep.py` runs.

A configuration is made from the type's own defaults: every size that it has is set to the one in
`SMALL`, and all dropouts to 0. Where a type needs something else, it is a line of `SPECIAL`.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
"""Task to transformers' table of its types and classes."""

LARGEST = 300_000
LAYERS, LENGTH, BATCH, VOCABULARY, CLASSES = 4, 12, 4, 67, 5
IMAGE = 16

SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("embed_dim", "decoder_hidden_size", "word_embed_proj_dim", "n_embed"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("num_encoder_layers",), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("swa_num_attention_heads", "mamba_n_heads", "num_attention_groups"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "d_kv", "swa_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("attention_head_size",), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 12),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"), 52),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dim_ff", "dff", "d_inner"), 52),
    **dict.fromkeys(("shared_intermediate_size", "hidden_dim", "intermediate_size_mlp"), 52),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 22),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 22),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("sliding_window", "attention_window", "local_attention"), 6),
    **dict.fromkeys(("max_window_layers",), 2),
    **dict.fromkeys(("image_size",), IMAGE),
    **dict.fromkeys(("patch_size",), 4),
    **dict.fromkeys(("num_labels",), CLASSES),
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "num_nextn_predict_layers": 0,
    "attn_implementation": "eager",
    # The grouped products know no float64.
    "experts_implementation": "eager",
}

LEAVE = object()
"""In `SPECIAL`: the type's own default."""

_HALF = ["full_attention", "sliding_attention"] * (LAYERS // 2)
_LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
SPECIAL: dict[str, dict[str, Any]] = {
    "bert-generation": {"is_decoder": True},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 6},
    "falcon": {"head_dim": LEAVE},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "gemma3n_text": {"layer_types": _HALF, "num_kv_shared_layers": 0},
    "gemma4_text": {"layer_types": _HALF, "head_dim": LEAVE, "num_kv_shared_layers": 0},
    "qwen3_next": {
        "layer_types": _LINEAR,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_d_state": 8},
    "t5": {"is_encoder_decoder": True},
    "imagegpt": {"num_labels": CLASSES},
}
"""What a type needs beside `SMALL`."""


def types(task: str) -> dict[str, str]:
    """Type to class of a task; of several types of one class the one that it is named for."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for kind, name in getattr(modeling_auto, TASKS[task]).items():
        first = name if isinstance(name, str) else name[0]
        same = next((other for other, held in found.items() if held == first), None)
        if same is None:
            found[kind] = first
        elif first.lower().startswith(kind.replace("_", "")):
            # The class is this type's own, and another type only uses it.
            del found[same]
            found[kind] = first
    return found


def config_of(task: str, kind: str, **more: Any) -> Any:
    """A tiny configuration."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    defaults = made()
    known = {**defaults.to_dict(), "attn_implementation": 0, "experts_implementation": 0}
    known |= {n: getattr(defaults, n) for n in SMALL if hasattr(defaults, n)}
    fields = {name: value for name, value in SMALL.items() if name in known}
    for name, value in known.items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            fields[name] = 0.0
        if name in ("layer_types", "mlp_layer_types") and value is not None:
            fields[name] = None
    if "kv_lora_rank" in known:
        # Latent attention gives each head keys of its own.
        fields["num_key_value_heads"] = 4
    if task == "causal" and "is_decoder" in known:
        fields["is_decoder"] = True
    if task == "vision":
        fields["num_labels"] = CLASSES
    fields |= {**SPECIAL.get(kind, {}), **more}
    config = made(**{name: value for name, value in fields.items() if value is not LEAVE})
    if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def build(task: str, kind: str, **more: Any) -> Any:
    """A model in training mode, in float64, with the same weights in every process."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(7)
    made, config = getattr(transformers, types(task)[kind]), config_of(task, kind, **more)
    with torch.device("meta"):
        count = sum(p.numel() for p in made(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise ValueError(f"not tiny: {count} parameters")
    model = made(config)
    with torch.no_grad():
        # What begins as zeros or ones would hide that it is added twice, or not at all.
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.double().train()


def batch(task: str, model: Any) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward, with labels."""
    generator = torch.Generator().manual_seed(3)
    if task == "vision":
        side = model.config.image_size if isinstance(model.config.image_size, int) else IMAGE
        pictures = torch.randn(BATCH, 3, side, side, generator=generator, dtype=torch.float64)
        return {
            "pixel_values": pictures,
            "labels": torch.randint(CLASSES, (BATCH,), generator=generator),
        }
    ids = torch.randint(5, 60, (BATCH, LENGTH), generator=generator)
    if task == "causal":
        return {"input_ids": ids, "labels": ids.clone()}
    labels = torch.randint(5, 60, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": labels}
