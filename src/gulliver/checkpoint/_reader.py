"""Reads a step: only the pages that hold what is wanted, every one of them checked.

Read `StepReader.read_into`: it finds which pages of which files hold what is wanted, wherever the
ranks that saved have left it, and lets the engine read a few of them ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from gulliver.checkpoint._collect import own_entry
from gulliver.checkpoint._fits import always_fits, refuse_misfit
from gulliver.checkpoint._json import parse_json
from gulliver.checkpoint._manifest import STATE, TensorEntry, read_manifest
from gulliver.checkpoint._matching import match
from gulliver.checkpoint._regions import Copies, copy_bytes, overlap, place_of
from gulliver.checkpoint._tree import Leaf, join_state, names_in
from gulliver.checkpoint._verifying import Verifier
from gulliver.errors import GulliverError
from gulliver.io import Engine, FileMappings
from gulliver.memory import Part

LARGE = 2**16
"""Bytes of tensors that are given back to their files as they are filled."""
SCRATCH = 32 * 2**20
"""Bytes that are read at once to see whether they fit a narrower dtype."""


@dataclass
class _Sink:
    """Tensor to be filled, and how many of its bytes are still to come."""

    # Tensor to be filled.
    target: Tensor
    # Row that is copied to: bytes, or elements where `dtype` says what they come as.
    row: Tensor
    # Bytes that are still to come.
    left: int
    # Dtype that the bytes are of where they are converted; None where they stay.
    dtype: torch.dtype | None = None
    # Row in host memory that a tensor is filled from at the end; None without one.
    staged: Tensor | None = None

    def take(self, content: Tensor, copies: Copies, mapped: FileMappings) -> None:
        """Copies bytes; the last finish the tensor, and give it back to its file if it has one."""
        copy_bytes(self.row, content, copies, self.dtype)
        self.left -= copies.total
        if self.left == 0 and self.staged is not None:
            self.target.copy_(self.staged.view(self.target.shape))
            self.row = self.staged = torch.empty(0)
        if self.left == 0 and self.target.is_cpu and self.target.nbytes >= LARGE:
            mapped.let_go(self.target.data_ptr(), self.target.nbytes)


@dataclass(frozen=True)
class _FileRun:
    """Bytes of a file, and where they go."""

    begin: int
    stop: int
    sink: _Sink
    copies: Copies


def _values(leaf: Leaf) -> Tensor:
    return leaf.value if isinstance(leaf, Part) else leaf


class StepReader:
    """Reader of a saved step."""

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
        """Bytes read from the disk so far."""
        return self._files.bytes_read

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
        """Returns the skeleton of an entry, which says where its tensors belong."""
        if entry not in self._entries:
            raise GulliverError(f"{self.folder} has no entry {entry!r}: it has {self.entries}")
        return self._entries[entry]

    def value(self, entry: str, rank: int | None = None) -> Any:
        """Reads an entry as it was saved, its tensors in host memory."""
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

    def check_tied(self, entry: str, tied: Mapping[str, str], prefix: str = "") -> None:
        """Refuses two values for one parameter, of which the one read last would win."""
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

    def check_fits(
        self,
        entry: str,
        wanted: Mapping[str, Leaf],
        prefix: str = "",
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """Reads what is to be converted to a narrower dtype, and keeps nothing; see `read_into`."""
        # `read_into` reads it again: to keep all of it until it is checked might take any amount of
        # memory.
        saved = self.tensors(entry)
        batch: dict[str, Part] = {}
        targets = {n: (dtypes or {}).get(n, _values(leaf).dtype) for n, leaf in wanted.items()}
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
            refuse_misfit(where, prefix + name, part.value, targets[name])

    def read_into(self, entry: str, wanted: Mapping[str, Leaf], prefix: str = "") -> None:
        """Fills tensors, and parts of tensors, in place; converts to their dtype."""
        saved = self.tensors(entry)
        there = {name: saved[prefix + name] for name in wanted if prefix + name in saved}
        # Parts may come from callers that did not match first, such as the boosters.
        match(there, wanted).refuse(f"{self.folder}, entry {entry!r},", len(wanted))
        runs: dict[str, list[_FileRun]] = {}
        for name, leaf in wanted.items():
            for file, run in self._runs(entry, prefix + name, leaf):
                runs.setdefault(file, []).append(run)
        mapped = FileMappings()
        with torch.no_grad():
            for file, found in runs.items():
                # File by file, in the order of its bytes: a page that holds several tensors is read
                # once.
                self._read_file(file, sorted(found, key=lambda run: run.begin), mapped)

    def _runs(self, entry: str, name: str, leaf: Leaf) -> Iterator[tuple[str, _FileRun]]:
        """Yields files, and the bytes in them that hold elements of a leaf."""
        saved = self.tensors(entry)[name]
        wanted, size = place_of(leaf), saved.dtype.itemsize
        target = leaf.value.detach() if isinstance(leaf, Part) else leaf.detach()
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
        # Each of many short copies would be a transfer to the device: host memory takes them first.
        slow = not target.is_cpu and any(len(copies) > 1 for _, copies in runs)
        # Converted as it comes, so that nothing is held but pages; unless those cut elements.
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
        # The header tells where everything lies, so its page is checked whatever is wanted.
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
        """Refuses files that are missing, or shorter or longer than they were."""
        self._files.check_sizes()

    def close(self) -> None:
        """Ends the threads of the engine, unless it was given."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
