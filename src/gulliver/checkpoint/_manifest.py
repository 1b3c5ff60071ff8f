"""What a step consists of: its files with sizes and checksums, and where every tensor's parts lie.

manifest.json      all that is said here
state.json         what is no tensor, and where the tensors belong in it
ENTRY.safetensors  the tensors of an entry; with several ranks a file of each,
                   ENTRY-00002-of-00004.safetensors

A tensor of which a file holds a part lies there under its own name, as one row of elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gulliver.checkpoint._files import read_json
from gulliver.checkpoint._image import CODES, DTYPES
from gulliver.errors import GulliverError

FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"


@dataclass(frozen=True)
class FileEntry:
    """A file of a step.

    Attributes:
        nbytes: its size.
        page_bytes: of the pages that the checksums are of.
        crc32: of each page, as of `zlib.crc32`.
    """

    nbytes: int
    page_bytes: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class PartEntry:
    """Elements `start` to `stop` of a tensor, in a file."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a step.

    Attributes:
        parts: by their start; together they are the whole.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[PartEntry, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """All files and tensors of a step.

    Attributes:
        step: its number.
        world_size: ranks that wrote it.
        about: versions, time, and what the writer wanted to say (the plan).
        files: by name.
        tensors: by entry and name.
    """

    step: int
    world_size: int
    about: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of all files together."""
        return sum(entry.nbytes for entry in self.files.values())

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "format": FORMAT,
            "step": self.step,
            "world_size": self.world_size,
            "about": dict(self.about),
            "files": {name: file_to_json(entry) for name, entry in self.files.items()},
            "tensors": {
                entry: {
                    name: {
                        "dtype": CODES[tensor.dtype],
                        "shape": list(tensor.shape),
                        "parts": [[part.file, part.start, part.stop] for part in tensor.parts],
                    }
                    for name, tensor in tensors.items()
                }
                for entry, tensors in self.tensors.items()
            },
        }


def file_to_json(entry: FileEntry) -> dict[str, Any]:
    """A file's entry as it is written."""
    return {
        "bytes": entry.nbytes,
        "page_bytes": entry.page_bytes,
        "crc32": [f"{crc:08x}" for crc in entry.crc32],
    }


def file_from_json(value: Mapping[str, Any]) -> FileEntry:
    """The inverse of `file_to_json`."""
    checksums = tuple(int(crc, 16) for crc in value["crc32"])
    return FileEntry(int(value["bytes"]), int(value["page_bytes"]), checksums)


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks the manifest of a step.

    Raises:
        GulliverError: missing, broken, or of another format.
    """
    path = Path(folder) / MANIFEST
    content = read_json(path)
    written = content.get("format") if isinstance(content, dict) else None
    if not isinstance(written, int):
        raise GulliverError(f"{path} is no manifest of a checkpoint")
    if written > FORMAT:
        raise GulliverError(
            f"{folder} was written by a newer version (format {written}, this one reads format "
            f"{FORMAT}): update gulliver"
        )
    if written < FORMAT:
        raise GulliverError(
            f"{folder} was written by an older version (format {written}, this one reads format "
            f"{FORMAT}): load it with the version that wrote it"
        )
    try:
        return Manifest(
            step=int(content["step"]),
            world_size=int(content["world_size"]),
            about=dict(content["about"]),
            files={name: file_from_json(entry) for name, entry in content["files"].items()},
            tensors={
                entry: {name: _tensor(value) for name, value in tensors.items()}
                for entry, tensors in content["tensors"].items()
            },
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GulliverError(f"{path} is broken ({error!r}): take another checkpoint") from error


def _tensor(value: Mapping[str, Any]) -> TensorEntry:
    parts = tuple(PartEntry(file, int(start), int(stop)) for file, start, stop in value["parts"])
    tensor = TensorEntry(DTYPES[value["dtype"]], tuple(value["shape"]), parts)
    edges = [0, *(edge for part in parts for edge in (part.start, part.stop)), tensor.numel]
    if any(first != second for first, second in zip(edges[::2], edges[1::2], strict=True)):
        raise ValueError(f"parts {value['parts']} are not the whole of a tensor {tensor.shape}")
    return tensor


def is_complete(folder: Path) -> bool:
    """Whether all files of a step are there in their sizes; what they hold is not looked at.

    Raises:
        GulliverError: it was written by a newer version.
    """
    try:
        manifest = read_manifest(folder)
    except GulliverError as error:
        if "newer version" in str(error):
            raise
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == entry.nbytes
        for name, entry in manifest.files.items()
    )
