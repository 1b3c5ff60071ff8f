"""What a draft reads of its target: keys and values of texts, and how positions are in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.serve._attention import attached
from gulliver.serve._forward import forward

HALVES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granite"),
    *("olmo", "olmo2", "olmoe", "starcoder2", "gemma"),
)
"""Targets whose rotary positions turn halves of a head."""
UNROTATED = ("gpt2", "gpt_bigcode", "opt", "bloom")
"""Targets whose keys are not turned."""


def target_frequencies(model: Any) -> list[float]:
    """Frequencies of a model's rotary positions; empty where it has none."""
    kind = model.config.model_type
    if kind in UNROTATED:
        return []
    found = [m.inv_freq for m in model.modules() if isinstance(getattr(m, "inv_freq", 0), Tensor)]
    if kind not in HALVES or not found:
        raise GulliverError(
            f"drafts that look at keys of a {kind} model are not made: of {', '.join(HALVES)}, "
            f"{', '.join(UNROTATED)}; any model takes a small model or a look-up"
        )
    return found[0].tolist()


class _KeptKeys:
    """Attention of equally long texts packed one after another, which keeps some layers' keys."""

    def __init__(self, texts: int, layers: Sequence[int]) -> None:
        self._texts, self._layers = texts, set(layers)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.heads = 0

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """See `Pages.attend`."""
        parts = [
            tensor.unflatten(1, (self._texts, -1)).transpose(0, 1) for tensor in (query, key, value)
        ]
        self.heads, length = query.shape[0], parts[0].shape[2]
        if layer in self._layers:
            self.keys[layer], self.values[layer] = parts[1].clone(), parts[2].clone()
        bias = None
        if slopes is not None or (window is not None and window < length):
            places = torch.arange(length, device=query.device)
            apart = places[:, None] - places[None]
            seen = (apart >= 0) & (apart < (window or length))
            bias = torch.zeros(length, length, device=query.device, dtype=query.dtype)
            if slopes is not None:
                bias = -slopes[:, None, None].to(query.dtype) * apart
            bias = bias.masked_fill(~seen, -torch.inf)
        out = F.scaled_dot_product_attention(
            *parts,
            attn_mask=bias,
            is_causal=bias is None,
            scale=scale,
            enable_gqa=query.shape[0] != key.shape[0],
        )
        return out.permute(0, 2, 1, 3).flatten(0, 1)


def glimpses_of(
    model: Any, tokens: Tensor, layers: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], int]:
    """Keys and values that a model has of texts, as serving caches them."""
    kept, _ = _read(model, tokens, layers, False)
    return [kept.keys[n] for n in layers], [kept.values[n] for n in layers], kept.heads


def lesson_of(
    model: Any, tokens: Tensor, layers: Sequence[int]
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What a draft learns from: a model's keys and values of texts, and its logits."""
    kept, logits = _read(model, tokens, layers, True)
    keys, values = ([of[n] for n in layers] for of in (kept.keys, kept.values))
    return keys, values, logits.unflatten(0, tokens.shape)


@torch.no_grad()
def _read(
    model: Any, tokens: Tensor, layers: Sequence[int], rows: bool
) -> tuple[_KeptKeys, Tensor]:
    """Runs a model on texts; of logits one row is computed where none are wanted."""
    count, length = tokens.shape
    kept = _KeptKeys(count, layers)
    positions = torch.arange(length, device=tokens.device).repeat(count)
    wanted = torch.arange(count * length if rows else 1, device=tokens.device)
    with attached(model, kept):
        logits = forward(model, tokens.flatten(), positions, wanted)
    return kept, logits
