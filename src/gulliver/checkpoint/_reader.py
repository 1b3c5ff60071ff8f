"""Reads a step: only the pages that hold what is wanted, every one of them checked.

Read `StepReader.read_into`: it finds which pages of which files hold what is wanted, wherever the
ranks that saved have left it, and lets the engine read a few of them ahead.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gulliver.checkpoint._collect import own_entry
from gulliver.checkpoint._fits import always_fits, misfit
from gulliver.checkpoint._image import Slot, read_slots
from gulliver.checkpoint._json import parse_json
from gulliver.checkpoint._manifest import STATE, FileEntry, TensorEntry, read_manifest
from gulliver.checkpoint._regions import Copies, copy_bytes, overlap, place_of
from gulliver.checkpoint._tree import Leaf, join_state, names_in
from gulliver.errors import GulliverError
from gulliver.io import Engine, File, IoError, Page, Ticket, default_engine, named_errors
from gulliver.memory import Part

AHEAD = 8
"""Pages that are read at once."""
SCRATCH = 256 * 2**20
"""Bytes that are held before it is checked whether they fit a narrower dtype."""


@dataclass
class _Sink:
    """Tensor to be filled, and how many of its bytes are still to come."""

    target: Tensor
    bytes: Tensor
    left: int
    staged: Tensor | None = None

    def arrived(self, count: int) -> None:
        """Counts bytes that were copied; the last of them finish the tensor."""
        self.left -= count
        if self.left == 0 and self.staged is not None:
            self.target.copy_(self.staged.view(self.target.shape))
            self.staged = None


@dataclass(frozen=True)
class _Run:
    """Bytes of a file, and where they go."""

    begin: int
    stop: int
    sink: _Sink
    copies: Copies


@dataclass
class Mismatch:
    """Names and shapes of an entry that did not match.

    Attributes:
        missing: names that are wanted and not in the checkpoint.
        unexpected: names that are in the checkpoint and not wanted.
        unlike: names whose shapes differ, with both.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unlike: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.unlike)

    def __str__(self) -> str:
        said = [_listed("missing from it", self.missing), _listed("left over", self.unexpected)]
        for name, (theirs, ours) in list(self.unlike.items())[:1]:
            said.append(
                f"{len(self.unlike)} of other shapes ({name} is {theirs} there, {ours} here)"
            )
        return "; ".join(text for text in said if text)


def _values(leaf: Leaf) -> Tensor:
    return leaf.value if isinstance(leaf, Part) else leaf


def _listed(what: str, names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} {what} ({shown})" if names else ""


