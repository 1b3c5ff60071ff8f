"""Models that are served: those whose logits are tested against transformers' own."""

from __future__ import annotations

from typing import Any

from gulliver.errors import GulliverError, nearest

SERVED = (
    *("bloom", "cohere", "gemma", "glm", "gpt2", "gpt_bigcode", "gpt_neox", "granite", "helium"),
    *("llama", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "opt", "phi", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
)
"""Values of `config.model_type`; `tests/test_serving_exact.py` runs each."""

GROWING = ("dynamic", "longrope")
"""Rotary positions that depend on the longest sequence of a batch: packed, sequences would change
each other's."""


def check_served(model: Any) -> None:
    """Refuses a model whose answers are not known to be right."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None or not hasattr(model, "get_output_embeddings"):
        raise GulliverError(
            f"{type(model).__name__} is not a causal language model of transformers: give one that "
            "AutoModelForCausalLM loads"
        )
    check_type(kind)
    if model.get_output_embeddings() is None:
        raise GulliverError(
            f"{type(model).__name__} gives no logits of the next token: load it with "
            "AutoModelForCausalLM"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    growing = {str(rope.get("rope_type"))} | {
        str(one.get("rope_type")) for one in rope.values() if isinstance(one, dict)
    }
    if growing & set(GROWING):
        raise GulliverError(
            f"rotary positions of type {min(growing & set(GROWING))} depend on the longest "
            "sequence of a batch, so that requests would change each other's answers: not served"
        )


def check_type(kind: str) -> None:
    """Refuses a type of model that is not served."""
    if kind not in SERVED:
        raise GulliverError(f"models of type {kind!r} are not served: {nearest(kind, SERVED)}")
