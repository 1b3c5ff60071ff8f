"""Gathers tensors of which ranks hold parts on rank 0, run by run.

`on_gathered` is all that others call. The first rank reads `GatheredWeights` as it would read
files, in an order that it announces; the others go through the same order, and send what they have
of each run of elements. No rank ever has more than a batch of these.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gulliver.checkpoint.files import CODES, Image, ReadBack
from gulliver.checkpoint.manifest import FileEntry, PartEntry, merge_parts, tensor_from_json
from gulliver.checkpoint.reader import fitted
from gulliver.checkpoint.regions import Copies, PartPlace, copy_bytes, overlap, place_of
from gulliver.checkpoint.saving import PAGE
from gulliver.checkpoint.tree import Leaf
from gulliver.checkpoint.weights import ReadBatch, TensorInfo, Weights, batches
from gulliver.comm.collectives import broadcast_object, gather_objects
from gulliver.comm.groups import host_rank_group, return_rank_group
from gulliver.comm.messages import post
from gulliver.comm.world import guard, together
from gulliver.errors import GulliverError
from gulliver.io.default import default_engine
from gulliver.io.engine import Engine, Page, Ticket
from gulliver.io.files import (
    PARTIAL,
    FileMappings,
    atomic_file,
    finish_folder,
    hold,
    named_errors,
    remove_leftovers,
    require_space,
)
from gulliver.memory.parts import Part

TAG = 310
"""Tag of messages with elements."""
Run = tuple[str, int, int]
"""Name of a tensor, first element of a run and one past the last."""


class GatheredWeights(Weights):
    """Tensors that lie with all ranks; every rank makes one."""

    # The first rank calls `read`, after `announce`, and `drain` in the end, whatever happened. The
    # others call `serve`.

    def __init__(
        self, leaves: Mapping[str, Leaf], dtypes: Mapping[str, torch.dtype] | None = None
    ) -> None:
        self.path, self.files = Path(), []
        # What travels is in host memory.
        self.ranks = host_rank_group(None, "checkpoint")
        self.rank, self._group = self.ranks.rank, self.ranks.process_group
        self._leaves = dict(leaves)
        dtypes = dtypes or {}
        found = {n: _described(leaf, self.rank, dtypes.get(n)) for n, leaf in leaves.items()}
        merged = merge_parts(_first_of_alike(gather_objects(found, self._group)))
        self._entries = {name: tensor_from_json(entry) for name, entry in merged.items()}
        self.infos = {name: TensorInfo(e.dtype, e.shape) for name, e in self._entries.items()}
        self._order: deque[Run] | None = None
        self._flat: tuple[str, Tensor] | None = None
        self._mapped = FileMappings()

    def announce(self, runs: Iterable[Run]) -> None:
        """Tells the others what will be read, and in which order; once."""
        assert self._order is None, "the order is announced once"
        # One message for the whole order instead of one for each run: the ranks then send without
        # being asked.
        self._order = deque(broadcast_object(list(runs), 0, self._group))

    def read(self, wanted: Mapping[str, Part]) -> None:
        arriving: list[tuple[Tensor, Tensor, Copies]] = []
        incoming: list[tuple[int, Tensor]] = []
        for name, part in wanted.items():
            assert part.region is None, "what is gathered is counted in the whole"
            assert self._order, "all that is read was announced"
            assert self._order.popleft() == (name, part.start, part.stop), "in that order"
            for rank, copies in self._sources((name, part.start, part.stop)):
                # One run comes straight to where it belongs; what is strided takes a detour.
                row = part.value[int(copies.target[0]) :][: copies.total]
                if len(copies) > 1:
                    row = torch.empty(copies.total, dtype=row.dtype)
                    arriving.append((part.value, row, copies.packed()[1]))
                if rank == self.rank:
                    row.copy_(self._row(name, copies))
                    self._let_go(copies)
                else:
                    incoming.append((self.ranks.ranks[rank], row))
        post(incoming, [], self._group, TAG).wait()
        for value, row, copies in arriving:
            scaled = copies.scaled(value.itemsize)
            copy_bytes(value.view(torch.uint8), row.view(torch.uint8), scaled)

    def _sources(self, run: Run) -> Iterator[tuple[int, Copies]]:
        """Yields ranks that have elements of a run, and where: copies from their part to it."""
        name, start, stop = run
        entry = self._entries[name]
        for part in entry.parts:
            copies = overlap(part.place(entry.shape), PartPlace(entry.shape, start, stop))
            if len(copies):
                yield int(part.file), copies

    def _row(self, name: str, copies: Copies) -> Tensor:
        """Returns elements that this rank has, without gaps, in host memory, as they travel."""
        if self._flat is None or self._flat[0] != name:
            leaf = self._leaves[name]
            value = (leaf.value if isinstance(leaf, Part) else leaf).detach()
            # Kept for the next run: flattening what is not contiguous copies it.
            self._flat = name, value.resolve_conj().resolve_neg().reshape(-1)
        flat = self._flat[1]
        if len(copies) == 1:
            return self._fitted(name, flat[int(copies.source[0]) :][: copies.total].cpu())
        row = torch.empty(copies.total, dtype=flat.dtype)
        scaled = copies.packed()[0].scaled(row.itemsize)
        copy_bytes(row.view(torch.uint8), flat.cpu().view(torch.uint8), scaled)
        return self._fitted(name, row)

    def _fitted(self, name: str, row: Tensor) -> Tensor:
        return fitted(f"rank {self.rank}", name, row, self._entries[name].dtype)

    def _let_go(self, copies: Copies) -> None:
        """Gives back what was read for a run from a file that is mapped."""
        assert self._flat is not None
        last = int(copies.source[-1] + copies.count[-1])
        used = self._flat[1][int(copies.source[0]) : last]
        self._mapped.let_go(used.data_ptr(), used.nbytes if used.is_cpu else 0)

    def drain(self) -> None:
        """Receives what is still in flight: the others wait for that."""
        if self._order is None:
            self.announce([])
        while self._order:
            name, start, stop = self._order[0]
            scratch = torch.empty(stop - start, dtype=self._entries[name].dtype)
            self.read({name: Part(scratch, self._entries[name].shape, start)})

    def serve(self) -> None:
        """Sends what this rank has of the tensors that the first reads."""
        for run in broadcast_object([], 0, self._group):
            for rank, copies in self._sources(run):
                if rank == self.rank:
                    row = self._row(run[0], copies)
                    post([], [(self.ranks.ranks[0], row)], self._group, TAG).wait()
                    self._let_go(copies)

    def agreed(self, failure: Exception | None) -> str | None:
        """Tells all ranks why the first one failed, None if it did not; every rank calls it."""
        reason = None if failure is None else str(failure) or type(failure).__name__
        return broadcast_object(reason, 0, self._group)

    def close(self) -> None:
        self._flat = None


def _first_of_alike(
    every: list[dict[str, tuple[bool, dict[str, Any]]]],
) -> Iterator[dict[str, dict[str, Any]]]:
    """Leaves of tensors that are alike wherever they are those of the first rank that has them."""
    seen: set[str] = set()
    for found in every:
        yield {
            name: entry if is_part or name not in seen else {**entry, "parts": []}
            for name, (is_part, entry) in found.items()
        }
        seen.update(found)


def _described(leaf: Leaf, rank: int, dtype: torch.dtype | None) -> tuple[bool, dict[str, Any]]:
    """Describes a leaf: whether it is a `Part`, and its manifest entry, with rank for file."""
    place, own = place_of(leaf), leaf.value.dtype if isinstance(leaf, Part) else leaf.dtype
    part = PartEntry(str(rank), place.start, place.stop, place.region)
    dtype = dtype if dtype is not None and own.is_floating_point else own
    # What cannot be held is refused later, where all ranks learn of it.
    code = CODES.get(dtype, str(dtype))
    return isinstance(leaf, Part), {
        "dtype": code,
        "shape": list(place.shape),
        "parts": [part.to_json()],
    }


def on_gathered(
    leaves: Mapping[str, Leaf],
    use: Callable[[GatheredWeights], None],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Lets rank 0 use tensors that lie with all ranks; every rank calls it."""
    failure: Exception | None = None
    with guard(), GatheredWeights(leaves, dtypes) as weights:
        # A rank that cannot send what it has would leave the first waiting: the error is sent.
        with together():
            if weights.rank == 0:
                try:
                    use(weights)
                except Exception as error:
                    failure = error
                weights.drain()
            else:
                weights.serve()
            reason = weights.agreed(failure)
        return_rank_group(weights.ranks)
    if failure is not None:
        raise failure
    if reason is not None:
        raise GulliverError(f"rank 0 failed: {reason}")


