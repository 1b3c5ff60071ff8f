"""Adapter for torch's DTensors, FSDP2's among them: a rank's share as a part of the whole."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from gulliver.checkpoint._image import check_holdable
from gulliver.checkpoint._tree import Leaf
from gulliver.errors import GulliverError
from gulliver.memory import Part, Region


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor; does not import what makes them."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def local_leaf(where: str, tensor: Any, saving: bool) -> Leaf:
    """Returns what this rank has of a DTensor, as a tensor or a part of the whole."""
    local = tensor.to_local().detach()
    check_holdable(where, local)
    placements, mesh = tensor.placements, tensor.device_mesh
    cuts = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    if len(cuts) > 1 or any(p.is_partial() for p in placements):
        raise GulliverError(
            f"{where} is a DTensor placed {placements} on a mesh of {mesh.ndim} axes: shards along "
            "one axis, and replicas along any, can be saved and loaded; call full_tensor() on it "
            "first"
        )
    if not cuts:
        return local.contiguous() if saving else local
    if not local.is_contiguous():
        if not saving:
            raise GulliverError(f"{where} is not contiguous on this rank: clone it first")
        local = local.contiguous()
    shape, dim = tuple(tensor.shape), placements[cuts[0]].dim % tensor.ndim
    # Along the cut dim slices are dealt as `torch.chunk` deals them.
    each = math.ceil(shape[dim] / mesh.size(cuts[0]))
    start = min(shape[dim], mesh.get_local_rank(cuts[0]) * each)
    copies = any(c for axis, c in enumerate(mesh.get_coordinate()) if axis != cuts[0])
    if dim == 0:
        row = math.prod(shape[1:])
        if saving and copies:
            return Part(local.reshape(-1)[:0], shape, start * row)
        return Part(local.reshape(-1), shape, start * row, local)
    region = Region(shape, dim, ((start, start + local.shape[dim]),))
    if saving and copies:
        return Part(local.reshape(-1)[:0], shape, 0, None, region)
    return Part(local, shape, 0, local, region)


def like_local(tensor: Any, local: Tensor) -> Any:
    """Makes a DTensor placed as another one, of a local tensor of any dtype."""
    kind: Any = type(tensor.data)
    return kind.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
