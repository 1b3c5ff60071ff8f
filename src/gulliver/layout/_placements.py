"""Layouts as DTensor's placements, and as the search has them."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from gulliver.errors import GulliverError
from gulliver.solve import Sharding

SUMS = ("sum", "avg", "max")
"""Reductions of partial values that are converted."""


def sharding_of(placements: Sequence[Placement], dims: int) -> Sharding:
    """A DTensor layout in the terms of the search."""
    cuts: list[list[int]] = [[] for _ in range(dims)]
    terms: list[int] = []
    for axis, placement in enumerate(placements):
        if type(placement) is Shard:
            if not -dims <= placement.dim < dims:
                raise GulliverError(
                    f"{placement} on axis {axis} of the mesh cuts dim {placement.dim}, and the "
                    f"tensor has {dims} dims"
                )
            cuts[placement.dim % dims].append(axis)
        elif type(placement) is Partial:
            terms.append(axis)
        elif type(placement) is not Replicate:
            raise GulliverError(
                f"{placement} on axis {axis} of the mesh is not converted: take Shard, Replicate "
                "or Partial"
            )
    return Sharding(tuple(map(tuple, cuts)), tuple(terms))


def reduction_of(*layouts: Sequence[Placement]) -> str:
    """The one reduction of all partial values; sum where there is none."""
    found = {p.reduce_op for layout in layouts for p in layout if isinstance(p, Partial)}
    if len(found) > 1:
        raise GulliverError(
            f"partial values of {' and '.join(sorted(found))} are not converted into each other: "
            "reduce them first"
        )
    (op,) = found or {"sum"}
    if op not in SUMS:
        raise GulliverError(f"Partial({op!r}) is not converted: take one of {', '.join(SUMS)}")
    return op
