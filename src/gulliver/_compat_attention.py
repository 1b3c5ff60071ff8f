"""Torch's private attention kernels and its ring attention; see `_compat.py`.

Unlike torch's public attention, these kernels return the log-sum-exp of each row's logits, and
their backwards accept an output and log-sum-exp computed over more keys than they receive. All take
q, k and v as [B, H, S, D] and return log-sum-exps as [B, H, S].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attention_op(name: str) -> Callable[..., Any] | None:
    packet = getattr(torch.ops.aten, name, None)
    return None if packet is None else packet.default


def cpu_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes output and log-sum-exp; a fully masked row gives zeros and a finite log-sum-exp."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )


def cpu_flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )


def cuda_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention.default(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return found[0], found[1]


def cuda_flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # Without dropout, the random number state is not read.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    offset = torch.zeros((), dtype=torch.uint64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        *(grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2]),
        *(0.0, causal, seed, offset),
        scale=scale,
    )


def cuda_efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes output and log-sum-exp with CUDA's memory-efficient attention (no grouped heads)."""
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    # Its rows are padded to a multiple of the kernel's block.
    return out, lse[..., : q.shape[2]]


def cuda_efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = -(-lse.shape[2] // 32) * 32
    padded = torch.nn.functional.pad(lse, (0, rows - lse.shape[2]), value=float("inf"))
    # Without dropout, the random number state is not read.
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    found = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default(
        *(grad, q, k, v, bias, out, padded, state, state, 0.0),
        *([True, True, True, False], causal),
        scale=scale,
    )
    return found[0], found[1], found[2]


def context_parallel_ring(rotate: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Torch's ring attention, forward and backward; `rotate` is "allgather" or "alltoall"."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    # Torch's zigzag layout would require a causal mask.
    _attention._cp_options.enable_load_balance = False
    _attention.set_rotate_method(rotate)
    return (
        _attention._templated_ring_attention,
        _attention._templated_ring_attention_backward,
    )
