"""Group norms whose statistics are of all parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import once_differentiable
from gulliver.parallel.convolution._shapes import given_of
from gulliver.parallel.convolution._sharded import (
    Key,
    Sharded,
    Statistics,
    handles,
    like,
    refuse,
)


# [Note: merging statistics] Mean and sum of squares would cancel: with a mean much larger than the
# deviation no digit of the variance is left. Every part counts its own mean and its sum of squared
# distances from it, and these are merged exactly (Chan, Golub, LeVeque, 1983): with the counts
# `n_r`, ``mean = sum n_r mean_r / n`` and ``M = sum M_r + n_r (mean_r - mean)^2``.
#
# The backward needs two sums over the group, of the gradient and of its product with the normalised
# input; the ranks add theirs up. Gradients of weight and bias are this part's share, as everywhere.
@handles("group_norm", "instance_norm")
def _group_norm(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    if func.__name__ == "instance_norm":
        refuse("instance norm", x)
    names = ("num_groups", None), ("weight", None), ("bias", None), ("eps", 1e-5)
    groups, weight, bias, eps = given_of(given, kwargs, *names)
    if x.cut.dim == 0:
        return like(x, func(x.local, groups, weight, bias, eps))
    if x.cut.dim == 1:
        refuse("a group norm over the cut dim", x)
    name = ("group_norm", 0 if weight is None else id(weight))
    local = _GroupNorm.apply(x.local, weight, bias, groups, eps, x, name)
    return like(x, local)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        x: Sharded,
        key: Key,
    ) -> Tensor:
        wide = torch.float64 if local.dtype == torch.float64 else torch.float32
        own = statistics_of(local, groups, wide)
        count, mean, squares = x.holder.statistics(x, own, key)
        deviation = (squares / count + eps).rsqrt()
        ctx.save_for_backward(local, weight, mean, deviation)
        ctx.how = count, groups, x.holder
        # One scale and one shift for each channel, as for a plain norm: a single pass.
        scale = _by_channel(deviation, local, groups)
        shift = -_by_channel(mean * deviation, local, groups)
        if weight is not None:
            of_channel = weight.to(wide).view(1, -1, *[1] * (local.dim() - 2))
            scale, shift = scale * of_channel, shift * of_channel
        if bias is not None:
            shift = shift + bias.to(wide).view(1, -1, *[1] * (local.dim() - 2))
        if local.dtype == wide:
            return torch.addcmul(shift, local, scale)
        return torch.addcmul(shift, local.to(wide), scale).to(local.dtype)

    @staticmethod
    @once_differentiable("a group norm that is shared by ranks")
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        local, weight, mean, deviation = ctx.saved_tensors
        count, groups, holder = ctx.how
        wide = mean.dtype
        normal = (local.to(wide) - _by_channel(mean, local, groups)) * _by_channel(
            deviation, local, groups
        )
        grad = grad.to(wide)
        rest = [0, *range(2, grad.dim())]
        of_weight = (grad * normal).sum(rest) if weight is not None else None
        of_bias = grad.sum(rest) if weight is not None else None
        inner = grad if weight is None else grad * weight.to(wide).view(1, -1, *[1] * len(rest[1:]))
        grouped = [_in_groups(t, groups).sum(-1) for t in (inner, inner * normal)]
        total, product = holder.summed(torch.stack(grouped)) / count
        spread = (_by_channel(t, local, groups) for t in (total, product))
        of_local = inner - next(spread) - normal * next(spread)
        of_local = of_local * _by_channel(deviation, local, groups)
        cast = None if weight is None else weight.dtype
        return (
            of_local.to(local.dtype),
            None if of_weight is None else of_weight.to(cast),
            None if of_bias is None else of_bias.to(cast),
            None, None, None, None,
        )  # fmt: skip


def statistics_of(local: Tensor, groups: int, dtype: torch.dtype) -> Statistics:
    """Returns number, mean and squared distances of a part's elements ``[batch, groups]``."""
    values = _in_groups(local, groups).to(dtype)
    count = values.shape[-1]
    if not count:
        zero = values.new_zeros(values.shape[:-1])
        return 0.0, zero, zero
    variance, mean = torch.var_mean(values, -1, correction=0)
    return float(count), mean, variance * count


def merged(parts: Sequence[Statistics]) -> Statistics:
    """Returns the statistics of several parts together."""
    total = sum(count for count, _, _ in parts)
    mean = torch.stack([mean * (count / total) for count, mean, _ in parts]).sum(0)
    squares = [squares + count * (m - mean).square() for count, m, squares in parts]
    return total, mean, torch.stack(squares).sum(0)


def _in_groups(x: Tensor, groups: int) -> Tensor:
    width = x.shape[1] // groups * x[0, 0].numel()
    return x.reshape(x.shape[0], groups, width)


def _by_channel(values: Tensor, x: Tensor, groups: int) -> Tensor:
    """Spreads values of groups over their channels."""
    wide = values.repeat_interleave(x.shape[1] // groups, dim=1)
    return wide.view(*wide.shape, *[1] * (x.dim() - 2))
