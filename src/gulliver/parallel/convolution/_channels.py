"""Layers whose input channels are cut: each rank sums over its own, a reduce-scatter adds them up.

The usual way, a convolution over this rank's input channels and an all-reduce of the output of
which each keeps its slice, sends the whole output twice; here every rank gets its slice of the sum
and nothing else, so half of the bytes travel, and activations between layers are never whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from gulliver.parallel.convolution._sharded import Sharded, is_plain, like, own_run, refuse


def convolve_channels(
    x: Sharded,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    convolve: Callable[[Tensor, Tensor], Tensor],
) -> Sharded:
    """Convolves an activation whose channels are cut."""
    if groups != 1:
        refuse(f"a convolution of {groups} groups", x, "cut height, width or time instead")
    return _summed(x, weight, bias, 1, convolve)


def linear_channels(x: Sharded, weight: Tensor, bias: Tensor | None) -> Sharded:
    """Applies a linear layer to an activation whose features are cut."""
    return _summed(x, weight, bias, x.dim() - 1, lambda local, part: F.linear(local, part))


def _summed(
    x: Sharded,
    weight: Tensor,
    bias: Tensor | None,
    dim: int,
    call: Callable[[Tensor, Tensor], Tensor],
) -> Sharded:
    if not is_plain(x) or not hasattr(x.holder, "reduce"):
        refuse("a sum over channels", x)
    sizes = x.holder.layout(weight.shape[0])
    start, stop = own_run(x)
    local, part = x.local, weight.narrow(1, start, stop - start)
    if start == stop:
        # No channels: one of zeros, so that the rank is part of the same graph as the others.
        shape = list(local.shape)
        shape[dim] = 1
        local = F.pad(local.movedim(dim, -1), (0, 1)).movedim(-1, dim)
        part = weight.narrow(1, 0, 1)
    made = x.holder.reduce(call(local, part), dim, sizes)
    cut = x.cut.resized(sizes)
    out = like(x, made, cut)
    if bias is not None:
        low, high = own_run(out)
        shift = bias[low:high].view([-1] + [1] * (x.dim() - 1 - dim))
        out = like(x, made + shift, cut)
    return out
