"""Torch functions on a shard that move elements: views, slices, concatenation.

Each is called with full shapes and applied to the local shard. `reshaped` is the subtle one: the
sharded positions are a factor of the row-major element order, and the sharded dim of the new shape
is the one that contains this factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gulliver.parallel.convolution.chunked import SlidingWindow
from gulliver.parallel.convolution.sharded import (
    Sharded,
    ShardedDim,
    handles,
    is_plain,
    like,
    own_of,
    parts_in,
    reject,
    window_rows,
)


def reshaped(x: Sharded, shape: Sequence[int]) -> Sharded:
    shape = list(shape)
    if x.cut.extent == 1 and x.holder.grows:
        x.holder.wait()
    inside = x.cut.inner * math.prod(x.shape[x.cut.dim + 1 :])
    below, extent, block = 1, x.cut.extent, 1
    for dim in reversed(range(len(shape))):
        above = below * shape[dim]
        alone = extent == 1 and shape[dim] == 1 and below == inside
        if alone or (below <= inside < above and inside * extent <= above):
            if inside % below or (extent and above % (inside * extent)):
                reject(f"a view as {tuple(shape)}", x)
            x = _in_blocks(x, block)
            outer = above // (inside * extent) if extent else 1
            return _viewed(x, shape, ShardedDim(dim, x.cut.sizes, outer, inside // below))
        if below <= inside < above:
            # The positions become part of the previous dim; complete blocks of them stay together.
            block, extent, inside = block * (above // inside), extent // (above // inside), above
        below = above
    return reject(f"a view as {tuple(shape)}", x)


def _in_blocks(x: Sharded, block: int) -> Sharded:
    """Makes shard sizes multiples of `block`; the sharded dim then counts blocks."""
    if block == 1:
        return x
    if x.cut.extent % block and hasattr(x.holder, "layout"):
        reject(f"a view that splits dim {x.cut.dim} in blocks of {block}", x)
    if any(size % block for size in x.cut.sizes):
        rows, sizes = window_rows(x, SlidingWindow(0, block, block), 0, "view")
        start, stop = rows.outputs
        x = like(x, rows.take(start * block, stop * block), x.cut.resized(sizes, block))
    blocks = tuple(size // block for size in x.cut.sizes)
    # Not a valid sharding of this shape, but of the view that follows.
    made = like(x, x.local)
    made.cut = replace(x.cut, sizes=blocks, inner=x.cut.inner * block)
    return made


def _viewed(x: Sharded, shape: Sequence[int], cut: ShardedDim) -> Sharded:
    local = list(shape)
    local[cut.dim] = cut.outer * cut.sizes[x.holder.rank] * cut.inner
    return like(x, x.local.reshape(local), cut)


def permuted(x: Sharded, dims: Sequence[int]) -> Sharded:
    dims = [dim % x.dim() for dim in dims]
    return like(x, x.local.permute(dims), replace(x.cut, dim=dims.index(x.cut.dim)))


def _shell(x: Sharded) -> torch.Tensor:
    return torch.empty(tuple(x.shape), device="meta")


@handles("view", "reshape", "flatten")
def _view(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    return reshaped(x, func(_shell(x), *given, **kwargs).shape)


@handles("unflatten")
def _unflatten(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    dim, sizes = given_of(given, kwargs, ("dim", None), ("sizes", None))
    dim, sizes = dim % x.dim(), list(sizes)
    growing = sizes[0] == -1 and x.holder.grows
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // -math.prod(sizes)
    shape = [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]]
    if dim == x.cut.dim and is_plain(x) and growing:
        x = _in_blocks(x, math.prod(sizes[1:]))
        return _viewed(x, shape, ShardedDim(dim, x.cut.sizes))
    return reshaped(x, shape)


@handles("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis")
def _permute(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    # Distinct sizes, which identify the dims.
    numbered = torch.empty(tuple(range(x.dim())), device="meta")
    return permuted(x, func(numbered, *given, **kwargs).shape)


@handles("unsqueeze")
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    (dim,) = given_of(given, kwargs, ("dim", None))
    dim %= x.dim() + 1
    cut = replace(x.cut, dim=x.cut.dim + (dim <= x.cut.dim))
    return like(x, x.local.unsqueeze(dim), cut)


@handles("squeeze")
def _squeeze(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    (dim,) = given_of(given, kwargs, ("dim", None))
    if dim is None:
        reject("squeeze without a dim", x)
    dim %= x.dim()
    if x.shape[dim] != 1:
        return x
    if dim == x.cut.dim:
        x = _elsewhere(x, 1 if dim == 0 else 0)
    return like(x, x.local.squeeze(dim), replace(x.cut, dim=x.cut.dim - (dim < x.cut.dim)))


def _elsewhere(x: Sharded, dim: int) -> Sharded:
    """Removes a sharded dim of size one by merging it into another dim."""
    # Shards without the position then have no elements of the other dim.
    if not is_plain(x) or x.cut.extent != 1:
        reject("dropping the sharded dim", x)
    at = x.cut.dim
    if dim < at:
        merged = x.local.movedim(at, dim + 1).flatten(dim, dim + 1)
    else:
        merged = x.local.movedim(at, dim).flatten(dim - 1, dim)
    return like(x, merged.unsqueeze(at), ShardedDim(dim, x.cut.sizes, x.shape[dim]))


def _back_to(x: Sharded, dim: int) -> Sharded:
    """Inverts `_elsewhere`: restores a sharded dim of size one."""
    if x.cut.dim == dim:
        return x
    if x.cut.extent != 1 or x.cut.inner != 1 or x.shape[dim] != 1:
        reject("joining activations that are sharded along different dims", x)
    held = x.cut.sizes[x.holder.rank]
    at = x.cut.dim - (dim < x.cut.dim)
    local = x.local.squeeze(dim).unflatten(at, (x.cut.outer, held)).movedim(at + 1, dim)
    return like(x, local, ShardedDim(dim, x.cut.sizes))


@handles("expand")
def _expand(func: Any, args: Any, kwargs: Any) -> Sharded:
    x = args[0]
    sizes = list(args[1] if isinstance(args[1], list | tuple) else args[1:])
    cut = replace(x.cut, dim=x.cut.dim + len(sizes) - x.dim())
    asked = sizes[cut.dim]
    held = x.local.shape[x.cut.dim]
    if asked not in (-1, x.shape[x.cut.dim]):
        # The shard with the only position repeats it; the others stay empty.
        cut, held = cut.resized(cut.sizes, asked), held * asked
    sizes[cut.dim] = held
    return like(x, x.local.expand(sizes), cut)


@handles("repeat_interleave")
def _repeat_interleave(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    times, dim = given_of(given, kwargs, ("repeats", None), ("dim", None))
    if (
        not isinstance(times, int)
        or dim is None
        or (dim % x.dim() == x.cut.dim and not is_plain(x))
    ):
        reject("repeat_interleave", x)
    cut = x.cut.resized(x.cut.sizes, times) if dim % x.dim() == x.cut.dim else x.cut
    return like(x, x.local.repeat_interleave(times, dim), cut)


def sliced(x: Sharded, start: int, stop: int, step: int = 1) -> Sharded:
    extent = x.cut.extent
    if not is_plain(x):
        reject("a slice along a merged dim", x)
    if (start, stop, step) == (0, extent, 1) and not x.holder.grows:
        return x
    if step < 1:
        reject("a slice with a negative step", x)
    rows, sizes = window_rows(x, SlidingWindow(start, step), stop - extent, "slice")
    low, high = rows.outputs
    # Shards outside of the slice stay in the graph, so that all ranks have the same messages.
    local = rows.take(*rows.wanted) if low < high else rows.all(1).narrow(x.cut.dim, 0, 0)
    if step > 1 and low < high:
        local = local[(slice(None),) * x.cut.dim + (slice(None, None, step),)]
    return like(x, local, x.cut.resized(sizes))


@handles("getitem")
def _getitem(func: Any, args: Any, kwargs: Any) -> Any:
    x: Any = args[0]
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if any(not (i is None or i is Ellipsis or isinstance(i, int | slice)) for i in index):
        reject("indexing with tensors", x)
    named = sum(i is not None and i is not Ellipsis for i in index)
    spread = [slice(None)] * (x.dim() - named)
    at = index.index(Ellipsis) if Ellipsis in index else len(index)
    index = (*index[:at], *spread, *index[at + 1 :])
    dim = 0
    for entry in index:
        if entry is None:
            x = torch.unsqueeze(x, dim)
        elif isinstance(entry, int):
            entry = entry % x.shape[dim]
            x = torch.squeeze(_narrowed(x, dim, entry, entry + 1), dim)
            continue
        elif entry != slice(None):
            x = _narrowed(x, dim, *entry.indices(x.shape[dim]))
        dim += 1
    return x


def _narrowed(x: Sharded, dim: int, start: int, stop: int, step: int = 1) -> Sharded:
    if dim == x.cut.dim:
        return sliced(x, start, max(start, stop), step)
    return like(x, x.local[(slice(None),) * dim + (slice(start, stop, step),)])


@handles("narrow")
def _narrow(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    dim, start, length = given_of(given, kwargs, ("dim", None), ("start", None), ("length", None))
    start = start % x.shape[dim] if start < 0 else start
    return _narrowed(x, dim % x.dim(), start, start + length)


@handles("select")
def _select(func: Any, args: Any, kwargs: Any) -> Sharded:
    x, *given = args
    dim, index = given_of(given, kwargs, ("dim", None), ("index", None))
    index %= x.shape[dim]
    return torch.squeeze(_narrowed(x, dim % x.dim(), index, index + 1), dim)  # pyright: ignore


def _divided(x: Sharded, dim: int, sizes: Sequence[int]) -> tuple[Sharded, ...]:
    found, start = [], 0
    for size in sizes:
        found.append(_narrowed(x, dim, start, start + size))
        start += size
    return tuple(found)


@handles("split", "split_with_sizes", "chunk", "tensor_split")
def _split(func: Any, args: Any, kwargs: Any) -> tuple[Sharded, ...]:
    x, *given = args
    dim = (given[1] if len(given) > 1 else kwargs.get("dim", 0)) % x.dim()
    return _divided(x, dim, [part.shape[dim] for part in func(_shell(x), *given, **kwargs)])


@handles("unbind")
def _unbind(func: Any, args: Any, kwargs: Any) -> tuple[Sharded, ...]:
    x, *given = args
    (dim,) = given_of(given, kwargs, ("dim", 0))
    found = _divided(x, dim % x.dim(), [1] * x.shape[dim])
    return tuple(torch.squeeze(part, dim) for part in found)  # pyright: ignore


@handles("cat", "concat", "concatenate")
def _cat(func: Any, args: Any, kwargs: Any) -> Sharded:
    given, *rest = args
    (dim,) = given_of(rest, kwargs, ("dim", 0))
    x = max(parts_in(given), key=lambda part: part.cut.extent)
    dim %= x.dim()
    given = [t for t in given if t.shape != (0,)]
    if any(not isinstance(t, Sharded) for t in given):
        if dim == x.cut.dim:
            reject("cat with a tensor that is not cut", x)
        given = [
            t if isinstance(t, Sharded) else like(x, own_of(t, x.cut, x.holder)) for t in given
        ]
    if dim == x.cut.dim or any(t.cut.dim != x.cut.dim for t in given):
        return _joined([_back_to(t, dim) for t in given], dim)
    aligned = x.holder.align(given, ("cat", 0))
    return like(aligned[0], torch.cat([t.local for t in aligned], dim))


def _joined(given: list[Sharded], dim: int) -> Sharded:
    x = given[0]
    for after in given[1:]:
        x = _one_behind(x, after, dim)
    return x


def _one_behind(x: Sharded, after: Sharded, dim: int) -> Sharded:
    held = [[rank for rank, size in enumerate(t.cut.sizes) if size] for t in (x, after)]
    if held[0] and held[1] and held[0][-1] > held[1][0]:
        if not hasattr(x.holder, "resplit"):
            reject("cat after frames that are still to come", x)
        # Each rank takes its interval of the result, from one or both inputs.
        ends, border = x.holder.layout(x.cut.extent + after.cut.extent), x.cut.extent
        before = tuple(_below(ends, rank, border) for rank in range(len(ends)))
        behind = tuple(size - part for size, part in zip(ends, before, strict=True))
        x, after = x.holder.resplit(x, before), x.holder.resplit(after, behind)
    sizes = tuple(a + b for a, b in zip(x.cut.sizes, after.cut.sizes, strict=True))
    return like(x, torch.cat([x.local, after.local], dim), ShardedDim(dim, sizes))


def _below(sizes: Sequence[int], rank: int, border: int) -> int:
    start = sum(sizes[:rank])
    return max(0, min(start + sizes[rank], border) - start)


@handles("stack")
def _stack(func: Any, args: Any, kwargs: Any) -> Sharded:
    given, *rest = args
    (dim,) = given_of(rest, kwargs, ("dim", 0))
    return torch.cat([torch.unsqueeze(t, dim) for t in given], dim)  # pyright: ignore


@handles("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(func: Any, args: Any, kwargs: Any) -> Any:
    x, *given = args
    times = given[0] if given else next(iter(kwargs.values()))
    *front, channels, height, width = x.shape
    n = len(front)
    if func.__name__ == "pixel_shuffle":
        split = x.reshape(*front, channels // times**2, times, times, height, width)
        order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
        return split.permute(order).reshape(
            *front, channels // times**2, height * times, width * times
        )
    split = x.reshape(*front, channels, height // times, times, width // times, times)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return split.permute(order).reshape(
        *front, channels * times**2, height // times, width // times
    )


def given_of(given: Sequence[Any], kwargs: dict[str, Any], *names: tuple[str, Any]) -> list[Any]:
    found = [kwargs.get(name, default) for name, default in names]
    found[: len(given)] = given
    return found
