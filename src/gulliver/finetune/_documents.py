"""Models whose packed batches are exact: the sequences of a row do not see each other."""

from __future__ import annotations

from typing import Any

from torch import nn

from gulliver.families import asks_routers, has_known_forward, hugging_face_of, type_of

_TESTED = (
    "apertus arcee aria_text axk1 beam bitnet codegen cohere cohere2 cohere2_moe ctrl cwm "
    "deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo "
    "flint gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neo "
    "gpt_neox gpt_neox_japanese gptj granite granite_swa granitemoe granitemoe_swa "
    "granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 "
    "jetmoe kolibri1 laguna llama mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 "
    "mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi "
    "phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 "
    "vaultgemma youtu "
)
EXACT = frozenset(_TESTED.split())
"""Types of transformers whose packed batches are exact."""
ATTENTIONS = ("eager", "sdpa")
"""Implementations of attention that the masks are exact for."""
LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers that they are: others keep a state, or choose what they look at."""


# [Note: how a model knows] Masks are a matter of attention: windows, chunks and linear attention
# need other ones than full attention does. Models of transformers make all of theirs from
# ``position_ids`` where these restart, in their newer way of writing; so packed batches have
# positions and no mask, and no mask of ours has to be right for each layer of each family. Which
# types do so exactly is known from a test that holds packed logits, loss and all gradients to those
# of each sequence alone, in float64 (`tests/test_finetune_packing.py`); other types are refused.
def packing_support(model: nn.Module, length: int | None = None) -> str | None:
    """Says why packed batches would not be exact for a model; None where they are.

    Args:
        model: any model; one that PEFT has adapted is looked into.
        length: longest sequence in tokens; None where it is not known.
    """
    model = hugging_face_of(model)
    kind = type_of(model)
    if kind not in EXACT or not has_known_forward(model):
        return f"{kind} is not known to keep the sequences of a row apart"
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ATTENTIONS:
        return f"attention {attention!r} is not known to: load the model with 'sdpa' or 'eager'"
    others = {str(kind) for kind in getattr(config, "layer_types", None) or ()} - LAYERS
    if others:
        return f"its layers of the kind {sorted(others)[0]!r} do not"
    if getattr(config, "use_cache", False):
        return "a model that keeps a cache does not: set model.config.use_cache to False"
    if _frequencies_vary(config, length):
        return "its rotary frequencies depend on the longest sequence of a row"
    if asks_routers(model, {}):
        return "the loss of its routers would count padding: set output_router_logits to False"
    return None


def _frequencies_vary(config: Any, length: int | None) -> bool:
    """Whether a sequence of that length makes a model turn others of its batch differently."""
    rope = getattr(config, "rope_parameters", None) or {}
    # One for all layers, or one for each kind of them.
    for one in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        kind = str(one.get("rope_type"))
        if "dynamic" in kind or kind == "longrope":
            known = one.get("original_max_position_embeddings") or config.max_position_embeddings
            if length is None or length > known:
                return True
    return False
