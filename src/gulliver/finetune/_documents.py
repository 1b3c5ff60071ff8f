"""For which models packed batches are exact: sequences of a row that do not see each other.

[Note: how a model is told]
Masks are a matter of attention: windows, chunks and linear attention need other ones than full
attention does. Models of transformers make all of theirs from ``position_ids`` where these begin
anew, in their newer way of writing; so packed batches have positions and no mask, and no mask of
ours has to be right for each layer of each family. Which types do so exactly is known from a test
that holds packed logits, loss and all gradients to those of each sequence alone, in float64
(`tests/test_finetune_packing.py`); other types are refused.
"""

from __future__ import annotations

from torch import nn

from gulliver.families import asks_routers, has_known_forward, hugging_face_of, type_of

EXACT: frozenset[str] = frozenset()
"""Types of transformers whose packed batches are exact."""
ATTENTIONS = ("eager", "sdpa")
"""Implementations of attention that the masks are exact for."""


def packing_support(model: nn.Module) -> str | None:
    """Says why packed batches would not be exact for a model; None where they are.

    Args:
        model: any model; one that PEFT has adapted is looked into.
    """
    model = hugging_face_of(model)
    kind = type_of(model)
    if kind not in EXACT or not has_known_forward(model):
        return f"{kind} is not known to keep sequences of a row apart by their positions"
    config = getattr(model, "config", None)
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ATTENTIONS:
        return f"attention {attention!r} is not known to: load the model with 'sdpa' or 'eager'"
    if getattr(config, "use_cache", False):
        return "a model that keeps a cache does not: set model.config.use_cache to False"
    if asks_routers(model, {}):
        return "the loss of its routers would count padding: set output_router_logits to False"
    return None
