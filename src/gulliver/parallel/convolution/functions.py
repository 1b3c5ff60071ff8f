"""Torch functions on a shard: element-wise, along unsharded dims, and over sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from gulliver.errors import once_differentiable
from gulliver.layout.even import Interval
from gulliver.parallel.convolution.chunked import SlidingWindow, padding_of
from gulliver.parallel.convolution.shapes import given_of
from gulliver.parallel.convolution.sharded import (
    Key,
    Rows,
    Sharded,
    Statistics,
    first,
    handles,
    in_place,
    is_plain,
    like,
    locals_of,
    own_of,
    own_run,
    parts_in,
    reject,
    window_rows,
)

PIECES = 8
"""Number of chunks in which a convolution's output is computed without autograd."""

POINTWISE = (
    "add sub mul div truediv true_divide neg abs pow sqrt rsqrt square exp log sin cos tanh "
    "sigmoid relu relu6 silu gelu elu selu celu mish softplus leaky_relu hardswish hardtanh "
    "hardsigmoid logsigmoid softsign clamp clip clamp_min clamp_max maximum minimum where lerp "
    "addcmul addcdiv to type float double half bfloat16 type_as contiguous clone detach "
    "zeros_like ones_like full_like empty_like radd rsub rmul rdiv rtruediv iadd isub imul "
    "itruediv idiv nan_to_num copysign sign reciprocal expm1 log1p erf floor round isfinite isnan "
    "isinf lt gt le ge eq ne logical_not logical_and logical_or identity fill zero masked_fill "
    "cpu cuda rpow"
)
ALONG = "softmax log_softmax normalize cumsum glu logsumexp"
REDUCING = "mean sum amax amin var std norm vector_norm prod"
POOLS = "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d"


@handles(*POINTWISE.split())
def _pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    given = parts_in((args, kwargs))
    x = max(given, key=lambda part: part.cut.extent)
    for part in given:
        if part.cut.dim - part.dim() != x.cut.dim - x.dim():
            reject("an operation on activations that are sharded along different dims", x)
    alike = x.holder.align(given, ("align", 0)) if len(given) > 1 else given
    x = max(alike, key=lambda part: part.cut.extent)
    found = dict(zip(map(id, given), alike, strict=True))

    def change(t: Tensor) -> Tensor:
        return found[id(t)].local if isinstance(t, Sharded) else _own_share(t, x)

    made = func(*locals_of(args, change), **locals_of(kwargs, change))
    cut = replace(x.cut, dim=x.cut.dim - x.dim() + made.dim())
    if in_place(func, kwargs):
        args[0].local, args[0].cut = made, cut
        return args[0]
    return like(x, made, cut)


def _own_share(t: Tensor, x: Sharded) -> Tensor:
    dim = x.cut.dim - x.dim()
    if t.dim() < -dim or t.shape[dim] == 1:
        return t
    cut = replace(x.cut, dim=dim % t.dim())
    if t.shape[dim] != cut.length:
        reject(f"an operation with a tensor {tuple(t.shape)}", x)
    return own_of(t, cut, x.holder)


@handles("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout")
def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    x, *given = args
    p, training = given_of(given, kwargs, ("p", 0.5), ("training", True))
    if p and training:
        reject("dropout", x, "ranks would draw different masks; call eval(), or set it to 0")
    return x


@handles(*ALONG.split(), *REDUCING.split())
def _along(func: Any, args: Any, kwargs: Any) -> Any:
    x, *given = args
    name = func.__name__
    kwargs = dict(kwargs)
    place = 1 if name in ("normalize", "norm", "vector_norm") else 0
    dims = given[place] if len(given) > place else kwargs.get("dim")
    if dims is None:
        reject(f"torch's {name} over all dims", x)
    dims = [d % x.dim() for d in (dims if isinstance(dims, list | tuple) else [dims])]
    if x.cut.dim in dims:
        reject(f"torch's {name} along the sharded dim", x)
    made = func(x.local, *given, **kwargs)
    fewer = sum(d < x.cut.dim for d in dims) if made.dim() < x.dim() else 0
    return like(x, made, replace(x.cut, dim=x.cut.dim - fewer))


