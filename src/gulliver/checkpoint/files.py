"""Reads and writes safetensors and JSON files."""

from __future__ import annotations

import errno
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io.files import atomic_file, named_errors, write_text


def parse_json(path: Path, content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise GulliverError(f"{path} is truncated or not JSON ({error})") from error


# Plan of a safetensors file: its header, and the source memory of each byte.
#
# The file is split into pages of equal size, each gathered from the tensors in it, so that all
# writes but the last are fully aligned for any tensor sizes.
#
# Format: https://github.com/huggingface/safetensors, read as of version 0.8.


CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
DTYPES = {code: dtype for dtype, code in CODES.items()}
RESERVED = "__metadata__"
MAX_HEADER = 100_000_000
"""Maximum header size in bytes; readers reject larger ones."""


@dataclass(frozen=True)
class Slot:
    """Position of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def shape_from_json(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} is not a shape")
    return tuple(value)


def is_holdable(tensor: Tensor) -> bool:
    plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta
    return plain and tensor.dtype in CODES and has_memory(tensor)


def has_memory(tensor: Tensor) -> bool:
    """Whether a strided tensor has its own storage, unlike a wrapper tensor."""
    try:
        return not tensor.numel() or bool(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return False


def check_holdable(where: str, tensor: Tensor) -> None:
    if not is_holdable(tensor):
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        if not tensor.is_meta and tensor.layout == torch.strided and tensor.dtype in CODES:
            kind = f"a {type(tensor).__name__} without storage (save the tensors that it wraps)"
        if tensor.is_nested:
            kind = "a nested tensor (save its values() and offsets())"
        raise GulliverError(f"{where} is {kind}, which the safetensors format does not support")


class Image:
    """Layout of a file to be written: a header followed by tensors."""

    def __init__(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        for name, tensor in tensors.items():
            # Tensors may be on meta when a file is planned.
            if tensor.dtype not in CODES:
                raise GulliverError(
                    f"tensor {name!r} is {tensor.dtype}, which the safetensors format does not "
                    "support"
                )
        # Largest elements first, so that each tensor is aligned to its element size.
        order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        entries: dict[str, Any] = {RESERVED: dict(metadata)} if metadata else {}
        end = 0
        for name in order:
            begin, end = end, end + tensors[name].nbytes
            entries[name] = {
                "dtype": CODES[tensors[name].dtype],
                "shape": list(tensors[name].shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER:
            raise GulliverError(
                f"{len(tensors)} tensors need a header of {len(text)} bytes, but the safetensors "
                f"format allows {MAX_HEADER}: save them in several entries"
            )
        # Kept alive by this object, because pages are also gathered from its memory.
        self.header = torch.frombuffer(
            bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8
        )
        self.sources: list[Tensor] = [self.header, *(tensors[name] for name in order)]
        self.names: list[str | None] = [None, *order]
        self.nbytes = self.header.nbytes + end

    def pages(self, page_bytes: int) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        runs: list[tuple[int, int, int]] = []
        offset = filled = 0
        for number, source in enumerate(self.sources):
            done, size = 0, source.nbytes
            while done < size:
                count = min(size - done, page_bytes - filled)
                runs.append((number, done, count))
                done, filled = done + count, filled + count
                if filled == page_bytes:
                    yield offset, runs
                    runs, offset, filled = [], offset + page_bytes, 0
        if runs:
            yield offset, runs


def read_slots(path: Path) -> tuple[dict[str, Slot], dict[str, str]]:
    # Opening the file validates its header: tensors are consecutive up to the end of the file.
    metadata = read_metadata(path)
    with named_errors(path, "read"), path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entries = json.loads(file.read(length))
    entries.pop(RESERVED, None)
    slots = dict[str, Slot]()
    for name, entry in entries.items():
        if entry["dtype"] not in DTYPES:
            raise GulliverError(f"tensor {name!r} in {path} has unknown dtype {entry['dtype']}")
        offset = 8 + length + entry["data_offsets"][0]
        slots[name] = Slot(name, DTYPES[entry["dtype"]], tuple(entry["shape"]), offset)
    return slots, metadata


# Single files: tensors as safetensors, everything else as JSON, no pickle.


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes named tensors to a safetensors file atomically."""
    # Tied and non-contiguous tensors are each written with their own values.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    seen: set[int] = set()
    ready: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = _plain(name, tensor)
        storage = value.untyped_storage()
        # safetensors rejects shared storage, and writes all of a larger storage.
        if storage.data_ptr() in seen or storage.nbytes() != value.nbytes:
            value = value.clone()
        seen.add(storage.data_ptr())
        ready[name] = value
    path = Path(path)
    needed = sum(t.nbytes for t in ready.values()) + 4096
    with atomic_file(path, needed) as partial:
        # safetensors creates files that only the owner may read; use the umask instead.
        partial.touch()
        mode = partial.stat().st_mode & 0o777
        try:
            save_file(ready, str(partial), metadata=dict(metadata or {}))
        except (SafetensorError, TypeError, ValueError) as error:
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from error
            raise GulliverError(f"{path} cannot be written: {error}") from error
        partial.chmod(mode)


def _plain(name: str, tensor: Tensor) -> Tensor:
    check_holdable(f"tensor {name!r}", tensor)
    # Lazily conjugated or negated views would be written without the operation.
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def read_tensors(path: Path) -> dict[str, Tensor]:
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_metadata(path: Path) -> dict[str, str]:
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
            f"{path} is truncated or not a safetensors file ({error}): use another checkpoint"
        ) from error


def write_json(path: Path, value: Any, indent: int | None = 1, durable: bool = True) -> None:
    """Writes JSON atomically; ``indent=None`` is ten times as fast."""
    write_text(Path(path), json.dumps(value, indent=indent) + "\n", durable)


def read_json(path: Path) -> Any:
    return parse_json(path, read_bytes(path))


def read_bytes(path: Path) -> bytes:
    path = Path(path)
    if not path.is_file():
        raise GulliverError(f"{path} does not exist")
    with named_errors(path, "read"):
        return path.read_bytes()
