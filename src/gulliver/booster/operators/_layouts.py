"""Layouts of values along the axes of a mesh.

A layout describes a value and its gradient:

    R   replicated, and so is its gradient
    T   replicated; its gradient is partial (a sum over ranks)
    P   partial; its gradient is replicated
    Sd  sharded along dim d, and so is its gradient

`T` is the input of a matrix product with a sharded output: each rank has one term of its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

WHOLE, SUMMED, TERMS = "R", "T", "P"
Layout = tuple[str, ...]
"""Layout along each axis."""


def cut(dim: int) -> str:
    """The layout that cuts a dim."""
    return f"S{dim}"


def cut_dim(layout: str) -> int | None:
    """The dim that a layout cuts; None for none."""
    return int(layout[1:]) if layout[0] == "S" else None


def placements(layout: Layout) -> tuple[Placement, ...]:
    """Placements of a value, as DTensor has them."""
    return tuple(_placement(one, TERMS) for one in layout)


def gradient_placements(layout: Layout) -> tuple[Placement, ...]:
    """Placements of the gradient of a value."""
    return tuple(_placement(one, SUMMED) for one in layout)


def _placement(layout: str, terms: str) -> Placement:
    dim = cut_dim(layout)
    if dim is not None:
        return Shard(dim)
    return Partial() if layout == terms else Replicate()


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """Local shape of a value."""
    found = list(shape)
    for one, size in zip(layout, sizes, strict=True):
        dim = cut_dim(one)
        if dim is not None:
            found[dim] //= size
    return tuple(found)


def divides(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether all ranks have parts of one size."""
    parts: dict[int, int] = {}
    for one, size in zip(layout, sizes, strict=True):
        dim = cut_dim(one)
        if dim is not None:
            parts[dim] = parts.get(dim, 1) * size
    return all(shape[dim] % count == 0 for dim, count in parts.items())


def first_index(
    dim: int, length: int, layout: Layout, sizes: Sequence[int], here: Sequence[int]
) -> int:
    """Index of the first element along a dim that a rank has."""
    first = 0
    for one, size, at in zip(layout, sizes, here, strict=True):
        if cut_dim(one) == dim:
            length //= size
            first += at * length
    return first
