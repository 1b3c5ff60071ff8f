"""Single files: tensors as safetensors, all else as JSON, no pickle anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io import atomic_file, named_errors, require_space, write_text


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes named tensors to a safetensors file, whole or not at all.

    Tied and non-contiguous tensors are written each by its own values.

    Raises:
        GulliverError: no space, or the place cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    ready: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        # safetensors refuses shared storage and writes the whole of a larger one.
        if storage.data_ptr() in seen or storage.nbytes() != value.nbytes:
            value = value.clone()
        seen.add(storage.data_ptr())
        ready[name] = value
    path = Path(path)
    require_space(path.parent, sum(t.nbytes for t in ready.values()) + 4096)
    with atomic_file(path) as partial:
        try:
            save_file(ready, str(partial), metadata=dict(metadata or {}))
        except SafetensorError as error:
            reason = "no space left for" if "No space" in str(error) else "cannot write"
            raise GulliverError(f"{reason} {path}: {error}") from error


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
    with named_errors(path):
        text = path.read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise GulliverError(f"{path} is truncated or no JSON ({error})") from error


def split_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Takes the tensors out of a nested state.

    Args:
        state: dicts, lists, tuples, tensors and plain values, nested; keys may be numbers.

    Returns:
        The tensors by their path, and a skeleton of JSON values that says where each belongs.

    Raises:
        GulliverError: a value that is neither a tensor nor plain.
    """
    tensors: dict[str, Tensor] = {}

    def take(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            tensors[path] = value
            return {"tensor": path}
        if isinstance(value, Mapping):
            items = [[key, take(item, f"{path}.{key}")] for key, item in value.items()]
            return {"dict": items}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [take(item, f"{path}.{n}") for n, item in enumerate(value)]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise GulliverError(f"{path or 'state'} is a {type(value).__name__}: it cannot be saved")

    return tensors, take(state, "state")


def join_state(tensors: Mapping[str, Tensor], skeleton: Any) -> Any:
    """The inverse of `split_state`."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, content),) = skeleton.items()
    if kind == "tensor":
        if content not in tensors:
            raise GulliverError(f"tensor {content!r} is missing from the checkpoint")
        return tensors[content]
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "dict":
        return {key: join_state(tensors, item) for key, item in content}
    items = [join_state(tensors, item) for item in content]
    return items if kind == "list" else tuple(items)
