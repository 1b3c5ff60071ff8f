"""Self-attention with normalised queries and keys, and cross-attention to packed captions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.models._embeddings import rotate, working_precision

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values to what they give."""


class RMSNorm(nn.Module):
    """Root-mean-square norm whose statistics are taken in float32 (float64 for float64)."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(working_precision(x.dtype))
        return self.weight * F.rms_norm(precise, x.shape[-1:], eps=self.eps).to(x.dtype)


class SelfAttention(nn.Module):
    """Multi-head attention among the tokens of each row of [R, N, C]."""

    def __init__(self, hidden_size: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        head_size = hidden_size // num_heads
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.q_norm = RMSNorm(head_size) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_size) if qk_norm else nn.Identity()
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None = None,
        mix: Mix = F.scaled_dot_product_attention,
    ) -> Tensor:
        """Attends; queries and keys are turned by `rotation` after their norm.

        Args:
            x: [R, N, C].
            rotation: cosine and sine.
            mix: softmax attention of q, k and v [R, heads, N, head size].
        """
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return self.proj(mix(q, k, v).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head attention from a clip's tokens [B, N, C] to its caption's [B, L, C]."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_linear = nn.Linear(hidden_size, hidden_size)
        self.kv_linear = nn.Linear(hidden_size, 2 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        """Attends to the caption tokens that `mask` [B, 1, 1, L] allows; None allows all."""
        q = self.q_linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        pairs = self.kv_linear(y).unflatten(-1, (2, self.num_heads, -1))
        k, v = pairs.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))