# Streams tensors from anywhere into new files: read, converted and written batch by batch.
#
# Read `write_files`. Memory is bounded by `BATCH` and the engine's pages, whatever the tensors'
# sizes. What is made appears whole or not at all, also the folders above it.


PAGES = 12
"""Pages of the engine that writes: they go to the disk while the next batch is read."""

_log = logging.getLogger("gulliver")

Progress = Callable[[int, int], None]
"""Callback that is given the bytes done so far and the total."""
DTypes = torch.dtype | Mapping[str, torch.dtype] | None
"""Dtype that floating-point tensors are converted to: all, some by name in the source, none."""


class _FileWriter:
    """A new file, filled from its beginning through the engine's pages."""

    def __init__(self, engine: Engine, path: Path, nbytes: int) -> None:
        self._engine, self.nbytes = engine, nbytes
        self._file = engine.create(path, nbytes)
        self._page: Page | None = None
        self._filled = self._written = 0
        self._open: deque[Ticket] = deque()
        self._checksums: list[int] = []

    def put(self, content: Tensor) -> None:
        """Appends a row of bytes in host memory, which is free again when this returns."""
        done, size = 0, content.numel()
        while done < size:
            if self._page is None:
                self._page = self._engine.acquire()
            count = min(size - done, self._engine.page_bytes - self._filled)
            target = torch.from_numpy(self._page.array)[self._filled : self._filled + count]
            target.copy_(content[done : done + count])
            done, self._filled = done + count, self._filled + count
            if self._filled == self._engine.page_bytes:
                self._flush()

    def _flush(self) -> None:
        if self._page is None:
            return
        page, self._page = self._page, None
        self._open.append(self._engine.write_page(self._file, self._written, page, self._filled))
        self._written, self._filled = self._written + self._filled, 0
        # As many as there are pages: what failed is known before more is read.
        while len(self._open) > PAGES:
            self._settle(self._open.popleft())

    def _settle(self, ticket: Ticket) -> None:
        ticket.wait()
        self._checksums.append(int(ticket.checksum or 0))

    def finish(self) -> FileEntry:
        """Waits until everything is on the disk; returns the file's entry."""
        self._flush()
        while self._open:
            self._settle(self._open.popleft())
        assert self._written == self.nbytes, "the file is as long as its header says"
        self._engine.sync(self._file).wait()
        return FileEntry(self.nbytes, self._engine.page_bytes, tuple(self._checksums))

    def close(self) -> None:
        """Closes the file; what was not finished is of no use."""
        if self._page is not None:
            self._engine.release(self._page)
            self._page = None
        self._engine.close_file(self._file)


