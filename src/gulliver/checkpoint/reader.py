"""Reads and verifies saved steps, and checks that values fit the dtype they are loaded into.

Floating-point values may be rounded, but finite ones must stay finite. All other values must stay
equal.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gulliver.checkpoint.collect import own_entry
from gulliver.checkpoint.files import MAX_HEADER, Slot, parse_json, read_slots
from gulliver.checkpoint.manifest import (
    STATE,
    FileEntry,
    Manifest,
    PartEntry,
    TensorEntry,
    match,
    read_manifest,
)
from gulliver.checkpoint.regions import Copies, copy_bytes, overlap, place_of
from gulliver.checkpoint.tree import Leaf, join_state, names_in, values_of
from gulliver.errors import GulliverError
from gulliver.io.engine import BLOCK, Engine, IoError, Page, Ticket
from gulliver.io.files import FileMappings, named_errors
from gulliver.io.native import default_engine
from gulliver.memory.parts import Part

QUICK = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes whose extremes torch can compute."""


def always_fits(saved: torch.dtype, target: torch.dtype) -> bool:
    """Whether a dtype can represent every value of another, so that values need no check."""
    if saved == target:
        return True
    kinds = _kind(saved), _kind(target)
    if kinds == ("integer", "integer"):
        low, high = _range(saved)
        return low >= _range(target)[0] and high <= _range(target)[1]
    if kinds[0] == "integer":
        return saved == torch.bool
    if kinds[1] == "integer" or kinds == ("complex", "float"):
        return False
    return torch.finfo(saved).max <= torch.finfo(target).max


def first_unrepresentable(values: Tensor, target: torch.dtype) -> str | None:
    """Describes the first value that does not fit a dtype; None if all fit."""
    values = values.reshape(-1)
    if always_fits(values.dtype, target) or not values.numel():
        return None
    if values.dtype in QUICK and _kind(target) == "float":
        # One pass without a copy. Infinities and nans take the slower path.
        ends = torch.stack(torch.aminmax(values))
        if bool(ends.isfinite().all()) and not bool(_not_finite(ends, target).any()):
            return None
    bad = _unrepresentable(values, target)
    if not bool(bad.any()):
        return None
    value = values[int(bad.nonzero()[0])]
    return f"{value.item()} does not fit {str(target).removeprefix('torch.')}"


def fitted(where: str, name: str, values: Tensor, target: torch.dtype) -> Tensor:
    check_representable(where, name, values, target)
    return values.to(target)


def check_representable(where: str, name: str, values: Tensor, target: torch.dtype) -> None:
    problem = first_unrepresentable(values, target)
    if problem is not None:
        raise GulliverError(
            f"{where}: tensor {name!r} is {str(values.dtype).removeprefix('torch.')} in the "
            f"checkpoint: {problem}"
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "integer"


def _range(dtype: torch.dtype) -> tuple[int, int]:
    if dtype == torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    return int(info.min), int(info.max)


def _unrepresentable(values: Tensor, target: torch.dtype) -> Tensor:
    """Marks values that become infinite, or that change if one of the dtypes is an integer."""
    kinds = _kind(values.dtype), _kind(target)
    if "integer" not in kinds:
        return _not_finite(values, target)
    if kinds[0] == "complex":
        return (values.imag != 0) | _unrepresentable(values.real, target)
    # Python compares integers and floating-point numbers exactly, however large.
    pairs = zip(_numbers(values), _numbers(values.to(target)), strict=True)
    return torch.tensor([before != after for before, after in pairs])


def _numbers(values: Tensor) -> list[Any]:
    return (values.double() if values.is_floating_point() else values).tolist()


def _not_finite(values: Tensor, target: torch.dtype) -> Tensor:
    if values.is_complex():
        if _kind(target) == "float":
            return (values.imag != 0) | _not_finite(values.real, target)
        parts = torch.view_as_real(values)
        return _not_finite(parts, target.to_real()).any(-1)
    target = target.to_real()
    # 8-bit floats do not support isfinite, and some saturate instead of becoming infinite.
    info, was = torch.finfo(target), values.double()
    most = info.max * (1 + info.eps / 2)
    return was.isfinite() & (~values.to(target).double().isfinite() | (was.abs() > most))


# Reads the files of a step and verifies sizes, checksums of pages, and headers.
#
# Read `Verifier.pages`. All reads of a step go through a `Verifier`: a load reads the pages it
# needs, `verify` all of them. Defects are `Problem`s: a load raises the first one as a
# `BrokenFileError`; `Verifier.check` continues and lists all.


AHEAD = 8


@dataclass(frozen=True)
class Problem:
    """A defect found in a step."""

    # Name of the file in the step's folder.
    file: str
    # First byte that may be wrong.
    begin: int
    # One past the last.
    stop: int
    # Names of the tensors in this range, as ``entry: name``; empty for the header and for text.
    tensors: tuple[str, ...]
    # Description of what is wrong.
    what: str

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:4]) + (", ..." if len(self.tensors) > 4 else "")
        several = f"{len(self.tensors)} tensors: " if len(self.tensors) > 1 else ""
        holding = f" ({several}{shown})" if self.tensors else ""
        return f"{self.file}, bytes {self.begin} to {self.stop}: {self.what}{holding}"


