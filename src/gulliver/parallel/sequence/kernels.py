"""Attention kernels: each computes a block's output, log-sum-exp and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gulliver import _compat_attention
from gulliver.errors import GulliverError, check_known
from gulliver.layout.even import Interval
from gulliver.parallel.sequence.heads import Run
from gulliver.parallel.sequence.mask import Kind, Rules, Tile

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float64, torch.float32, *HALVES)


# [Note: gradients of a block] A kernel sees one rectangle of queries and keys. Its backward is
# given the output and the log-sum-exp of the *whole* rows, over all keys of all ranks. These
# determine the final weights of its own pairs, ``P = exp(logits - lse)``, and ``D = sum(dO * O)``
# of each row, and the gradient of a logit is ``P * (dO @ v - D)``, independent of other keys. So
# the gradients of the blocks add up to the full gradients, in any order and on any rank (Dao et
# al., FlashAttention, 2022, arXiv 2205.14135, appendix B.2). With a block's own output and
# log-sum-exp they would not.
#
# | name | device | dtypes | masks |
# |---|---|---|---|
# | reference | any | all | all |
# | cpu flash | cpu | all | all |
# | cuda flash | cuda | 16 bits | plain, causal |
# | cuda efficient | cuda | 16 bits, float32 | all |
#
# `select` returns the named kernel, or the first of `ORDER` that supports the call; errors give the
# reason. The CUDA kernels follow the operators' signatures but have not been run yet.
@dataclass(frozen=True)
class KernelRequirements:
    """Properties of a call that a kernel has to support."""

    device: str  # Type of the tensors' device, "cpu" or "cuda"
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    kind: Kind = "plain"
    deterministic: bool = False  # Whether results must be bitwise reproducible
    arch: tuple[int, int] = (0, 0)  # Compute capability of a CUDA device, major and minor


@dataclass(frozen=True)
class AttentionBlock:
    """Input of a kernel: tensors of one dtype. The number of KV heads divides the number of heads.

    Attributes:
        q: queries ``[batch, heads, queries, head dim]``.
        k: keys ``[batch, KV heads, keys, head dim]``.
        v: values ``[batch, KV heads, keys, value dim]``.
        scale: factor of the logits.
        causal: whether query i sees only keys j <= i; requires as many keys as queries.
        bias: mask added to the logits, 0 or minus infinity, ``[rows, 1, queries, keys]`` in q's
            dtype.
        deterministic: require bitwise reproducible results.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool = False
    bias: Tensor | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class Kernel:
    """An implementation of attention over a block."""

    name: str
    # Function of a block that returns its output and log-sum-exp ``[batch, heads, queries]``, the
    # latter in `precise` of the dtype.
    forward: Callable[[AttentionBlock], tuple[Tensor, Tensor]]
    # Function of the output's gradient, the block, the rows' output and log-sum-exp that returns
    # dq, dk and dv.
    backward: Callable[[Tensor, AttentionBlock, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    # Function of the requirements that returns why the kernel cannot be used; None if it can.
    lacks: Callable[[KernelRequirements], str | None]


def precise(dtype: torch.dtype) -> torch.dtype:
    """Returns the accumulation dtype: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def readable(tensor: Tensor) -> Tensor:
    """Makes the last dim contiguous, which kernels require but do not check."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def select(asked: KernelRequirements, name: str | None = None) -> Kernel:
    if asked.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise GulliverError(f"attention in {asked.dtype} is not supported: choose from {known}")
    able = [kernel for kernel in ORDER if kernel.lacks(asked) is None]
    if name is None:
        return able[0]
    check_known("kernel", name, KERNELS)
    reason = KERNELS[name].lacks(asked)
    if reason is not None:
        known = ", ".join(repr(kernel.name) for kernel in able)
        raise GulliverError(f"kernel {name!r} cannot be used: {reason}; {known} can")
    return KERNELS[name]


def requirements_of(
    q: Tensor, v: Tensor, kind: Kind = "plain", deterministic: bool = False
) -> KernelRequirements:
    arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else (0, 0)
    return KernelRequirements(
        q.device.type, q.dtype, q.shape[-1], v.shape[-1], kind, deterministic, arch
    )


def _reference_forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    q, k, v = _grouped(block)
    logits = _logits(q, k, block)
    lse = logits.logsumexp(-1)
    # In a row without visible keys all logits are minus infinity, and so is their log-sum-exp.
    weights = torch.exp(logits - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1))
    return (weights @ v).flatten(1, 2), lse.flatten(1, 2)


def _reference_backward(
    grad: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _grouped(block)
    heads = q.shape[1:3]
    grad, out = (t.to(q.dtype).unflatten(1, heads) for t in (grad, out))
    weights = torch.exp(_logits(q, k, block) - lse.unflatten(1, heads).unsqueeze(-1))
    inner = (grad * out).sum(-1, keepdim=True)
    slope = weights * (grad @ v.mT - inner) * block.scale
    dq = (slope @ k).flatten(1, 2)
    return dq, (slope.mT @ q).sum(2), (weights.mT @ grad).sum(2)


def _grouped(block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor]:
    dtype = precise(block.q.dtype)
    q = block.q.to(dtype).unflatten(1, (block.k.shape[1], -1))
    return q, block.k.to(dtype).unsqueeze(2), block.v.to(dtype).unsqueeze(2)


def _logits(q: Tensor, k: Tensor, block: AttentionBlock) -> Tensor:
    logits = q @ k.mT * block.scale
    if block.causal:
        above = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        logits = logits.masked_fill(above, -math.inf)
    return logits if block.bias is None else logits + block.bias.unsqueeze(1)


def _cpu_forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    return _compat_attention.cpu_flash_forward(
        block.q, block.k, block.v, block.scale, block.causal, block.bias
    )


def _cpu_backward(
    grad: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _compat_attention.cpu_flash_backward(
        *(grad, block.q, block.k, block.v, out, lse, block.scale, block.causal, block.bias)
    )


def _flash_forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    return _compat_attention.cuda_flash_forward(
        block.q, block.k, block.v, block.scale, block.causal
    )


def _flash_backward(
    grad: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # The kernel reads torch's switch to decide how it accumulates the gradient of the queries.
    torch.use_deterministic_algorithms(block.deterministic or before, warn_only=True)
    try:
        return _compat_attention.cuda_flash_backward(
            *(grad.contiguous(), block.q, block.k, block.v),
            *(out.contiguous(), lse.contiguous(), block.scale, block.causal),
        )
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _efficient_forward(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    k, v = _repeated(block)
    return _compat_attention.cuda_efficient_forward(
        block.q, k, v, block.scale, block.causal, _aligned(block)
    )


def _efficient_backward(
    grad: Tensor, block: AttentionBlock, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = _repeated(block)
    dq, dk, dv = _compat_attention.cuda_efficient_backward(
        *(grad.contiguous(), block.q, k, v, out.contiguous(), lse.contiguous()),
        *(block.scale, block.causal, _aligned(block)),
    )
    heads = (block.k.shape[1], -1)
    return dq, dk.float().unflatten(1, heads).sum(2), dv.float().unflatten(1, heads).sum(2)


def _repeated(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    times = block.q.shape[1] // block.k.shape[1]
    if times == 1:
        return block.k, block.v
    return block.k.repeat_interleave(times, 1), block.v.repeat_interleave(times, 1)


def _aligned(block: AttentionBlock) -> Tensor | None:
    if block.bias is None:
        return None
    keys = block.bias.shape[-1]
    padded = torch.nn.functional.pad(block.bias, (0, -keys % 16))[..., :keys]
    return padded.expand(block.q.shape[0], block.q.shape[1], -1, -1)


def _cpu_lacks(asked: KernelRequirements) -> str | None:
    if asked.device != "cpu":
        return f"it supports the CPU, not {asked.device}"
    return _unequal(asked)


def _unequal(asked: KernelRequirements) -> str | None:
    if asked.head_dim != asked.value_dim:
        return f"values of {asked.value_dim} dimensions do not match keys of {asked.head_dim}"
    return None


def _cuda_lacks(
    asked: KernelRequirements, op: str, dtypes: tuple[torch.dtype, ...], largest: int, masks: bool
) -> str | None:
    if asked.device != "cuda":
        return f"it supports CUDA, not {asked.device}"
    if _compat_attention.attention_op(op) is None:
        return "this torch does not have it"
    if asked.dtype not in dtypes:
        return f"it does not support {str(asked.dtype).removeprefix('torch.')}"
    if asked.head_dim % 8 or asked.head_dim > largest:
        return f"a head dim of {asked.head_dim} is not a multiple of 8 up to {largest}"
    if asked.kind == "masked" and not masks:
        return "it supports causal masks only"
    return _unequal(asked)


def _flash_lacks(asked: KernelRequirements) -> str | None:
    if asked.device == "cuda" and asked.arch < (8, 0):
        return "it needs compute capability 8.0"
    return _cuda_lacks(asked, "_scaled_dot_product_flash_attention", HALVES, 256, False)


def _efficient_lacks(asked: KernelRequirements) -> str | None:
    if asked.deterministic:
        return "it is not deterministic"
    dtypes = (torch.float32, *HALVES)
    return _cuda_lacks(asked, "_scaled_dot_product_efficient_attention", dtypes, 1 << 16, True)


ORDER = (
    Kernel("cpu flash", _cpu_forward, _cpu_backward, _cpu_lacks),
    Kernel("cuda flash", _flash_forward, _flash_backward, _flash_lacks),
    Kernel("cuda efficient", _efficient_forward, _efficient_backward, _efficient_lacks),
    Kernel("reference", _reference_forward, _reference_backward, lambda asked: None),
)
"""All kernels, fastest first; the reference supports everything."""
KERNELS = {kernel.name: kernel for kernel in ORDER}


# Partial attention over some of the keys, and merging of two such results.


# [Note: log-sum-exp merge] Softmax attention over keys A and B is
#
#     out = (sum_A exp(s) v + sum_B exp(s) v) / (sum_A exp(s) + sum_B exp(s))
#
# With ``out_A`` normalised over A alone and ``lse_A = log sum_A exp(s)``, the first sum is
# ``exp(lse_A) out_A``. So the mean of the two outputs weighted with ``exp(lse)`` is exact, for any
# partition of the keys and any order, up to rounding. The weight of B, ``exp(lse_B) / (exp(lse_A) +
# exp(lse_B))``, is computed as the sigmoid of ``lse_B - lse_A``: no term grows with the logits, and
# a partition without visible keys (minus infinity) has no weight. Source: Milakov and Gimelshein,
# 2018 (arXiv 1805.02867).
@dataclass(frozen=True)
class BlockArguments:
    """Options that all blocks of a call share."""

    scale: float
    rules: Rules  # Rules for visible pairs
    runs: tuple[Run, ...]  # Query heads and their KV heads
    kernel: str | None = None  # Name of a kernel; None for the fastest suitable one
    deterministic: bool = False  # Whether results must be bitwise reproducible


@dataclass(frozen=True)
class Partial:
    """Attention over the keys processed so far."""

    out: Tensor  # Output ``[batch, heads, queries, value dim]``, in the precise dtype
    lse: Tensor  # Log-sum-exp of the logits, ``[batch, heads, queries]``

    @classmethod
    def empty(cls, q: Tensor, value_dim: int) -> Partial:
        dtype = precise(q.dtype)
        return cls(
            q.new_zeros((*q.shape[:3], value_dim), dtype=dtype),
            q.new_full(q.shape[:3], -math.inf, dtype=dtype),
        )

    def merge(self, out: Tensor, lse: Tensor, heads: slice, rows: Interval) -> None:
        """Merges attention over further keys into some heads and rows, in place."""
        own_out = self.out[:, heads, rows[0] : rows[1]]
        own_lse = self.lse[:, heads, rows[0] : rows[1]]
        # -inf - -inf is NaN: neither has a key, so the other gets no weight. Checked by the value
        # of lse, not by isnan, because a NaN from the inputs must appear in the output.
        weight = torch.sigmoid(lse - own_lse).masked_fill_(lse == -math.inf, 0.0)
        own_out.lerp_(out.to(own_out.dtype), weight.unsqueeze(-1))
        own_lse.copy_(torch.logaddexp(own_lse, lse))


def attend(
    into: Partial, q: Tensor, k: Tensor, v: Tensor, found: Iterable[Tile], how: BlockArguments
) -> None:
    """Computes attention of local queries to a block of keys and merges it into `into`."""
    for tile in found:
        kernel = select(requirements_of(q, v, tile.kind, how.deterministic), how.kernel)
        bias, unseen = _bias(tile, q, how.rules)
        for heads, kv_heads in how.runs:
            block = _block(tile, q, k, v, heads, kv_heads, bias, how)
            out, lse = kernel.forward(block)
            if unseen is not None:
                # Kernels return different values for rows without a key.
                lse = lse.masked_fill(unseen, -math.inf)
                out = out.masked_fill(unseen.unsqueeze(-1), 0.0)
            into.merge(out, lse, heads, tile.q)


@dataclass(frozen=True)
class Rows:
    """Queries with the output, its gradient and the log-sum-exp, for backward."""

    q: Tensor  # Queries ``[batch, heads, queries, head dim]``
    grad: Tensor
    out: Tensor
    # Log-sum-exp over all keys; 0 for rows without a key, because ``exp(-inf - -inf)`` would be
    # NaN, but ``exp(-inf - 0)`` is 0.
    lse: Tensor


@dataclass(frozen=True)
class Gradients:
    """Accumulated gradients of q, k and v, in the dtype of `precise`."""

    q: Tensor
    k: Tensor
    v: Tensor


def attend_backward(
    into: Gradients, rows: Rows, k: Tensor, v: Tensor, found: Iterable[Tile], how: BlockArguments
) -> None:
    for tile in found:
        kernel = select(requirements_of(rows.q, v, tile.kind, how.deterministic), how.kernel)
        bias, _ = _bias(tile, rows.q, how.rules)
        (first, last), (k_first, k_last) = tile.q, tile.k
        for heads, kv_heads in how.runs:
            block = _block(tile, rows.q, k, v, heads, kv_heads, bias, how)
            dq, dk, dv = kernel.backward(
                rows.grad[:, heads, first:last],
                block,
                rows.out[:, heads, first:last],
                rows.lse[:, heads, first:last],
            )
            into.q[:, heads, first:last] += dq
            into.k[:, kv_heads, k_first:k_last] += dk
            into.v[:, kv_heads, k_first:k_last] += dv


def _block(
    tile: Tile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: slice,
    kv_heads: slice,
    bias: Tensor | None,
    how: BlockArguments,
) -> AttentionBlock:
    (first, last), (k_first, k_last) = tile.q, tile.k
    return AttentionBlock(
        q[:, heads, first:last],
        k[:, kv_heads, k_first:k_last],
        v[:, kv_heads, k_first:k_last],
        how.scale,
        tile.kind == "causal",
        bias,
        how.deterministic,
    )


def _bias(tile: Tile, q: Tensor, rules: Rules) -> tuple[Tensor | None, Tensor | None]:
    if tile.kind != "masked":
        return None, None
    allowed = tile.allowed(rules).to(q.device)
    bias = torch.zeros(allowed.shape, dtype=q.dtype, device=q.device)
    bias.masked_fill_(~allowed, -math.inf)
    return bias.unsqueeze(1), ~allowed.any(-1).unsqueeze(1)
