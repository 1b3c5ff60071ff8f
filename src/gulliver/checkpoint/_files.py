"""Single files: tensors as safetensors, all else as JSON, no pickle anywhere."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io import atomic_file, named_errors, write_text

_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.uint16,
        torch.int32,
        torch.uint32,
        torch.int64,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    }
)
"""What the format can hold."""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes named tensors to a safetensors file, whole or not at all.

    Tied and non-contiguous tensors are written each by its own values.

    Raises:
        GulliverError: a tensor that the format cannot hold, no space, or a place that cannot be
            written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    ready: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = _plain(name, tensor)
        storage = value.untyped_storage()
        # safetensors refuses shared storage and writes the whole of a larger one.
        if storage.data_ptr() in seen or storage.nbytes() != value.nbytes:
            value = value.clone()
        seen.add(storage.data_ptr())
        ready[name] = value
    path = Path(path)
    needed = sum(t.nbytes for t in ready.values()) + 4096
    with atomic_file(path, needed) as partial:
        try:
            save_file(ready, str(partial), metadata=dict(metadata or {}))
        except (SafetensorError, TypeError, ValueError) as error:
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from error
            raise GulliverError(f"{path} cannot be written: {error}") from error


def _plain(name: str, tensor: Tensor) -> Tensor:
    """The values of a tensor as contiguous bytes in host memory."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in _DTYPES:
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise GulliverError(f"tensor {name!r} is {kind}: the safetensors format cannot hold it")
    # Views that are conjugated or negated only by a flag would be written without it.
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of a safetensors file.

    Raises:
        GulliverError: the file is missing, truncated, or no safetensors file.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_metadata(path: Path) -> dict[str, str]:
    """The text that was written beside the tensors of a safetensors file."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise GulliverError(f"{path} does not exist")
    try:
        with named_errors(path, "read"):
            return safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise GulliverError(
            f"{path} is truncated or no safetensors file ({error}): take another checkpoint"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Writes JSON for people to read, whole or not at all."""
    write_text(Path(path), json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Reads JSON.

    Raises:
        GulliverError: the file is missing or broken.
    """
    path = Path(path)
    if not path.is_file():
        raise GulliverError(f"{path} does not exist")
    try:
        with named_errors(path, "read"):
            return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise GulliverError(f"{path} is truncated or no JSON ({error})") from error


def split_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Takes the tensors out of a nested state.

    Args:
        state: dicts, lists, tuples, tensors and plain values, nested; keys may be anything plain,
            or tuples of that. Kinds derived from dict, list and tuple come back as these.

    Returns:
        The tensors by their path, and a skeleton of JSON values that says where each belongs.

    Raises:
        GulliverError: a value that is neither a tensor nor plain.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _take(state, "state", tensors)


def _take(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The skeleton of `value`; its tensors are added to `tensors`."""
    if isinstance(value, Tensor):
        # Keys with dots in them, and 1 beside "1", can give two tensors the same path.
        name = path if path not in tensors else f"{path}~{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {
            "dict": [[_key(k, path), _take(v, f"{path}.{k}", tensors)] for k, v in value.items()]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_take(item, f"{path}.{n}", tensors) for n, item in enumerate(value)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise GulliverError(f"{path} is a {type(value).__name__}: it cannot be saved")


def _key(key: Any, path: str) -> Any:
    if isinstance(key, Tensor):
        raise GulliverError(f"a key of {path} is a tensor: it cannot be saved")
    return _take(key, f"a key of {path}", {})


def join_state(tensors: Mapping[str, Tensor], skeleton: Any) -> Any:
    """The inverse of `split_state`.

    Raises:
        GulliverError: a tensor is missing, or the skeleton is none.
    """
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
        return getattr(torch, content)
    if kind == "float":
        return float(content)
    raise GulliverError(f"{kind!r} is no part of a saved state: it was written by something else")


def _only_item(skeleton: dict[str, Any]) -> tuple[str, Any]:
    if len(skeleton) != 1:
        raise GulliverError(f"{sorted(skeleton)} is no part of a saved state: it is another file")
    return next(iter(skeleton.items()))
