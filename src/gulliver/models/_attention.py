"""Self-attention with normalised queries and keys, and cross-attention to packed captions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.models._embeddings import Rotation, rotate, working_precision

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""An attention function: queries, keys and values [R, heads, N, head size] to outputs alike."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, with a learnt scale and no shift."""

    # Statistics are taken in float32 (float64 for float64 inputs): the sum of squares of a bfloat16
    # row would lose most of its digits. Source: Zhang and Sennrich, 2019 (arXiv 1910.07467).

    def __init__(self, size: int, eps: float = 1e-6, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(size)))
        self.eps, self._name = eps, name

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(working_precision(x.dtype))
        normed = F.rms_norm(precise, x.shape[-1:], eps=self.eps).to(x.dtype)
        return getattr(self, self._name) * normed


class SelfAttention(nn.Module):
    """Multi-head attention among the tokens of each row of [R, N, C]."""

    def __init__(
        self, hidden_size: int, num_heads: int, qk_norm: bool, rotate_first: bool = False
    ) -> None:
        super().__init__()
        head_size = hidden_size // num_heads
        self.num_heads, self.rotate_first = num_heads, rotate_first
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.q_norm = RMSNorm(head_size) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_size) if qk_norm else nn.Identity()
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        mix: Mix = F.scaled_dot_product_attention,
    ) -> Tensor:
        """Attends among the tokens of each row."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        if rotation is not None and self.rotate_first:
            q, k = rotate(q, rotation), rotate(k, rotation)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None and not self.rotate_first:
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
