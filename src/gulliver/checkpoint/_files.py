"""Single files: tensors as safetensors, all else as JSON, no pickle anywhere."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gulliver.checkpoint._image import check_holdable
from gulliver.checkpoint._json import parse_json
from gulliver.checkpoint._readback import ReadBack
from gulliver.errors import GulliverError
from gulliver.io import atomic_file, named_errors, write_text


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes named tensors to a safetensors file, whole or not at all."""
    # Tied and non-contiguous tensors are written each by its own values.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    ready: dict[str, Tensor] = {}
    back = ReadBack()
    for name, tensor in tensors.items():
        value = _plain(name, tensor)
        storage = value.untyped_storage()
        # safetensors refuses shared storage and writes the whole of a larger one.
        if storage.data_ptr() in seen or storage.nbytes() != value.nbytes:
            value = value.clone()
        seen.add(storage.data_ptr())
        ready[name] = value
        back.note(name, value)
    path = Path(path)
    needed = sum(t.nbytes for t in ready.values()) + 4096
    with atomic_file(path, needed) as partial:
        # safetensors makes files that nobody else may read: the umask says who may.
        partial.touch()
        mode = partial.stat().st_mode & 0o777
        try:
            save_file(ready, str(partial), metadata=dict(metadata or {}))
        except (SafetensorError, TypeError, ValueError) as error:
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from error
            raise GulliverError(f"{path} cannot be written: {error}") from error
        partial.chmod(mode)
        back.check(partial, str(path))


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Returns the values of a tensor, contiguous in host memory."""
    check_holdable(f"tensor {name!r}", tensor)
    # Views that are conjugated or negated only by a flag would be written without it.
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of a safetensors file."""
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_metadata(path: Path) -> dict[str, str]:
    """Reads the text stored next to the tensors of a safetensors file."""
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


def write_json(path: Path, value: Any, indent: int | None = 1, durable: bool = True) -> None:
    """Writes JSON, whole or not at all; with `indent=None` ten times as fast, for machines."""
    write_text(Path(path), json.dumps(value, indent=indent) + "\n", durable)


def read_json(path: Path) -> Any:
    """Reads JSON."""
    return parse_json(path, read_bytes(path))


def read_bytes(path: Path) -> bytes:
    """Reads a small file."""
    path = Path(path)
    if not path.is_file():
        raise GulliverError(f"{path} does not exist")
    with named_errors(path, "read"):
        return path.read_bytes()