class BrokenFileError(GulliverError):
    """A defect after which a reader cannot continue."""

    def __init__(self, text: str, problem: Problem | None = None) -> None:
        super().__init__(text)
        self.problem = problem


class Verifier:
    """Reads a step's files and verifies every page."""

    def __init__(self, folder: Path, manifest: Manifest, engine: Engine | None = None) -> None:
        self.folder, self.manifest = folder, manifest
        self._given, self._engine = engine, engine
        self._slots: dict[str, dict[str, Slot]] = {}
        self.bytes_read = 0

    def check_size(self, name: str) -> FileEntry:
        if name not in self.manifest.files:
            raise GulliverError(f"{self.folder} does not list {name}: its manifest is broken")
        entry, size = self.manifest.files[name], _size(self.folder / name)
        if size == entry.nbytes:
            return entry
        what = f"the file has {size} bytes, not {entry.nbytes}: it is truncated or another file"
        if size is None:
            what = "the file does not exist"
        begin, stop = sorted((size or 0, entry.nbytes))
        raise self._broken(name, begin, stop, what)

    def check_sizes(self) -> None:
        for name in self.manifest.files:
            self.check_size(name)

    def text(self, name: str) -> bytes:
        entry, path = self.check_size(name), self.folder / name
        with named_errors(path, "read"):
            content = path.read_bytes()
        if entry.crc32 != (zlib.crc32(content),):
            raise self._broken(name, 0, entry.nbytes, "they are corrupted")
        return content

    def slot(self, entry: str, name: str, part: PartEntry) -> Slot:
        """Finds a part of a tensor in its file's header."""
        file, dtype = part.file, self.manifest.tensors[entry][name].dtype
        if file not in self._slots:
            self.check_size(file)
            self._slots[file] = self._read_slots(file)
        found, nbytes = self._slots[file].get(name), (part.stop - part.start) * dtype.itemsize
        if found is None or (found.dtype, found.nbytes) != (dtype, nbytes):
            self._check_header_pages(file)
            what, stop = "the header and the manifest disagree", self.manifest.files[file].nbytes
            raise self._error(Problem(file, 0, stop, (f"{entry}: {name}",), what))
        return found

    def _read_slots(self, file: str) -> dict[str, Slot]:
        """Reads a header; if it is invalid, checks its checksum to determine the cause."""
        try:
            return read_slots(self.folder / file)[0]
        except GulliverError:
            self._check_header_pages(file)
            raise

    def _check_header_pages(self, file: str) -> None:
        """Verifies the first page of a header; most headers fit in one page."""
        for _ in self.pages(file, [0]):
            pass

    def pages(self, name: str, numbers: Iterable[int]) -> Iterator[tuple[int, Page]]:
        """Yields pages of a file with read-ahead; a page is valid until the next one."""
        for number, page, error in self._pages(name, numbers):
            if error is not None:
                raise error
            yield number, page

    def _pages(
        self, name: str, numbers: Iterable[int]
    ) -> Iterator[tuple[int, Page, BrokenFileError | None]]:
        entry = self.manifest.files[name]
        engine = self._ready_engine(entry.page_bytes)
        left, reading = deque(numbers), deque[tuple[int, Page, Ticket]]()
        file = engine.open(self.folder / name)
        try:
            while left or reading:
                while left and len(reading) < AHEAD:
                    number, page = left.popleft(), engine.acquire()
                    begin, stop = _span(entry, number)
                    ticket = engine.read(file, begin, page.address, stop - begin, checksum=True)
                    reading.append((number, page, ticket))
                    self.bytes_read += stop - begin
                number, page, ticket = reading.popleft()
                try:
                    what = _failure(ticket)
                    if what is None and ticket.checksum != entry.crc32[number]:
                        what = "they are corrupted"
                    span = _span(entry, number)
                    yield number, page, None if what is None else self._broken(name, *span, what)
                finally:
                    engine.release(page)
        finally:
            for _, page, ticket in reading:
                _failure(ticket)
                engine.release(page)
            engine.close_file(file)

    def check(self, name: str) -> Iterator[int | BrokenFileError]:
        """Reads a full file; yields its page numbers and all problems."""
        entry, size = self.manifest.files[name], _size(self.folder / name)
        last, broken = math.ceil(entry.nbytes / entry.page_bytes), False
        # If the file is truncated, only its complete pages.
        numbers = [n for n in range(last) if size is not None and _span(entry, n)[1] <= size]
        try:
            for number, _, error in self._pages(name, numbers) if numbers else ():
                begin, stop = _span(entry, number)
                yield stop - begin
                if error is not None:
                    broken = True
                    yield error
            self.check_size(name)
            if not broken:
                self._check_header(name)
        except BrokenFileError as error:
            yield error
        except GulliverError as error:
            yield self._error(Problem(name, 0, entry.nbytes, (), str(error)))

    def _check_header(self, file: str) -> None:
        if file.endswith(".safetensors"):
            self._read_slots(file)
        for entry, tensors in self.manifest.tensors.items():
            for name, tensor in tensors.items():
                for part in tensor.parts:
                    if part.file == file:
                        self.slot(entry, name, part)

    def _broken(self, file: str, begin: int, stop: int, what: str) -> BrokenFileError:
        return self._error(Problem(file, begin, stop, self._held(file, begin, stop), what))

    def _error(self, problem: Problem) -> BrokenFileError:
        return BrokenFileError(f"{self.folder / str(problem)}: use another checkpoint", problem)

    def _held(self, file: str, begin: int, stop: int) -> tuple[str, ...]:
        """Names the tensors in a byte range of a file; all tensors if the header is broken."""
        places = _places(self.folder / file)
        return tuple(
            f"{entry}: {name}"
            for entry, tensors in self.manifest.tensors.items()
            for name, tensor in tensors.items()
            if any(part.file == file for part in tensor.parts)
            and (places is None or (name in places and _overlap(places[name], (begin, stop))))
        )

    def _ready_engine(self, page_bytes: int) -> Engine:
        if self._engine is None or self._engine.page_bytes < page_bytes:
            self.close()
            aligned = -(-page_bytes // BLOCK) * BLOCK
            self._engine = default_engine(page_bytes=aligned, pages=AHEAD + 1)
        return self._engine

    def close(self) -> None:
        """Stops the engine's threads, unless the engine was passed in."""
        if self._engine is not None and self._engine is not self._given:
            self._engine.close()
        self._engine = self._given


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _span(entry: FileEntry, number: int) -> tuple[int, int]:
    """First byte of a page, and one past its last."""
    begin = number * entry.page_bytes
    return begin, min(begin + entry.page_bytes, entry.nbytes)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _failure(ticket: Ticket) -> str | None:
    """Waits for a page; returns the reason if it could not be read."""
    try:
        ticket.wait()
    except IoError as error:
        return f"they cannot be read, {os.strerror(error.errno)}"
    except GulliverError as error:
        return str(error)
    return None


def _places(path: Path) -> dict[str, tuple[int, int]] | None:
    """First and last byte of each tensor in a possibly truncated file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(min(length, MAX_HEADER)))
        entries.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
        return {name: (8 + length + a, 8 + length + b) for name, (a, b) in offsets.items()}
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError):
        # A broken header has no usable offsets.
        return None


# Reads a step: only the pages with requested data, all of them verified.
#
# Read `StepReader.read_into`: it finds which pages of which files contain the data, for any layout
# of the ranks that saved them, and lets the engine read a few pages ahead.


LARGE = 2**16
"""Bytes filled before file-backed pages are released."""
SCRATCH = 32 * 2**20
"""Bytes read at a time when checking that values fit a narrower dtype."""


@dataclass
class _Sink:
    """A tensor being filled, and its number of missing bytes."""

    # Tensor to be filled.
    target: Tensor
    # Row to copy to: bytes, or elements of `dtype` if that is set.
    row: Tensor
    # Number of bytes not copied yet.
    left: int
    # Saved dtype if values are converted; None if bytes are copied unchanged.
    dtype: torch.dtype | None = None
    # Row in host memory from which the tensor is filled at the end; None without one.
    staged: Tensor | None = None

    def take(self, content: Tensor, copies: Copies, mapped: FileMappings) -> None:
        """Copies bytes; the last copy completes the tensor and releases its file-backed pages."""
        copy_bytes(self.row, content, copies, self.dtype)
        self.left -= copies.total
        if self.left == 0 and self.staged is not None:
            self.target.copy_(self.staged.view(self.target.shape))
            self.row = self.staged = torch.empty(0)
        if self.left == 0 and self.target.is_cpu and self.target.nbytes >= LARGE:
            mapped.release_pages(self.target.data_ptr(), self.target.nbytes)


@dataclass(frozen=True)
class _FileRun:
    """A byte range of a file, and its destination."""

    begin: int
    stop: int
    sink: _Sink
    copies: Copies


class StepReader:
    """Reads a saved step."""

    def __init__(self, folder: Path | str, engine: Engine | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._files = Verifier(self.folder, self.manifest, engine)
        content = parse_json(self.folder / STATE, self._files.text(STATE))
        self._entries: dict[str, Any] = content["entries"]
        self._ranks: list[dict[str, Any]] = content["ranks"]
        self._kinds: dict[str, Any] = content["kinds"]

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    @property
    def entries(self) -> list[str]:
        return list(self._entries) + [e for e in self._own_entries() if e not in self._entries]

    def _own_entries(self) -> list[str]:
        return sorted({entry for own in self._ranks for entry in own})

    def is_per_rank(self, entry: str) -> bool:
        return entry in self._own_entries()

    def tensors(self, entry: str) -> Mapping[str, TensorEntry]:
        return self.manifest.tensors.get(entry, {})

    def skeleton(self, entry: str) -> Any:
        """Returns an entry's skeleton: its nested values with references to tensors."""
        if entry not in self._entries:
            raise GulliverError(f"{self.folder} has no entry {entry!r}: it has {self.entries}")
        return self._entries[entry]

    def value(self, entry: str, rank: int | None = None) -> Any:
        """Reads an entry as saved, with its tensors in host memory."""
        entry, skeleton = self.place(entry, rank)
        return join_state(self.whole(entry, names_in(skeleton)), skeleton)

    def place(self, entry: str, rank: int | None = None) -> tuple[str, Any]:
        """Returns the name under which an entry's tensors are stored, and its skeleton."""
        if rank is None:
            return entry, self.skeleton(entry)
        if rank >= len(self._ranks) or entry not in self._ranks[rank]:
            raise GulliverError(f"{self.folder} has no entry {entry!r} of rank {rank}")
        return own_entry(entry, rank), self._ranks[rank][entry]

    def kind(self, entry: str) -> Mapping[str, Any]:
        """Returns the class and shapes of an optimizer or scheduler; empty if not recorded."""
        return self._kinds.get(entry, {})

    def whole(self, entry: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads full tensors of an entry into new host memory; skips missing names."""
        saved = self.tensors(entry)
        found = {n: torch.empty(saved[n].shape, dtype=saved[n].dtype) for n in names if n in saved}
        self.read_into(entry, found)
        return found

    def check_tied(self, entry: str, tied: Mapping[str, str], prefix: str = "") -> None:
        saved = self.tensors(entry)
        for name, other in tied.items():
            both = [prefix + name, prefix + other]
            if name == other or not all(n in saved for n in both):
                continue
            one, two = self.whole(entry, both).values()
            bits = [value.reshape(-1).view(torch.uint8) for value in (one, two)]
            if one.shape != two.shape or one.dtype != two.dtype or not torch.equal(*bits):
                raise GulliverError(
                    f"{name!r} and {other!r} are tied in the model but differ in {self.folder}; "
                    "untie them in the model"
                )

    def check_fits(
        self,
        entry: str,
        wanted: Mapping[str, Leaf],
        prefix: str = "",
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Checks that values fit the narrower dtypes they are loaded into; stores nothing."""
        # `read_into` reads the data again, because keeping it until it is checked might take any
        # amount of memory.
        saved = self.tensors(entry)
        batch: dict[str, Part] = {}
        targets = {n: (dtypes or {}).get(n, values_of(leaf).dtype) for n, leaf in wanted.items()}
        for name, leaf in wanted.items():
            place, there = place_of(leaf), saved[prefix + name].dtype
            if always_fits(there, targets[name]):
                continue
            step = SCRATCH // there.itemsize
            for start in range(place.start, place.stop, step):
                scratch = torch.empty(min(step, place.stop - start), dtype=there)
                if sum(p.value.nbytes for p in batch.values()) + scratch.nbytes > SCRATCH:
                    self._check_batch(entry, batch, targets, prefix)
                    batch = {}
                batch[name] = Part(scratch, place.shape, start, region=place.region)
        self._check_batch(entry, batch, targets, prefix)

    def _check_batch(
        self,
        entry: str,
        batch: Mapping[str, Part],
        targets: Mapping[str, torch.dtype],
        prefix: str,
    ) -> None:
        self.read_into(entry, batch, prefix)
        where = f"{self.folder}, entry {entry!r}"
        for name, part in batch.items():
            check_representable(where, prefix + name, part.value, targets[name])

    def read_into(self, entry: str, wanted: Mapping[str, Leaf], prefix: str = "") -> None:
        """Fills tensors and parts in place, converting to their dtype."""
        saved = self.tensors(entry)
        there = {name: saved[prefix + name] for name in wanted if prefix + name in saved}
        # Some callers, such as boosters, pass parts that are not matched yet.
        match(there, wanted).refuse(f"{self.folder}, entry {entry!r},", len(wanted))
        runs: dict[str, list[_FileRun]] = {}
        for name, leaf in wanted.items():
            for file, run in self._runs(entry, prefix + name, leaf):
                runs.setdefault(file, []).append(run)
        mapped = FileMappings()
        with torch.no_grad():
            for file, found in runs.items():
                # File by file, in the order of bytes, so that a page with several tensors is read
                # once.
                self._read_file(file, sorted(found, key=lambda run: run.begin), mapped)

    def _runs(self, entry: str, name: str, leaf: Leaf) -> Iterator[tuple[str, _FileRun]]:
        """Yields file names, and the byte ranges in them that hold elements of a leaf."""
        saved = self.tensors(entry)[name]
        wanted, size = place_of(leaf), saved.dtype.itemsize
        target = values_of(leaf).detach()
        found = [
            (part.file, overlap(part.place(saved.shape), wanted), part) for part in saved.parts
        ]
        runs = [
            (file, copies.scaled(size, self._files.slot(entry, name, part).offset))
            for file, copies, part in found
            if len(copies)
        ]
        sink = self._sink(target, saved.dtype, runs)
        for file, copies in runs:
            begin, stop = int(copies.source[0]), int(copies.source[-1] + copies.count[-1])
            yield file, _FileRun(begin, stop, sink, copies)

    def _sink(self, target: Tensor, dtype: torch.dtype, runs: list[tuple[str, Copies]]) -> _Sink:
        sink = _Sink(target, target, sum(copies.total for _, copies in runs))
        # Many short copies would each be a transfer to the device: host memory takes them first.
        slow = not target.is_cpu and any(len(copies) > 1 for _, copies in runs)
        # Converted page by page, to hold nothing but pages; impossible if pages split elements.
        edges = (
            int(edge) % dtype.itemsize
            for file, copies in runs
            for edge in (self.manifest.files[file].page_bytes, copies.source[0])
        )
        cut = target.dtype != dtype and any(edges)
        if slow or cut or not target.is_contiguous():
            sink.staged = torch.empty(target.numel(), dtype=dtype)
        row = (target if sink.staged is None else sink.staged).reshape(-1)
        if row.dtype == dtype:
            sink.row = row.view(torch.uint8)
        else:
            sink.row, sink.dtype = row, dtype
        return sink

    def _read_file(self, name: str, runs: list[_FileRun], mapped: FileMappings) -> None:
        entry = self._files.check_size(name)
        size = entry.page_bytes
        # The header has the offsets, so its page is always verified.
        wanted = sorted({0}.union(*(run.copies.pages(size) for run in runs)))
        first = 0
        for number, page in self._files.pages(name, wanted):
            low, high = number * size, min((number + 1) * size, entry.nbytes)
            content = torch.from_numpy(page.array)
            while first < len(runs) and runs[first].stop <= low:
                first += 1
            for run in runs[first:]:
                if run.begin >= high:
                    break
                here = run.copies.within(low, high)
                if len(here):
                    run.sink.take(content, here, mapped)

    def check_files(self) -> None:
        self._files.check_sizes()

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
