"""Reads the files of a step and checks them: sizes, checksums of pages, headers.

Read `Verifier.pages`. Whoever reads a step reads it through a `Verifier`: a load the pages that it
wants, `verify` all of them. What is wrong is a `Problem`: a load raises the first that it meets, as
a `BrokenFileError`; `Verifier.check` goes on and lists all.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gulliver.checkpoint._image import MAX_HEADER, Slot, read_slots
from gulliver.checkpoint._manifest import FileEntry, Manifest, PartEntry
from gulliver.errors import GulliverError
from gulliver.io import BLOCK, Engine, IoError, Page, Ticket, default_engine, named_errors

AHEAD = 8
"""Pages that are read at once."""


@dataclass(frozen=True)
class Problem:
    """Something broken in a step."""

    # Name of the file in the step's folder.
    file: str
    # First byte that may be wrong.
    begin: int
    # One past the last.
    stop: int
    # Names of the tensors that lie there, as ``entry: name``; empty for the header and for text.
    tensors: tuple[str, ...]
    # Description of what is wrong.
    what: str

    def __str__(self) -> str:
        shown = ", ".join(self.tensors[:4]) + (", ..." if len(self.tensors) > 4 else "")
        several = f"{len(self.tensors)} tensors: " if len(self.tensors) > 1 else ""
        holding = f" ({several}{shown})" if self.tensors else ""
        return f"{self.file}, bytes {self.begin} to {self.stop}: {self.what}{holding}"


class BrokenFileError(GulliverError):
    """A problem, for those who cannot go on after it."""

    def __init__(self, text: str, problem: Problem | None = None) -> None:
        super().__init__(text)
        self.problem = problem


class Verifier:
    """Reader of a step's files that believes nothing."""

    def __init__(self, folder: Path, manifest: Manifest, engine: Engine | None = None) -> None:
        self.folder, self.manifest = folder, manifest
        self._given, self._engine = engine, engine
        self._slots: dict[str, dict[str, Slot]] = {}
        self.bytes_read = 0
        """Bytes read from the disk so far."""

    def check_size(self, name: str) -> FileEntry:
        """Returns the entry of a file that is there in its size."""
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
        """Refuses files that are missing, or shorter or longer than they were."""
        for name in self.manifest.files:
            self.check_size(name)

    def text(self, name: str) -> bytes:
        """Reads a small file, of one page."""
        entry, path = self.check_size(name), self.folder / name
        with named_errors(path, "read"):
            content = path.read_bytes()
        if entry.crc32 != (zlib.crc32(content),):
            raise self._broken(name, 0, entry.nbytes, "they are corrupted")
        return content

    def slot(self, entry: str, name: str, part: PartEntry) -> Slot:
        """Finds a part of a tensor in its file, as the header of that tells."""
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
        """Reads a header; where it makes no sense its checksum tells what has happened to it."""
        try:
            return read_slots(self.folder / file)[0]
        except GulliverError:
            self._check_header_pages(file)
            raise

    def _check_header_pages(self, file: str) -> None:
        """Checks the page that a header begins in, which holds all of most headers."""
        for _ in self.pages(file, [0]):
            pass

    def pages(self, name: str, numbers: Iterable[int]) -> Iterator[tuple[int, Page]]:
        """Reads pages of a file in order, a few ahead; each is good until the next."""
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
        """Reads a whole file; yields the bytes of page after page, and all that is wrong."""
        entry, size = self.manifest.files[name], _size(self.folder / name)
        last, broken = math.ceil(entry.nbytes / entry.page_bytes), False
        # Of a file that was cut off, the pages that are left.
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
        """Compares the header of a file with the manifest; those of empty files have no tensors."""
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
        return BrokenFileError(f"{self.folder / str(problem)}: take another checkpoint", problem)

    def _held(self, file: str, begin: int, stop: int) -> tuple[str, ...]:
        """Names the tensors between two bytes of a file; all of it where its header is broken."""
        places = _places(self.folder / file)
        return tuple(
            f"{entry}: {name}"
            for entry, tensors in self.manifest.tensors.items()
            for name, tensor in tensors.items()
            if any(part.file == file for part in tensor.parts)
            and (places is None or (name in places and _meet(places[name], (begin, stop))))
        )

    def _ready_engine(self, page_bytes: int) -> Engine:
        if self._engine is None or self._engine.page_bytes < page_bytes:
            self.close()
            aligned = -(-page_bytes // BLOCK) * BLOCK
            self._engine = default_engine(page_bytes=aligned, pages=AHEAD + 1)
        return self._engine

    def close(self) -> None:
        """Ends the threads of the engine, unless it was given."""
        if self._engine is not None and self._engine is not self._given:
            self._engine.close()
        self._engine = self._given


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _span(entry: FileEntry, number: int) -> tuple[int, int]:
    """First byte of a page, and one past the last."""
    begin = number * entry.page_bytes
    return begin, min(begin + entry.page_bytes, entry.nbytes)


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _failure(ticket: Ticket) -> str | None:
    """Waits for a page; says why it could not be read."""
    try:
        ticket.wait()
    except IoError as error:
        return f"they cannot be read, {os.strerror(error.errno)}"
    except GulliverError as error:
        return str(error)
    return None


def _places(path: Path) -> dict[str, tuple[int, int]] | None:
    """First byte and one past the last of each tensor of a file; also of a truncated one."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(min(length, MAX_HEADER)))
        entries.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in entries.items()}
        return {name: (8 + length + a, 8 + length + b) for name, (a, b) in offsets.items()}
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError):
        # A broken header tells nothing.
        return None
