"""Parser of JSON that refuses keys that are there twice, as Python's does not."""

from __future__ import annotations

import errno
import json
import logging
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


def parse_json(path: Path, content: bytes, kind: str = "JSON") -> Any:
    """Parses the content of a JSON file."""
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise GulliverError(f"{path} is truncated or no {kind} ({error})") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


# Plan of a safetensors file: its header, and the memory that each of its bytes comes from.
#
# The file is cut into pages of equal size, each gathered from the tensors that lie in it, so that
# every write but the last is aligned whatever the sizes of the tensors are.
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
"""Dtypes that the format can hold, and its names for them."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
RESERVED = "__metadata__"
"""Name that no tensor can have: headers keep it for text."""
MAX_HEADER = 100_000_000
"""Bytes of the largest header; readers refuse more."""


@dataclass(frozen=True)
class Slot:
    """Position of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def shape_from_json(value: Any) -> tuple[int, ...]:
    """Parses a shape."""
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} is no shape")
    return tuple(value)


def is_holdable(tensor: Tensor) -> bool:
    """Whether the format can hold a tensor."""
    plain = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta
    return plain and tensor.dtype in CODES and has_memory(tensor)


def has_memory(tensor: Tensor) -> bool:
    """Whether the elements of a strided tensor lie in memory of its own: not those of wrappers."""
    try:
        return not tensor.numel() or bool(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):
        return False


def check_holdable(where: str, tensor: Tensor) -> None:
    """Refuses a tensor that the format cannot hold."""
    if not is_holdable(tensor):
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        if not tensor.is_meta and tensor.layout == torch.strided and tensor.dtype in CODES:
            kind = f"a {type(tensor).__name__} without memory of its own, save the tensors in it"
        if tensor.is_nested:
            kind = "a nested tensor, save its values() and offsets()"
        raise GulliverError(f"{where} is {kind}: the safetensors format cannot hold it")


class Image:
    """File to be written: a header, and tensors one behind the other."""

    def __init__(
        self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
    ) -> None:
        for name, tensor in tensors.items():
            # A file may be planned of tensors on meta, which have no values yet.
            if tensor.dtype not in CODES:
                raise GulliverError(
                    f"tensor {name!r} is {tensor.dtype}: the safetensors format cannot hold it"
                )
        # The largest elements first: then each is aligned to its own size.
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
                f"{len(tensors)} tensors need a header of {len(text)} bytes, the safetensors "
                f"format allows {MAX_HEADER}: save them in several entries"
            )
        # Kept by this object: pages are gathered from its memory, too.
        self.header = torch.frombuffer(
            bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8
        )
        self.sources: list[Tensor] = [self.header, *(tensors[name] for name in order)]
        self.names: list[str | None] = [None, *order]
        self.nbytes = self.header.nbytes + end

    def pages(self, page_bytes: int) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
        """Cuts the file into pages."""
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
    """Finds the tensors in a safetensors file, and the text next to them; reads the header only."""
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(MAX_HEADER, size - 8):
                raise GulliverError(f"{path} is truncated or no safetensors file")
            content = file.read(length)
    except FileNotFoundError:
        raise GulliverError(f"{path} does not exist") from None
    except OSError as error:
        raise GulliverError(f"{path} cannot be read: {error.strerror}") from error
    entries = parse_json(path, content, "safetensors file")
    try:
        metadata = entries.pop(RESERVED, {})
        slots = {
            name: _slot(path, name, entry, 8 + length, size) for name, entry in entries.items()
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, GulliverError):
            raise
        raise GulliverError(f"{path} has a broken header ({error!r})") from error
    _check_filled(path, slots, 8 + length, size)
    return slots, metadata


def _check_filled(path: Path, slots: Mapping[str, Slot], base: int, size: int) -> None:
    """Refuses a file whose tensors do not lie one behind the other, from its header to its end."""
    end, last = base, "the header"
    for slot in sorted(slots.values(), key=lambda slot: (slot.offset, slot.nbytes)):
        if slot.offset != end:
            what = "overlaps" if slot.offset < end else "leaves a gap after"
            raise GulliverError(f"{path} has a broken header: tensor {slot.name!r} {what} {last}")
        end, last = end + slot.nbytes, f"tensor {slot.name!r}"
    if end < size:
        raise GulliverError(f"{path} has a broken header: {size - end} bytes follow {last}")


def _slot(path: Path, name: str, entry: Mapping[str, Any], base: int, size: int) -> Slot:
    code, (begin, end) = entry["dtype"], entry["data_offsets"]
    if code not in DTYPES:
        raise GulliverError(f"tensor {name!r} in {path} is of dtype {code}, which is not known")
    slot = Slot(name, DTYPES[code], shape_from_json(entry["shape"]), base + begin)
    if type(begin) is not int or slot.nbytes != end - begin or begin < 0:
        raise GulliverError(f"{path} has a broken header: tensor {name!r} does not fit its place")
    if base + end > size:
        raise GulliverError(
            f"{path} is truncated: tensor {name!r} ends at byte {base + end}, the file at {size}"
        )
    return slot


# Reads a slice of each tensor of a file that was written, and compares it with what was meant.
#
# The file is read by the safetensors package, which shares no code with what wrote it.


SLICE = 1024
"""Elements at the beginning of each tensor that are compared."""

_log = logging.getLogger("gulliver.export")


class ReadBack:
    """Slices of the tensors of a file, as they were before they were converted and written."""

    def __init__(self) -> None:
        self._meant: dict[str, Tensor] = {}

    def note(self, name: str, values: Tensor) -> None:
        """Keeps the first elements of a tensor; of several runs those of the first count."""
        if name not in self._meant:
            self._meant[name] = values.reshape(-1)[:SLICE].clone()

    def check(self, path: Path, called: str = "") -> None:
        """Compares the file with what was meant, and logs the largest difference."""
        from safetensors import safe_open

        most, which = 0.0, ""
        with safe_open(str(path), framework="pt") as file:
            for name, meant in self._meant.items():
                found = _beginning(file.get_slice(name), len(meant))
                wanted = meant.to(found.dtype)
                if not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
                    raise GulliverError(
                        f"{called or path}: tensor {name!r} reads back as other values than were "
                        "written: check the disk, and write it again"
                    )
                if found.dtype != meant.dtype and len(meant):
                    apart = (found.double() - meant.double()).abs()
                    if (largest := float(apart.nan_to_num(0.0).max())) > most:
                        most, which = largest, f" ({name})"
        count = len(self._meant)
        _log.info(
            "%s: read back %d tensors, largest difference %.3g%s",
            called or path,
            count,
            most,
            which,
        )


def _beginning(stored: Any, count: int) -> Tensor:
    """Returns the first elements of a tensor in a file, in their order."""
    shape = stored.get_shape()
    if not shape or not count:
        return stored[...].reshape(-1)[:count]
    places = list[slice]()
    for dim in range(len(shape)):
        below = math.prod(shape[dim + 1 :])
        places.append(slice(0, min(shape[dim], -(-count // below))))
    return stored[tuple(places)].reshape(-1)[:count]


# Single files: tensors as safetensors, all else as JSON, no pickle anywhere.


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