@dataclass
class FilePlan:
    """A file to be written."""

    # Path that it is written to.
    path: Path
    # Names in the source by name in the file.
    sources: dict[str, str]
    # Plan of its header and the order of its tensors.
    image: Image


def plan_file(
    path: Path,
    weights: Weights,
    sources: Mapping[str, str],
    dtype: DTypes,
    metadata: Mapping[str, str] | None = None,
) -> FilePlan:
    # Tensors without memory: the header and the places follow from dtypes and shapes.
    empty = {
        name: torch.empty(info.shape, dtype=info.dtype, device="meta")
        for name, source in sources.items()
        for info in [weights.infos[source].as_dtype(dtype_of(dtype, source))]
    }
    return FilePlan(path, dict(sources), Image(empty, {"format": "pt", **(metadata or {})}))


def write_files(
    weights: Weights,
    plans: list[FilePlan],
    dtype: DTypes,
    progress: Progress | None = None,
    called: str = "",
) -> dict[str, FileEntry]:
    """Writes files one after the other, each from its beginning to its end; their entries by name.

    A slice of each tensor is read back and compared. `called` is what messages call the files.

    The disk writes what has been read while more is read.
    """
    total, done = sum(plan.image.nbytes for plan in plans), 0
    batch, entries = ReadBatch(), dict[str, FileEntry]()
    if isinstance(weights, GatheredWeights):
        weights.announce(
            run for p in plans for runs in batches(_wanted(weights, p)) for run in runs
        )
    with default_engine(page_bytes=PAGE, pages=PAGES) as engine:
        for plan in plans:
            with ExitStack() as stack:
                writer = _FileWriter(engine, plan.path, plan.image.nbytes)
                stack.callback(writer.close)
                writer.put(plan.image.header)
                names, back = {source: name for name, source in plan.sources.items()}, ReadBack()
                done += plan.image.header.numel()
                for runs in batches(_wanted(weights, plan)):
                    for source, part in batch.read(weights, runs).items():
                        value = part.value
                        back.note(names[source], value)
                        target = dtype_of(dtype, source)
                        if target is not None and value.dtype.is_floating_point:
                            value = fitted(called or str(plan.path), source, value, target)
                        value = value.view(torch.uint8)
                        writer.put(value)
                        done += value.numel()
                    if progress is not None:
                        progress(done, total)
                entries[plan.path.name] = writer.finish()
                back.check(plan.path, called)
    return entries