@handles("layer_norm", "rms_norm")
def _layer_norm(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    (shape,) = given_of(given[:1], kwargs, ("normalized_shape", None))
    if x.cut.dim >= x.dim() - len(shape):
        reject(f"torch's {func.__name__} over the sharded dim", x)
    return like(x, func(x.local, *given, **kwargs))


@handles("batch_norm")
def _batch_norm(func: Any, args: Any, kwargs: Any) -> Sharded:
    x = first(args, kwargs)
    (training,) = given_of(args[5:6], kwargs, ("training", False))
    if training or x.cut.dim == 1:
        reject("batch norm that counts statistics", x, "call eval(), or use group norms")
    return like(x, func(*locals_of(args, _local), **locals_of(kwargs, _local)))


@handles("linear")
def _linear(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    weight, bias = given_of(given, kwargs, ("weight", None), ("bias", None))
    if x.cut.dim == x.dim() - 1:
        reject("a linear layer over the sharded dim", x)
    return like(x, func(x.local, weight, bias))


@handles("matmul", "bmm")
def _matmul(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, other = args
    if not isinstance(x, Sharded) or isinstance(other, Sharded) or x.cut.dim == x.dim() - 1:
        reject(f"torch's {func.__name__}", first(args))
    return like(x, func(x.local, other))


@handles("conv1d", "conv2d", "conv3d", "chunked_convolution")
def _convolution(func: Any, args: Any, kwargs: Any) -> Sharded:
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    defaults = (None, None, None, 1, 0, 1, 1)
    found = given_of(args, kwargs, *zip(names, defaults, strict=True))
    x, weight, bias, stride, padding, dilation, groups = found
    space = weight.dim() - 2
    stride, dilation = _spread(stride, space), _spread(dilation, space)
    kernel = tuple(weight.shape[2:])
    padding = padding if isinstance(padding, str) else _spread(padding, space)
    pads = padding_of(padding, kernel, dilation)
    rest = {"call": kwargs["call"]} if "call" in kwargs else {}
    if x.dim() != space + 2:
        reject("a convolution without a dim of samples", x)

    def convolve(local: Tensor, weight: Tensor, bias: Tensor | None, pads: Any) -> Tensor:
        if any(a != b for a, b in pads):
            local, pads = F.pad(local, [p for pair in reversed(pads) for p in pair]), ()
        padding = [a for a, _ in pads] or [0] * space
        return func(local, weight, bias, stride, padding, dilation, groups, **rest)

    if x.cut.dim == 0:
        return _of_samples(x, lambda local: convolve(local, weight, bias, pads))
    if x.cut.dim == 1:
        reject("a convolution over the sharded dim", x)
    at = x.cut.dim - 2
    if kernel[at] == stride[at] == 1 and pads[at] == (0, 0):
        return _of_samples(x, lambda local: convolve(local, weight, bias, pads))
    window = SlidingWindow(-pads[at][0], stride[at], dilation[at] * (kernel[at] - 1) + 1)
    others = tuple((0, 0) if n == at else pad for n, pad in enumerate(pads))
    keep = torch.is_grad_enabled() and (x.local.requires_grad or weight.requires_grad)
    return _windowed(
        x, window, pads[at][1], "convolution", lambda t: convolve(t, weight, bias, others),
        weight=weight, keep=keep,
    )  # fmt: skip


def _of_samples(x: Sharded, call: Callable[[Tensor], Tensor]) -> Sharded:
    if x.local.shape[x.cut.dim]:
        return like(x, call(x.local))
    shape = list(x.local.shape)
    shape[x.cut.dim] = 1
    made = call(torch.cat([x.local, x.local.new_zeros(shape)], x.cut.dim))
    return like(x, made.narrow(x.cut.dim, 0, 0))


def _windowed(
    x: Sharded,
    window: SlidingWindow,
    after: int,
    name: str,
    call: Callable[[Tensor], Tensor],
    weight: Tensor | None = None,
    keep: bool = True,
) -> Sharded:
    rows, sizes = window_rows(x, window, after, name, weight)
    start, stop = rows.outputs
    if start == stop:
        local = call(rows.all(window.span)).narrow(x.cut.dim, 0, 0)
    elif keep or (len(rows.parts) == 1 and rows.start == rows.wanted[0]):
        local = call(rows.take(*rows.wanted))
    else:
        local = _in_pieces(rows, window, call)
    return like(x, local, x.cut.resized(sizes))


def _in_pieces(rows: Rows, window: SlidingWindow, call: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes the output in chunks; only chunks at the border copy their halo."""
    start, stop = rows.outputs
    step, out = -(-(stop - start) // PIECES), None
    for low in range(start, stop, step):
        high = min(low + step, stop)
        made = call(rows.take(*window.needs(low, high)))
        if out is None:
            shape = list(made.shape)
            shape[rows.dim] = stop - start
            out = made.new_empty(shape)
        out.narrow(rows.dim, low - start, high - low).copy_(made)
    assert out is not None
    return out


@handles(*POOLS.split())
def _pool(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    names = ("kernel_size", None), ("stride", None), ("padding", 0)
    size, stride, padding = given_of(given[:3], kwargs, *names)
    space = int(func.__name__[-2])
    size, pads = _spread(size, space), _spread(padding, space)
    stride = _spread(stride or size, space)
    rest = [*given[3:], *(kwargs[name] for name in kwargs if name not in dict(names))]
    if any(pads) or any(value not in (None, True, False, 1) for value in rest) or kwargs.get(
        "ceil_mode", func.__name__.startswith("avg") and given[3:4] == [True]
    ):  # fmt: skip
        reject(f"torch's {func.__name__} with more than a kernel size and a stride", x)
    at = x.cut.dim - (x.dim() - space)
    if at < 0:
        return _of_samples(x, lambda local: func(local, size, stride))
    window = SlidingWindow(0, stride[at], size[at])
    return _windowed(x, window, 0, func.__name__, lambda t: func(t, size, stride))


@handles("interpolate", "upsample", "upsample_nearest")
def _resampled(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    size, scale, mode, corners = given_of(
        given, kwargs, ("size", None), ("scale_factor", None), ("mode", "nearest"),
        ("align_corners", None),
    )  # fmt: skip
    space, at = x.dim() - 2, x.cut.dim - 2
    if at < 0:
        return _of_samples(x, lambda t: func(t, size, scale, mode, corners))
    lengths = [int(n) for n in x.shape[2:]]
    sizes = _spread(size, space) if size is not None else None
    factors = [float(f) for f in _spread(scale, space)] if sizes is None else [
        new / old for new, old in zip(sizes, lengths, strict=True)
    ]  # fmt: skip
    times = round(factors[at])
    if not mode.startswith("nearest") or times != factors[at] or times < 1 or not is_plain(x):
        reject(f"interpolate by {factors[at]:g} in mode {mode}", x,
               "nearest is exact for whole factors")  # fmt: skip
    held = x.local.shape[x.cut.dim]
    wanted = [round(n * f) for n, f in zip(lengths, factors, strict=True)]

    def call(t: Tensor) -> Tensor:
        wanted[at] = t.shape[x.cut.dim] * times
        return F.interpolate(t, wanted, mode=mode)

    if not held:
        return like(x, _of_samples(x, call).local, x.cut.resized(x.cut.sizes, times))
    return like(x, call(x.local), x.cut.resized(x.cut.sizes, times))


@handles("pad")
def _pad(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    pads, mode, value = given_of(
        given, kwargs, ("pad", None), ("mode", "constant"), ("value", None)
    )
    pads = list(pads)
    along = 2 * (x.dim() - 1 - x.cut.dim)
    before, after = pads[along : along + 2] if along < len(pads) else (0, 0)
    if (before, after) == (0, 0):
        return _of_samples(x, lambda t: func(t, pads, mode, value))
    if before < 0 or after < 0 or not is_plain(x):
        reject("cropping by pad", x)
    if mode not in ("constant", "replicate"):
        reject(f"padding in mode {mode} along the sharded dim", x, "zeros and replicate are exact")
    before, after = x.holder.at_ends(x, before, after, mode)
    sizes = list(x.cut.sizes)
    held = [rank for rank, size in enumerate(sizes) if size]
    front, back = (held[0], held[-1]) if held else (x.holder.rank,) * 2
    own = [before if x.holder.rank == front else 0, after if x.holder.rank == back else 0]
    sizes[front] += before
    sizes[back] += after
    pads[along : along + 2] = own
    local = func(x.local, pads, mode, value) if x.local.numel() or mode == "constant" else (
        _of_samples(x, lambda t: func(t, pads, mode, value)).local
    )  # fmt: skip
    return like(x, local, x.cut.resized(sizes))


def _local(t: Tensor) -> Tensor:
    return t.local if isinstance(t, Sharded) else t


def _spread(value: int | Sequence[Any], count: int) -> tuple[Any, ...]:
    if isinstance(value, list | tuple):
        return tuple(value) * count if len(value) == 1 else tuple(value)
    return (value,) * count


# Group norms with statistics over all shards.


# [Note: merging statistics] A variance from mean and sum of squares would lose all digits if the
# mean is much larger than the deviation. So every shard computes its own mean and the sum of
# squared distances from it, and these are merged exactly (Chan, Golub, LeVeque, 1983): with the
# counts `n_r`, ``mean = sum n_r mean_r / n`` and ``M = sum M_r + n_r (mean_r - mean)^2``.
#
# The backward needs two sums over the group, of the gradient and of its product with the normalized
# input, which are summed over the ranks. Gradients of weight and bias are partial sums.
@handles("group_norm", "instance_norm")
def _group_norm(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    if func.__name__ == "instance_norm":
        reject("instance norm", x)
    names = ("num_groups", None), ("weight", None), ("bias", None), ("eps", 1e-5)
    groups, weight, bias, eps = given_of(given, kwargs, *names)
    if x.cut.dim == 0:
        return like(x, func(x.local, groups, weight, bias, eps))
    if x.cut.dim == 1:
        reject("a group norm over the sharded dim", x)
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
        # One scale and one shift per channel, as in an ordinary norm, so that one pass suffices.
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
    """Returns count, mean and sum of squared deviations of local elements, ``[batch, groups]``."""
    values = _in_groups(local, groups).to(dtype)
    count = values.shape[-1]
    if not count:
        zero = values.new_zeros(values.shape[:-1])
        return 0.0, zero, zero
    variance, mean = torch.var_mean(values, -1, correction=0)
    return float(count), mean, variance * count


def merged(parts: Sequence[Statistics]) -> Statistics:
    total = sum(count for count, _, _ in parts)
    mean = torch.stack([mean * (count / total) for count, mean, _ in parts]).sum(0)
    squares = [squares + count * (m - mean).square() for count, m, squares in parts]
    return total, mean, torch.stack(squares).sum(0)


def _in_groups(x: Tensor, groups: int) -> Tensor:
    width = x.shape[1] // groups * x[0, 0].numel()
    return x.reshape(x.shape[0], groups, width)


def _by_channel(values: Tensor, x: Tensor, groups: int) -> Tensor:
    wide = values.repeat_interleave(x.shape[1] // groups, dim=1)
    return wide.view(*wide.shape, *[1] * (x.dim() - 2))


# Attention over tokens of which this process holds a shard, without a quadratic mask.
#
# Keys and values are gathered (`PartLayout.whole`), as the middle of an autoencoder works at the
# size of the latents, a hundredth of that of its outer layers. Queries stay sharded and are
# processed some rows at a time, so that a kernel that stores scores holds at most `SCORES`.
#
# `frame_causal_attention` replaces the attention of HunyuanVideo's autoencoder, which uses a mask
# of tokens x tokens (198 GiB for 129 frames of 720p): every frame sees itself and earlier ones, so
# each frame is one unmasked attention over the keys up to its end.


SCORES = 1 << 26
"""Maximum number of logits in a block of attention rows: 256 MiB of float32."""


def frame_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, tokens: int, scale: float | None = None
) -> Tensor:
    """Computes attention in which tokens attend to their own frame and earlier ones."""
    given = q, k, v
    if has_torch_function(given):
        return handle_torch_function(frame_causal_attention, given, q, k, v, tokens, scale)
    return _causal(q, k, v, [(0, q.shape[2])], tokens, scale)


@handles("frame_causal_attention")
def _frame_causal(func: Any, args: Any, kwargs: Any) -> Sharded:
    q, k, v, tokens, scale = args
    if q.cut.dim > 2:
        reject("frame-causal attention with cut features", q)
    if q.cut.dim < 2:  # attention within each sample or head is local
        return like(q, func(q.local, k.local, v.local, tokens, scale))
    whole = [t.holder.whole(t, (name, 0)) for t, name in ((k, "keys"), (v, "values"))]
    return like(q, _causal(q.local, whole[0], whole[1], _runs_of(q), tokens, scale))


@handles("scaled_dot_product_attention")
def _attention(func: Any, args: Any, kwargs: Any) -> Sharded:
    q, k, v, *given = args
    mask, dropout, causal, scale = given_of(
        given, kwargs, ("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False),
        ("scale", None),
    )  # fmt: skip
    if dropout:
        reject("attention dropout", q)
    at = q.cut.dim - q.dim()
    if at < -2:
        return _of_rows(q, k, v, mask, causal, scale)
    if at == -1:
        reject("attention with cut features", q)
    if not causal and not hasattr(q.holder, "resplit"):
        reject("attention over later frames", q, "it must be causal")
    keys, values = q.holder.whole(k, ("keys", 0)), q.holder.whole(v, ("values", 0))
    if causal:
        return like(q, _causal(q.local, keys, values, _runs_of(q), 1, scale))
    if mask is not None:
        mask = mask[..., _positions(q), :] if mask.shape[-2] > 1 else mask
    return like(q, _rows(q.local, keys, values, mask, scale))


def _of_rows(
    q: Sharded, k: Sharded, v: Sharded, mask: Tensor | None, causal: bool, scale: float | None
) -> Sharded:
    if mask is not None and mask.dim() + q.cut.dim - q.dim() >= 0:
        reject("attention with a separate mask for each sharded sample", q)
    if not q.local.numel():
        return like(q, q.local + 0 * (k.local + v.local))
    options = {"attn_mask": mask, "is_causal": causal, "scale": scale}
    return like(q, F.scaled_dot_product_attention(q.local, k.local, v.local, **options))


def _rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Computes attention in blocks of query rows, to bound the memory of the logits."""
    if not q.shape[-2]:
        return q[..., :0] @ k[..., :0].mT @ v
    step = max(1, SCORES // max(1, q[..., 0, 0].numel() * k.shape[-2]))
    parts = []
    for start in range(0, q.shape[-2], step):
        rows = None if mask is None else mask
        if rows is not None and rows.shape[-2] > 1:
            rows = rows[..., start : start + step, :]
        part = q[..., start : start + step, :]
        parts.append(F.scaled_dot_product_attention(part, k, v, attn_mask=rows, scale=scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, runs: list[Interval], tokens: int, scale: float | None
) -> Tensor:
    """Computes frame-causal attention for local queries at the positions `runs`."""
    parts, at = [], 0
    for start, stop in runs:
        held = q[..., at : at + stop - start, :]
        at += stop - start
        parts += _causal_run(held, k, v, start, tokens, scale)
    if not parts:
        return q[..., :0] @ k[..., :0].mT @ v
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _causal_run(
    q: Tensor, k: Tensor, v: Tensor, start: int, tokens: int, scale: float | None
) -> list[Tensor]:
    parts, done, length = [], 0, q.shape[-2]
    heads = max(1, q[..., 0, 0].numel()) if length else 1
    while done < length:
        first = start + done
        if tokens > 1:
            # All rows of a frame see the same keys, so no mask is needed.
            end = (first // tokens + 1) * tokens
            count, mask = min(length - done, end - first), None
        else:
            count = min(length - done, max(1, SCORES // (heads * (start + length))))
            end = first + count
            rows = torch.arange(first, end, device=q.device)
            mask = torch.arange(end, device=q.device) <= rows.unsqueeze(1)
        part = q[..., done : done + count, :]
        parts.append(_rows(part, k[..., :end, :], v[..., :end, :], mask, scale))
        done += count
    return parts


def _runs_of(x: Sharded) -> list[Interval]:
    start, stop = own_run(x)
    cut = x.cut
    period = cut.extent * cut.inner
    if start == stop:
        return []
    return [
        (frame * period + start * cut.inner, frame * period + stop * cut.inner)
        for frame in range(cut.outer)
    ]


def _positions(x: Sharded) -> Tensor:
    empty = torch.arange(0, device=x.local.device)
    return torch.cat([empty] + [torch.arange(*run, device=empty.device) for run in _runs_of(x)])
