"""Manifest of a step: files with sizes and checksums, and the location of all tensor parts.

manifest.json      files, checksums, and positions of tensor parts
state.json         non-tensor values, with references to the tensors
ENTRY.safetensors  the tensors of an entry; with several ranks, one file each:
                   ENTRY-00002-of-00004.safetensors

A part of a tensor is stored under the tensor's name, flattened. The manifest has its position:
``[file, start, stop]`` counts elements of the full tensor, ``[file, start, stop, [dim, [[a, b],
...]]]`` elements of a region.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from gulliver.checkpoint.files import CODES, DTYPES, parse_json, read_bytes, shape_from_json
from gulliver.checkpoint.regions import PartOffset, missing, region_from_json, region_to_json
from gulliver.errors import GulliverError
from gulliver.io.files import write_text
from gulliver.memory.parts import Part, Region, whole_shape

FORMAT = 3
MANIFEST, STATE = "manifest.json", "state.json"
SEAL = ',\n "crc32": '
"""Text between a manifest's content and its checksum."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a step."""

    # Size of the file, in bytes.
    nbytes: int
    # Bytes of each page that has a checksum; the last may be shorter.
    page_bytes: int
    # Checksum of each page, as `zlib.crc32` computes it.
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class PartEntry:
    """Elements `start` to `stop` of a tensor, or of a region of it, in a file."""

    file: str
    start: int
    stop: int
    region: Region | None = None

    def place(self, shape: tuple[int, ...]) -> PartOffset:
        return PartOffset(shape, self.start, self.stop, self.region)

    def to_json(self) -> list[Any]:
        region = [] if self.region is None else [region_to_json(self.region)]
        return [self.file, self.start, self.stop, *region]


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a step."""

    # Stored dtype.
    dtype: torch.dtype
    # Shape of the full tensor.
    shape: tuple[int, ...]
    # Parts that make up the tensor; see the note in `regions.py`. Equal ones are listed once.
    parts: tuple[PartEntry, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """All files and tensors of a step."""

    # Number of the step.
    step: int
    # Number of ranks that saved it.
    world_size: int
    # Versions, time, and additional values from the user (the plan).
    about: Mapping[str, Any]
    # Files by name.
    files: Mapping[str, FileEntry]
    # Tensors by entry and name.
    tensors: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict)
    # Position in saving order; see the note in `folder.py`.
    order: int = 0

    @property
    def nbytes(self) -> int:
        """Total bytes of all files except the manifest."""
        return sum(entry.nbytes for entry in self.files.values())


def file_to_json(entry: FileEntry) -> dict[str, Any]:
    return {
        "bytes": entry.nbytes,
        "page_bytes": entry.page_bytes,
        "crc32": [f"{crc:08x}" for crc in entry.crc32],
    }


def part_to_json(file: str, leaf: Tensor | Part) -> dict[str, Any]:
    if isinstance(leaf, Part):
        place = PartEntry(file, leaf.start, leaf.stop, leaf.region)
        dtype = leaf.value.dtype
    else:
        place, dtype = PartEntry(file, 0, leaf.numel()), leaf.dtype
    return {"dtype": CODES[dtype], "shape": list(leaf.shape), "parts": [place.to_json()]}


def file_from_json(value: Mapping[str, Any]) -> FileEntry:
    checksums = tuple(int(crc, 16) for crc in value["crc32"])
    entry = FileEntry(int(value["bytes"]), int(value["page_bytes"]), checksums)
    if entry.page_bytes < 1 or -(-entry.nbytes // entry.page_bytes) > len(checksums):
        raise ValueError("a file lacks checksums")
    return entry


def _name_from_json(name: str) -> str:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not a valid file name")
    return name


def checked_about(about: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        found = dict(about or {})
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GulliverError(f"about must be a dict of JSON values: {error}") from None
    return found


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes a step's manifest, ending with the checksum of its text."""
    # Without indentation, which json writes in Python, ten times as slowly and under the GIL.
    text = json.dumps(content).removesuffix("}")
    write_text(Path(folder) / MANIFEST, f'{text}{SEAL}"{zlib.crc32(text.encode()):08x}"\n}}\n')


