"""Splits nested states into named tensors and a JSON skeleton that refers to them.

JSON instead of pickle, because loading a pickle may run arbitrary code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gulliver.checkpoint.files import check_holdable
from gulliver.errors import GulliverError
from gulliver.memory.parts import Part, Region, part_of, region_of

Leaf = Tensor | Part
NAMED = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def as_leaf(value: Leaf) -> Leaf:
    """Wraps a tensor that holds a region in a `Part`; returns other tensors unchanged."""
    is_slice = isinstance(value, Tensor) and region_of(value) is not None
    return part_of(value) if is_slice else value  # type: ignore[arg-type]


def values_of(leaf: Leaf) -> Tensor:
    """Returns the elements that this rank holds."""
    return leaf.value if isinstance(leaf, Part) else leaf


def split_state(state: Any) -> tuple[dict[str, Leaf], Any]:
    """Extracts the tensors from a nested state."""
    tensors: dict[str, Leaf] = {}
    return tensors, _take(state, "", tensors)


def _take(value: Any, path: str, tensors: dict[str, Leaf]) -> Any:
    if isinstance(value, _LEAVES):
        path = path or "value"
        # Keys with dots, and 1 next to "1", can give two tensors the same path.
        name, number = path, len(tensors)
        while name in tensors:
            name, number = f"{path}~{number}", number + 1
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {
            "dict": [[_key(k, path), _take(v, below(path, k), tensors)] for k, v in value.items()]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_take(item, below(path, n), tensors) for n, item in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise GulliverError(
        f"{path or 'the state'} is a {type(value).__name__}; only tensors, numbers, strings, and "
        "dicts, lists and tuples of them can be saved"
    )


def below(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


_LEAVES = (Tensor, Part)


def _key(key: Any, path: str) -> Any:
    if type(key) is str or type(key) is int:
        return key
    if isinstance(key, Tensor):
        raise GulliverError(
            f"a key of {path} is a tensor, which cannot be saved; use strings or numbers"
        )
    return _take(key, f"a key of {path}", {})


def join_state(tensors: Mapping[str, Any], skeleton: Any) -> Any:
    """Inverts `split_state`."""
    if not isinstance(skeleton, dict):
        return skeleton
    kind, content = _only_item(skeleton)
    if kind == "tensor":
        if content not in tensors:
            raise GulliverError(f"tensor {content!r} is missing from the checkpoint")
        return tensors[content]
    if kind == "dict":
        return {join_state(tensors, key): join_state(tensors, item) for key, item in content}
    if kind in ("list", "tuple"):
        items = [join_state(tensors, item) for item in content]
        return items if kind == "list" else tuple(items)
    if kind == "dtype":
        if content not in NAMED:
            raise GulliverError(
                f"{content!r} is not a dtype: the state was written by another program"
            )
        return NAMED[content]
    if kind == "float":
        return float(content)
    raise GulliverError(f"{kind!r} is not part of a saved state: it was written by another program")


def _only_item(skeleton: dict[str, Any]) -> tuple[str, Any]:
    if len(skeleton) != 1:
        raise GulliverError(f"{sorted(skeleton)} is not a saved state: the file has another format")
    return next(iter(skeleton.items()))


def merge_skeletons(skeletons: Sequence[Any]) -> Any:
    """Merges the ranks' skeletons: dicts are merged, otherwise the first rank's value is used."""
    # Ranks with other parts of a state, such as the optimizer's state of other parameters, have
    # dicts with other keys.
    first = skeletons[0]
    is_mapping = all(isinstance(s, dict) and s.keys() == {"dict"} for s in skeletons)
    if len(skeletons) == 1 or not is_mapping:
        return first
    found: dict[str, list[Any]] = {}
    keys: dict[str, Any] = {}
    for skeleton in skeletons:
        for key, item in skeleton["dict"]:
            mark = repr(key)
            keys[mark] = key
            found.setdefault(mark, []).append(item)
    return {"dict": [[keys[mark], merge_skeletons(items)] for mark, items in found.items()]}


def names_in(skeleton: Any) -> list[str]:
    if not isinstance(skeleton, dict):
        return []
    kind, content = _only_item(skeleton)
    if kind == "tensor":
        return [content]
    if kind == "dict":
        return [name for _, item in content for name in names_in(item)]
    if kind in ("list", "tuple"):
        return [name for item in content for name in names_in(item)]
    return []


# Adapter for torch's DTensors, including FSDP2's: a rank's shard as a part of the full tensor.


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor, without importing DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def local_leaf(where: str, tensor: Any, saving: bool) -> Leaf:
    local = tensor.to_local().detach()
    check_holdable(where, local)
    placements, mesh = tensor.placements, tensor.device_mesh
    cuts = [axis for axis, placement in enumerate(placements) if placement.is_shard()]
    if len(cuts) > 1 or any(p.is_partial() for p in placements):
        raise GulliverError(
            f"{where} is a DTensor with placements {placements} on a mesh of {mesh.ndim} axes: "
            "only one axis may be sharded; call full_tensor() on it first"
        )
    if not cuts:
        return local.contiguous() if saving else local
    if not local.is_contiguous():
        if not saving:
            raise GulliverError(f"{where} is not contiguous on this rank: clone it first")
        local = local.contiguous()
    shape, dim = tuple(tensor.shape), placements[cuts[0]].dim % tensor.ndim
    # Along the sharded dim, slices are distributed as by `torch.chunk`.
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
    """Wraps a local tensor of any dtype in a DTensor with another's placement."""
    kind: Any = type(tensor.data)
    return kind.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
