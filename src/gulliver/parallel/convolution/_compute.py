"""Functions that compute: point by point, along other dims, over windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.parallel.convolution._chunked import padding_of
from gulliver.parallel.convolution._shapes import given_of
from gulliver.parallel.convolution._sharded import (
    Rows,
    Sharded,
    first,
    handles,
    in_place,
    is_plain,
    like,
    locals_of,
    own_of,
    parts_in,
    refuse,
    window_rows,
)
from gulliver.parallel.convolution._windows import SlidingWindow

PIECES = 8
"""Pieces in which a convolution writes its output where nothing is kept for backward."""

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
    """Calls an element-wise function."""
    given = parts_in((args, kwargs))
    x = max(given, key=lambda part: part.cut.extent)
    for part in given:
        if part.cut.dim - part.dim() != x.cut.dim - x.dim():
            refuse("an operation on activations that are cut along different dims", x)
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
    """Returns the part of a replicated tensor that belongs to this part of the activation."""
    dim = x.cut.dim - x.dim()
    if t.dim() < -dim or t.shape[dim] == 1:
        return t
    cut = replace(x.cut, dim=dim % t.dim())
    if t.shape[dim] != cut.length:
        refuse(f"an operation with a tensor {tuple(t.shape)}", x)
    return own_of(t, cut, x.holder)


@handles("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout", "alpha_dropout")
def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    x, *given = args
    p, training = given_of(given, kwargs, ("p", 0.5), ("training", True))
    if p and training:
        refuse("dropout", x, "every rank would draw others; call eval(), or set it to 0")
    return x


@handles(*ALONG.split(), *REDUCING.split())
def _along(func: Any, args: Any, kwargs: Any) -> Any:
    x, *given = args
    name = func.__name__
    kwargs = dict(kwargs)
    place = 1 if name in ("normalize", "norm", "vector_norm") else 0
    dims = given[place] if len(given) > place else kwargs.get("dim")
    if dims is None:
        refuse(f"torch's {name} over all dims", x)
    dims = [d % x.dim() for d in (dims if isinstance(dims, list | tuple) else [dims])]
    if x.cut.dim in dims:
        refuse(f"torch's {name} along the cut dim", x)
    made = func(x.local, *given, **kwargs)
    fewer = sum(d < x.cut.dim for d in dims) if made.dim() < x.dim() else 0
    return like(x, made, replace(x.cut, dim=x.cut.dim - fewer))


@handles("layer_norm", "rms_norm")
def _layer_norm(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    (shape,) = given_of(given[:1], kwargs, ("normalized_shape", None))
    if x.cut.dim >= x.dim() - len(shape):
        refuse(f"torch's {func.__name__} over the cut dim", x)
    return like(x, func(x.local, *given, **kwargs))


@handles("batch_norm")
def _batch_norm(func: Any, args: Any, kwargs: Any) -> Sharded:
    x = first(args, kwargs)
    (training,) = given_of(args[5:6], kwargs, ("training", False))
    if training or x.cut.dim == 1:
        refuse("batch norm that counts statistics", x, "call eval(), or use group norms")
    return like(x, func(*locals_of(args, _local), **locals_of(kwargs, _local)))


@handles("linear")
def _linear(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    weight, bias = given_of(given, kwargs, ("weight", None), ("bias", None))
    if x.cut.dim == x.dim() - 1:
        refuse("a linear layer over the cut dim", x)
    return like(x, func(x.local, weight, bias))


@handles("matmul", "bmm")
def _matmul(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, other = args
    if not isinstance(x, Sharded) or isinstance(other, Sharded) or x.cut.dim == x.dim() - 1:
        refuse(f"torch's {func.__name__}", first(args))
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
    rest = {name: kwargs[name] for name in ("mode", "call") if name in kwargs}
    if rest.get("mode", "zeros") != "zeros":
        x = F.pad(x, [p for pair in reversed(pads) for p in pair], rest["mode"])
        pads, rest = ((0, 0),) * space, rest | {"mode": "zeros"}
        assert isinstance(x, Sharded)
    if x.dim() != space + 2:
        refuse("a convolution without a dim of samples", x)

    def convolve(local: Tensor, weight: Tensor, bias: Tensor | None, pads: Any) -> Tensor:
        if any(a != b for a, b in pads):
            local, pads = F.pad(local, [p for pair in reversed(pads) for p in pair]), ()
        padding = [a for a, _ in pads] or [0] * space
        return func(local, weight, bias, stride, padding, dilation, groups, **rest)

    if x.cut.dim == 0:
        return _of_samples(x, lambda local: convolve(local, weight, bias, pads))
    if x.cut.dim == 1:
        refuse("a convolution over the cut dim", x)
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
    """Calls a function that is independent along the cut dim on the local part."""
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
    value: float = 0.0,
) -> Sharded:
    """Computes this part's outputs of windows along the cut dim."""
    rows, sizes = window_rows(x, window, after, name, weight)
    start, stop = rows.outputs
    if start == stop:
        local = call(rows.all(window.span, value)).narrow(x.cut.dim, 0, 0)
    elif keep or (len(rows.parts) == 1 and rows.start == rows.wanted[0]):
        local = call(rows.take(*rows.wanted, value))
    else:
        local = _in_pieces(rows, window, call, value)
    return like(x, local, x.cut.resized(sizes))


def _in_pieces(
    rows: Rows, window: SlidingWindow, call: Callable[[Tensor], Tensor], value: float
) -> Tensor:
    """Computes piece by piece: only pieces at the borders are copied together with their halo."""
    start, stop = rows.outputs
    step, out = -(-(stop - start) // PIECES), None
    for low in range(start, stop, step):
        high = min(low + step, stop)
        made = call(rows.take(*window.needs(low, high), value))
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
        refuse(f"torch's {func.__name__} with more than a kernel size and a stride", x)
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
        refuse(f"interpolate by {factors[at]:g} in mode {mode}", x,
               "the nearest of a whole number of times is exact")  # fmt: skip
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
        refuse("cropping by pad", x)
    if mode not in ("constant", "replicate"):
        refuse(f"padding in mode {mode} along the cut dim", x, "zeros and replicate are exact")
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