def read_manifest(folder: Path) -> Manifest:
    path = Path(folder) / MANIFEST
    raw = read_bytes(path)
    text, _, _ = raw.rpartition(SEAL.encode())
    content = parse_json(path, raw)
    written = content.get("format") if isinstance(content, dict) else None
    if not isinstance(written, int):
        raise GulliverError(f"{path} is not the manifest of a checkpoint")
    sealed = content.get("crc32")
    is_intact = sealed == f"{zlib.crc32(text):08x}"
    # A flipped bit may change the format number: only manifests that are intact, or have no
    # checksum at all, can be trusted about it.
    if written != FORMAT and (is_intact or sealed is None):
        other, remedy = "another version", "load it with the version that wrote it"
        if written > FORMAT:
            other, remedy = "a newer version", "update gulliver"
        raise GulliverError(
            f"{folder} was written by {other} (format {written}, this one reads format {FORMAT}): "
            f"{remedy}"
        )
    if not is_intact:
        raise GulliverError(f"{path} is corrupted: use another checkpoint")
    try:
        return Manifest(
            step=int(content["step"]),
            world_size=int(content["world_size"]),
            about=dict(content["about"]),
            files={
                _name_from_json(name): file_from_json(entry)
                for name, entry in content["files"].items()
            },
            tensors={
                entry: {name: tensor_from_json(value) for name, value in tensors.items()}
                for entry, tensors in content["tensors"].items()
            },
            order=int(content["order"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise GulliverError(f"{path} is broken ({error!r}): use another checkpoint") from error


def order_of(content: Any) -> int:
    try:
        return int(content["order"])
    except (KeyError, TypeError, ValueError) as error:
        raise GulliverError(f"{content!r:.40} is not the manifest of a checkpoint") from error


def tensor_from_json(value: Mapping[str, Any]) -> TensorEntry:
    shape = shape_from_json(value["shape"])
    found, regions = list[PartEntry](), set[PartEntry]()
    for file, start, stop, *rest in value["parts"]:
        region = region_from_json(shape, rest[0]) if rest else None
        part = PartEntry(file, int(start), int(stop), region)
        # Of regions that several ranks hold, one is read; nothing else may occur twice.
        mark = replace(part, file="")
        if region is None or mark not in regions:
            found.append(part)
        regions.add(mark)
    parts = tuple(sorted(found, key=lambda part: part.start))
    problem = missing(shape, [part.place(shape) for part in parts])
    if problem is not None:
        raise ValueError(problem)
    return TensorEntry(DTYPES[value["dtype"]], shape, parts)


def is_complete(folder: Path) -> bool:
    """Whether all files of a step exist with the right size; contents are not checked."""
    try:
        found = (folder / MANIFEST).stat()
        listed = _sizes(folder, found.st_ino, found.st_mtime_ns, found.st_size)
        return all((folder / name).stat().st_size == nbytes for name, nbytes in listed.items())
    except GulliverError as error:
        if "newer version" in str(error):
            raise
        return False
    except OSError:
        return False  # also if it is being removed at this moment


@functools.lru_cache(maxsize=4096)
def _sizes(folder: Path, inode: int, mtime_ns: int, nbytes: int) -> dict[str, int]:
    """Reads the sizes of a step's files from its manifest; cached until that changes."""
    return {name: entry.nbytes for name, entry in read_manifest(folder).files.items()}


# Compares saved and requested state: names, shapes, and parts of tensors.
#
# Read `match`. All loading uses it before anything is changed: steps, Hugging Face folders, raw
# tensors, and the comparison of two checkpoints. `Mismatch.refuse` defines what `strict` means, and
# `merge_parts` checks that the parts of all ranks form complete tensors. `reader.py` checks whether
# values fit a dtype. Nothing here reads a file.


SHOWN = 4


class Shaped(Protocol):
    """Anything with the shape of a full tensor: a tensor, a part, a manifest entry."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass
class Mismatch:
    """Names and shapes that did not match."""

    # Names that are requested but not saved.
    missing: list[str] = field(default_factory=list)
    # Names that are saved but not requested.
    unexpected: list[str] = field(default_factory=list)
    # Saved and requested shapes by name, if they differ.
    unlike: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.unlike)

    def __str__(self) -> str:
        said = [listed("missing from it", self.missing), listed("left over", self.unexpected)]
        for name, (theirs, ours) in list(self.unlike.items())[:1]:
            said.append(
                f"{len(self.unlike)} of other shapes ({name} is {theirs} there, {ours} here)"
            )
        return "; ".join(text for text in said if text)

    def refuse(self, where: str, wanted: int, strict: bool = True) -> None:
        # Without `strict`, names may be missing or unexpected, but not all missing, and shapes must
        # match.
        if self.unlike or (strict and self) or (wanted and len(self.missing) == wanted):
            raise GulliverError(f"{where} does not match: {self}")


def listed(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"{len(names)} {what} ({shown})" if names else ""


def match(
    saved: Mapping[str, Shaped],
    wanted: Mapping[str, Shaped],
    prefix: str = "",
    elsewhere: Collection[str] = (),
) -> Mismatch:
    found = Mismatch()
    for name, leaf in sorted(wanted.items()):
        there, ours = saved.get(prefix + name), _shape(leaf)
        if there is None:
            found.missing.append(name)
        elif tuple(there.shape) != ours:
            found.unlike[name] = (tuple(there.shape), ours)
    if not prefix:
        found.unexpected = sorted(saved.keys() - wanted.keys() - set(elsewhere))
    return found


def _shape(leaf: Shaped) -> tuple[int, ...]:
    return whole_shape(leaf) if isinstance(leaf, Tensor) else tuple(leaf.shape)


def merge_parts(
    every: Iterable[Mapping[str, Mapping[str, Any]]], where: str = ""
) -> dict[str, dict[str, Any]]:
    """Merges the parts of all ranks, and checks that they form complete tensors."""
    merged: dict[str, dict[str, Any]] = {}
    for tensors in every:
        for name, found in tensors.items():
            known = merged.setdefault(name, {**found, "parts": []})
            if (known["dtype"], known["shape"]) != (found["dtype"], found["shape"]):
                raise GulliverError(
                    f"{where}{name} has different shapes or dtypes on different ranks"
                )
            known["parts"] = known["parts"] + found["parts"]
    for name, found in merged.items():
        if found["dtype"] not in DTYPES:
            raise GulliverError(
                f"{where}{name} is {found['dtype']}, which safetensors does not support"
            )
        if [part[1:] for part in found["parts"]] == [[0, math.prod(found["shape"])]]:
            continue  # one part holds all of it
        try:
            tensor_from_json(found)
        except ValueError as error:
            raise GulliverError(
                f"{where}{name} {error}; all ranks must save the same state"
            ) from error
    return merged
