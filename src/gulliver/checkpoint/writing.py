"""Streams tensors into new files: read, converted and written batch by batch.

Read `write_files`. Memory is bounded by `BATCH` and the engine's pages, whatever the tensors'
sizes. Output appears completely or not at all, including new parent folders.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gulliver.checkpoint.files import Image
from gulliver.checkpoint.manifest import FileEntry
from gulliver.checkpoint.reader import fitted
from gulliver.checkpoint.saving import PAGE, AsyncCheckpointer, Save
from gulliver.checkpoint.tree import Leaf
from gulliver.checkpoint.weights import ReadBatch, TensorInfo, Weights, batches, open_weights
from gulliver.comm.collectives import broadcast_object
from gulliver.errors import GulliverError
from gulliver.io.engine import Engine, Page, Ticket
from gulliver.io.files import (
    PARTIAL,
    atomic_file,
    finish_folder,
    hold,
    named_errors,
    remove_leftovers,
    require_space,
)
from gulliver.io.native import default_engine

PAGES = 12
"""Number of pages of the writing engine, flushed while the next batch is read."""

_log = logging.getLogger("gulliver")

Progress = Callable[[int, int], None]
"""Callback that receives the bytes written and the total."""
DTypes = torch.dtype | Mapping[str, torch.dtype] | None
"""Dtype of floating-point tensors: one for all, by source name, or None for the stored ones."""


class _FileWriter:
    """Writes a new file sequentially through the engine's pages."""

    def __init__(self, engine: Engine, path: Path, nbytes: int) -> None:
        self._engine, self.nbytes = engine, nbytes
        self._file = engine.create(path, nbytes)
        self._page: Page | None = None
        self._filled = self._written = 0
        self._open: deque[Ticket] = deque()
        self._checksums: list[int] = []

    def put(self, content: Tensor) -> None:
        """Appends bytes in host memory, which may be reused on return."""
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
        # At most as many as there are pages, so that failures are found before more is read.
        while len(self._open) > PAGES:
            self._finish_write(self._open.popleft())

    def _finish_write(self, ticket: Ticket) -> None:
        ticket.wait()
        self._checksums.append(int(ticket.checksum or 0))

    def finish(self) -> FileEntry:
        """Waits until everything is on disk; returns the file's manifest entry."""
        self._flush()
        while self._open:
            self._finish_write(self._open.popleft())
        assert self._written == self.nbytes, "the file is as long as its header says"
        self._engine.sync(self._file).wait()
        return FileEntry(self.nbytes, self._engine.page_bytes, tuple(self._checksums))

    def close(self) -> None:
        if self._page is not None:
            self._engine.release(self._page)
            self._page = None
        self._engine.close_file(self._file)


@dataclass
class FilePlan:
    """A file to be written."""

    # Path to write to.
    path: Path
    # Source name of each name in the file.
    sources: dict[str, str]
    # Layout of its header and tensors.
    image: Image


def plan_file(
    path: Path,
    weights: Weights,
    sources: Mapping[str, str],
    dtype: DTypes,
    metadata: Mapping[str, str] | None = None,
) -> FilePlan:
    # Meta tensors: header and offsets follow from dtypes and shapes.
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
    """Writes files sequentially while reading; returns their manifest entries by name."""
    total, done = sum(plan.image.nbytes for plan in plans), 0
    batch, entries = ReadBatch(), dict[str, FileEntry]()
    with default_engine(page_bytes=PAGE, pages=PAGES) as engine:
        for plan in plans:
            with ExitStack() as stack:
                writer = _FileWriter(engine, plan.path, plan.image.nbytes)
                stack.callback(writer.close)
                writer.put(plan.image.header)
                done += plan.image.header.numel()
                for runs in batches(_wanted(weights, plan)):
                    for source, part in batch.read(weights, runs).items():
                        value = part.value
                        target = dtype_of(dtype, source)
                        if target is not None and value.dtype.is_floating_point:
                            value = fitted(called or str(plan.path), source, value, target)
                        value = value.view(torch.uint8)
                        writer.put(value)
                        done += value.numel()
                    if progress is not None:
                        progress(done, total)
                entries[plan.path.name] = writer.finish()
    return entries


def _wanted(weights: Weights, plan: FilePlan) -> dict[str, TensorInfo]:
    """Returns a file's tensors by source name, in file order."""
    sources = (plan.sources[name] for name in plan.image.names if name is not None)
    return {source: weights.infos[source] for source in sources}


def dtype_of(dtype: DTypes, source: str) -> torch.dtype | None:
    return dtype.get(source) if isinstance(dtype, Mapping) else dtype


def write_single(
    weights: Weights,
    names: Mapping[str, str],
    target: Path,
    dtype: DTypes = None,
    progress: Progress | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors to one safetensors file atomically, replacing an existing one."""
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
    """Creates missing parent folders; removes them if the block fails."""
    made = [parent for parent in path.absolute().parents if not parent.exists()]
    with named_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        # Other processes may have created files there meanwhile.
        with suppress(OSError):
            for parent in made:
                parent.rmdir()
        raise


def clear_leftovers(folder: Path) -> None:
    for path in remove_leftovers(folder):
        _log.warning("removed %s, which a killed process had left incomplete", path)


@contextmanager
def new_folder(folder: Path, needed: int) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `folder` if the block succeeds."""
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
            # Removes the folder also after Ctrl-C.
            shutil.rmtree(partial, ignore_errors=True)


# Writes a model of which ranks hold parts to unsharded files, optionally in the background.


ENTRY, STEP = "model", 0


# [Note: models that no rank has] No rank has the full model, and gathering it would block training.
# So each rank saves its parts as those of a step, in a hidden folder next to the target; when all
# parts are on disk, rank 0 reads them tensor by tensor, writes the files and removes the folder.
# Until then, the disk holds the model twice. Folders left by killed processes are hidden, and
# removed by the next save.
class PartsSaver(AsyncCheckpointer):
    """Saves parts in the background and merges them into files; created on every rank."""

    def __init__(
        self,
        target: Path,
        write: Callable[[Weights], object],
        leaves: Mapping[str, Leaf],
        memory_limit: int | None = None,
    ) -> None:
        # The name contains the process id, so that other processes can detect a leftover.
        writer = broadcast_object(os.getpid())
        parts = target.with_name(f".{target.name}.parts.{writer}{PARTIAL}")
        super().__init__(parts, keep=1, memory_limit=memory_limit)
        self._target, self._put = target, write
        if self.rank == 0:
            clear_leftovers(target.parent)
        try:
            self.save(STEP, {ENTRY: dict(leaves)})
        except BaseException:
            self._remove()
            raise

    def _finish(self, save: Save) -> None:
        super()._finish(save)
        if self._engine is not None:
            # There is no other save: its pages are freed for the conversion.
            self._engine.close()
            self._engine = None
        if self.rank != 0:
            return
        try:
            if save.problem is None:
                with (
                    hold(self.folder.root),
                    open_weights(self.folder.path(STEP), ENTRY) as weights,
                ):
                    self._put(weights)
        except Exception as error:
            self._failure = GulliverError(f"{self._target} was not written: {error}")
            self._failure.__cause__ = error
        finally:
            self._remove()

    def _remove(self) -> None:
        if self.rank == 0:
            self._lock.release()
            shutil.rmtree(self.folder.root, ignore_errors=True)