def _wanted(weights: Weights, plan: FilePlan) -> dict[str, TensorInfo]:
    """Returns what a file is made of, by name in the source and in the file's order."""
    sources = (plan.sources[name] for name in plan.image.names if name is not None)
    return {source: weights.infos[source] for source in sources}


def dtype_of(dtype: DTypes, source: str) -> torch.dtype | None:
    """Returns the dtype that a tensor is converted to; None where it stays as it is."""
    return dtype.get(source) if isinstance(dtype, Mapping) else dtype


def write_single(
    weights: Weights,
    names: Mapping[str, str],
    target: Path,
    dtype: DTypes = None,
    progress: Progress | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors as one safetensors file, whole or not at all; one that is there is replaced.

    Args:
        weights: tensors to read from.
        names: names in `weights` by name in the file.
        target: path of the file.
        dtype: dtype that floating-point tensors are converted to; None keeps their own.
        progress: callback that is given the bytes done and the total.
        metadata: text stored next to the tensors, by key.

    Raises:
        GulliverError: it cannot be written; nothing is left of it then.
    """
    plan = plan_file(target, weights, names, dtype, metadata)
    clear_leftovers(target.parent)
    with new_parents(target), atomic_file(target, plan.image.nbytes) as partial:
        plan.path = partial
        write_files(weights, [plan], dtype, progress, str(target))


def refuse_existing(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise GulliverError(f"{target} exists already: choose another name, or remove it first")


@contextmanager
def new_parents(path: Path) -> Iterator[None]:
    """Makes the missing folders above a path; removes them if what is done there fails."""
    made = [parent for parent in path.absolute().parents if not parent.exists()]
    with named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        # Somebody else may have put something there meanwhile.
        with suppress(OSError):
            for parent in made:
                parent.rmdir()
        raise


def clear_leftovers(folder: Path) -> None:
    """Removes what conversions that were killed have left hidden."""
    for path in remove_leftovers(folder):
        _log.warning("removed %s, which a process that was killed had left half written", path)


@contextmanager
def new_folder(folder: Path, needed: int) -> Iterator[Path]:
    """Opens a temporary folder next to `folder`, renamed to it when the block ends well."""
    clear_leftovers(folder.parent)
    require_space(folder.parent, needed)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}{PARTIAL}")
    with new_parents(folder), named_errors(folder, needed=needed):
        try:
            partial.mkdir()
            with hold(partial):
                yield partial
                finish_folder(partial, folder)
        finally:
            # Also after Ctrl-C nothing is left.
            shutil.rmtree(partial, ignore_errors=True)