class StepReader:
    """Reader of a saved step.

    Args:
        folder: folder of the step.
        engine: engine that reads; None for one of its own.

    Raises:
        GulliverError: it is no complete step, or of another format.
    """

    def __init__(self, folder: Path | str, engine: Engine | None = None) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._slots: dict[str, dict[str, Slot]] = {}
        content = self._checked_json(STATE)
        self._entries: dict[str, Any] = content["entries"]
        self._ranks: list[dict[str, Any]] = content["ranks"]
        self._kinds: dict[str, Any] = content.get("kinds", {})
        self._given, self._engine = engine, engine
        self.bytes_read = 0
        """Bytes read from the disk so far."""

    def _checked_json(self, name: str) -> Any:
        """Reads a small file and checks its checksum."""
        entry, path = self._file(name), self.folder / name
        with named_errors(path, "read"):
            content = path.read_bytes()
        if (len(content), (zlib.crc32(content),)) != (entry.nbytes, entry.crc32):
            raise GulliverError(f"{path} is corrupted: take another checkpoint")
        return parse_json(path, content)

    @property
    def entries(self) -> list[str]:
        """Names of the entries that were saved."""
        return list(self._entries) + [e for e in self._own_entries() if e not in self._entries]

    def _own_entries(self) -> list[str]:
        return sorted({entry for own in self._ranks for entry in own})

    def is_per_rank(self, entry: str) -> bool:
        """Whether every rank has a value of its own for an entry."""
        return entry in self._own_entries()

    def tensors(self, entry: str) -> Mapping[str, TensorEntry]:
        """The tensors of an entry, by name."""
        return self.manifest.tensors.get(entry, {})

    def skeleton(self, entry: str) -> Any:
        """Returns the skeleton of an entry, which says where its tensors belong.

        Raises:
            GulliverError: there is no such entry.
        """
        if entry not in self._entries:
            raise GulliverError(f"{self.folder} has no entry {entry!r}: it has {self.entries}")
        return self._entries[entry]

    def value(self, entry: str, rank: int | None = None) -> Any:
        """Reads an entry as it was saved, its tensors in host memory.

        Args:
            entry: name of the entry.
            rank: rank whose value is read, where every rank has its own.

        Raises:
            GulliverError: there is no such entry, or a file is broken.
        """
        entry, skeleton = self.place(entry, rank)
        return join_state(self.whole(entry, names_in(skeleton)), skeleton)

    def place(self, entry: str, rank: int | None = None) -> tuple[str, Any]:
        """Returns the name that an entry's tensors are kept under, and its skeleton."""
        if rank is None:
            return entry, self.skeleton(entry)
        if rank >= len(self._ranks) or entry not in self._ranks[rank]:
            raise GulliverError(f"{self.folder} has no entry {entry!r} of rank {rank}")
        return own_entry(entry, rank), self._ranks[rank][entry]

    def kind(self, entry: str) -> Mapping[str, Any]:
        """Returns class and shapes of an optimizer or scheduler; empty where none were written."""
        return self._kinds.get(entry, {})

    def whole(self, entry: str, names: Iterable[str]) -> dict[str, Tensor]:
        """Reads whole tensors of an entry into new host memory; passes over names that it lacks."""
        saved = self.tensors(entry)
        found = {n: torch.empty(saved[n].shape, dtype=saved[n].dtype) for n in names if n in saved}
        self.read_into(entry, found)
        return found

    def match(self, entry: str, wanted: Mapping[str, Leaf], prefix: str = "") -> Mismatch:
        """Compares names and shapes of an entry with those wanted; see `read_into`."""
        found = self._not_as_wanted(entry, wanted, prefix)
        names = {name[len(prefix) :] for name in self.tensors(entry) if name.startswith(prefix)}
        found.unexpected = sorted(names - wanted.keys())
        return found

    def _not_as_wanted(self, entry: str, wanted: Mapping[str, Leaf], prefix: str) -> Mismatch:
        """Finds what is missing or of another shape; what else the entry has is not looked at."""
        saved, found = self.tensors(entry), Mismatch()
        for name, leaf in sorted(wanted.items()):
            there, shape = saved.get(prefix + name), tuple(leaf.shape)
            if there is None:
                found.missing.append(name)
            elif there.shape != shape:
                found.unlike[name] = (there.shape, shape)
        return found

    def check_tied(self, entry: str, tied: Mapping[str, str], prefix: str = "") -> None:
        """Refuses two values for one parameter, of which the one read last would win.

        Args:
            entry: name of the entry with the tensors.
            tied: names of parameters, each with the first name of the same parameter.
            prefix: text before these names in the entry.

        Raises:
            GulliverError: two values of one parameter differ.
        """
        saved = self.tensors(entry)
        for name, other in tied.items():
            both = [prefix + name, prefix + other]
            if name == other or not all(n in saved for n in both):
                continue
            one, two = self.whole(entry, both).values()
            bits = [value.reshape(-1).view(torch.uint8) for value in (one, two)]
            if one.shape != two.shape or one.dtype != two.dtype or not torch.equal(*bits):
                raise GulliverError(
                    f"{name!r} and {other!r} are one parameter here and two in {self.folder}, "
                    "which differ: untie them in the model"
                )

    def check_fits(self, entry: str, wanted: Mapping[str, Leaf], prefix: str = "") -> None:
        """Reads what is to be converted to a narrower dtype, and keeps nothing; see `read_into`.

        `read_into` reads it again: to keep all of it until it is checked might take any amount of
        memory.

        Raises:
            GulliverError: a value does not fit; the message names its tensor.
        """
        saved = self.tensors(entry)
        batch: dict[str, Leaf] = {}
        for name, leaf in wanted.items():
            target = leaf.value if isinstance(leaf, Part) else leaf
            there = saved[prefix + name].dtype
            if always_fits(there, target.dtype):
                continue
            scratch = torch.empty(target.shape, dtype=there)
            batch[name] = replace(leaf, value=scratch) if isinstance(leaf, Part) else scratch
            if sum(_values(x).nbytes for x in batch.values()) > SCRATCH:
                self._check_batch(entry, batch, wanted, prefix)
                batch = {}
        self._check_batch(entry, batch, wanted, prefix)

    def _check_batch(
        self, entry: str, batch: Mapping[str, Leaf], wanted: Mapping[str, Leaf], prefix: str
    ) -> None:
        self.read_into(entry, batch, prefix)
        for name, leaf in batch.items():
            problem = misfit(_values(leaf), _values(wanted[name]).dtype)
            if problem is not None:
                raise GulliverError(
                    f"{self.folder}, entry {entry!r}: tensor {prefix + name!r} is "
                    f"{str(_values(leaf).dtype).removeprefix('torch.')} there: {problem}"
                )

    def read_into(self, entry: str, wanted: Mapping[str, Leaf], prefix: str = "") -> None:
        """Fills tensors, and parts of tensors, in place; converts to their dtype.

        Args:
            entry: name of the entry.
            wanted: tensors and parts by name; the entry has these names after `prefix`.
            prefix: text that the names in the entry begin with.

        Raises:
            GulliverError: a name is not there or of another shape; a file is broken, then some
                tensors may have been filled.
        """
        odd = self._not_as_wanted(entry, wanted, prefix)
        if odd:
            raise GulliverError(f"{self.folder}, entry {entry!r}: {odd}")
        runs: dict[str, list[_Run]] = {}
        for name, leaf in wanted.items():
            for file, run in self._runs(entry, prefix + name, leaf):
                runs.setdefault(file, []).append(run)
        with torch.no_grad():
            for file, found in runs.items():
                self._read_file(file, sorted(found, key=lambda run: run.begin))

    def _runs(self, entry: str, name: str, leaf: Leaf) -> Iterator[tuple[str, _Run]]:
        """Yields files, and the bytes in them that hold elements of a leaf."""
        saved = self.tensors(entry)[name]
        wanted, size = place_of(leaf), saved.dtype.itemsize
        target = leaf.value.detach() if isinstance(leaf, Part) else leaf.detach()
        found = [(part, overlap(part.place(saved.shape), wanted)) for part in saved.parts]
        staged = None
        # Each of many short copies would be a transfer to the device: host memory takes them first.
        slow = not target.is_cpu and any(len(copies) > 1 for _, copies in found)
        if target.dtype != saved.dtype or not target.is_contiguous() or slow:
            staged = torch.empty(target.numel(), dtype=saved.dtype)
        flat = (target if staged is None else staged).reshape(-1).view(torch.uint8)
        sink = _Sink(target, flat, sum(copies.total for _, copies in found) * size, staged)
        for part, copies in found:
            if not len(copies):
                continue
            slot = self._slot(part.file, name)
            if (slot.dtype, slot.nbytes) != (saved.dtype, (part.stop - part.start) * size):
                raise GulliverError(
                    f"{self.folder / part.file} has another tensor {name!r} than its manifest says"
                )
            scaled = copies.scaled(size, slot.offset)
            begin, stop = int(scaled.source[0]), int(scaled.source[-1] + scaled.count[-1])
            yield part.file, _Run(begin, stop, sink, scaled)

    def _slot(self, file: str, name: str) -> Slot:
        if file not in self._slots:
            self._slots[file], _ = read_slots(self.folder / file)
        if name not in self._slots[file]:
            raise GulliverError(f"{self.folder / file} has no tensor {name!r}: it is another file")
        return self._slots[file][name]

    def _read_file(self, name: str, runs: list[_Run]) -> None:
        entry = self._file(name)
        size = entry.page_bytes
        # The header tells where everything lies, so its page is checked whatever is wanted.
        wanted = sorted({0}.union(*(run.copies.pages(size) for run in runs)))
        first = 0
        with self._opened(name) as file:
            for number, page in self._pages(file, entry, wanted):
                low, high = number * size, min((number + 1) * size, entry.nbytes)
                content = torch.from_numpy(page.array)
                while first < len(runs) and runs[first].stop <= low:
                    first += 1
                for run in runs[first:]:
                    if run.begin >= high:
                        break
                    here = run.copies.within(low, high)
                    if len(here):
                        copy_bytes(run.sink.bytes, content, here)
                        run.sink.arrived(here.total)

    def _file(self, name: str) -> FileEntry:
        path = self.folder / name
        if name not in self.manifest.files:
            raise GulliverError(f"{self.folder} does not list {name}: its manifest is broken")
        entry = self.manifest.files[name]
        try:
            size = path.stat().st_size
        except OSError:
            raise GulliverError(f"{path} does not exist: take another checkpoint") from None
        if size != entry.nbytes:
            raise GulliverError(
                f"{path} has {size} bytes, not {entry.nbytes}: it is truncated or another file"
                f"{self._holding(name, size, entry.nbytes)}"
            )
        return entry

    def _pages(
        self, file: File, entry: FileEntry, numbers: Iterable[int]
    ) -> Iterator[tuple[int, Page]]:
        """Yields pages of a file, checked, in order; each is good until the next."""
        engine = self._ready_engine(entry.page_bytes)
        left, reading = deque(numbers), deque[tuple[int, Page, Ticket]]()
        try:
            while left or reading:
                while left and len(reading) < AHEAD:
                    number = left.popleft()
                    offset = number * entry.page_bytes
                    count = min(entry.page_bytes, entry.nbytes - offset)
                    page = engine.acquire()
                    ticket = engine.read(file, offset, page.address, count, checksum=True)
                    reading.append((number, page, ticket))
                    self.bytes_read += count
                number, page, ticket = reading.popleft()
                try:
                    ticket.wait()
                    if ticket.checksum != entry.crc32[number]:
                        begin = number * entry.page_bytes
                        stop = min(begin + entry.page_bytes, entry.nbytes)
                        raise GulliverError(
                            f"{file.path} is corrupted between bytes {begin} and {stop}"
                            f"{self._holding(file.path.name, begin, stop)}: take another checkpoint"
                        )
                    yield number, page
                finally:
                    engine.release(page)
        finally:
            for _, page, ticket in reading:
                _ended(ticket)
                engine.release(page)

    def _holding(self, file: str, begin: int, stop: int) -> str:
        """Names the tensors that lie between two bytes of a file, for a message."""
        names = [
            f"{entry}: {name}"
            for entry, tensors in self.manifest.tensors.items()
            for name, tensor in tensors.items()
            if any(part.file == file for part in tensor.parts)
        ]
        if not names:
            return ""
        try:
            slots = self._slots.get(file) or read_slots(self.folder / file)[0]
        except GulliverError:
            return f", which holds {_shown(names)}"
        touched = [
            name
            for name in names
            if (slot := slots.get(name.split(": ", 1)[1]))
            and slot.offset < stop
            and slot.offset + slot.nbytes > begin
        ]
        return f", in {_shown(touched)}" if touched else ", in the header"

    def check_files(self) -> None:
        """Refuses files that are missing, or shorter or longer than they were.

        Raises:
            GulliverError: a file is; the message names it.
        """
        for name in self.manifest.files:
            self._file(name)

    def verify(self) -> Iterator[tuple[str, int]]:
        """Reads every page of every file and checks it.

        Yields:
            Name of the file and bytes of the page, page by page.

        Raises:
            GulliverError: a file is broken; the message names it, the bytes and the tensors.
        """
        for name, entry in self.manifest.files.items():
            self._file(name)
            numbers = range(math.ceil(entry.nbytes / entry.page_bytes))
            with self._opened(name) as file:
                for number, _ in self._pages(file, entry, numbers):
                    yield name, min(entry.page_bytes, entry.nbytes - number * entry.page_bytes)
            if name.endswith(".safetensors"):
                read_slots(self.folder / name)

    def _ready_engine(self, page_bytes: int) -> Engine:
        if self._engine is None or self._engine.page_bytes < page_bytes:
            aligned = -(-page_bytes // 4096) * 4096
            if self._engine is not None and self._engine is not self._given:
                self._engine.close()
            self._engine = default_engine(page_bytes=aligned, pages=AHEAD + 1)
        return self._engine

    @contextmanager
    def _opened(self, name: str) -> Iterator[File]:
        entry = self.manifest.files[name]
        engine = self._ready_engine(entry.page_bytes)
        try:
            file = engine.open(self.folder / name)
        except IoError as error:
            raise GulliverError(str(error)) from error
        try:
            yield file
        finally:
            engine.close_file(file)

    def close(self) -> None:
        """Ends the threads of the engine, unless it was given."""
        if self._engine is not None and self._engine is not self._given:
            self._engine.close()
        self._engine = self._given

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shown(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")


def _ended(ticket: Ticket) -> None:
    try:
        ticket.wait()
    except GulliverError:
        return
