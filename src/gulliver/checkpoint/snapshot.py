"""Copies a rank's state into the engine's pages, from a device on a copy stream.

The copy stream starts after the work that was queued when the snapshot was taken. Code that will
modify a source makes its own stream wait for the copy; only the thread that calls `pump` waits
for the device.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gulliver.checkpoint.collect import SMALL, TINY, RankContent, file_name
from gulliver.checkpoint.files import Image
from gulliver.checkpoint.manifest import FileEntry, part_to_json
from gulliver.checkpoint.tree import Leaf
from gulliver.errors import GulliverError
from gulliver.io.engine import Engine, File, Page, StridedView, Ticket
from gulliver.io.files import FileMappings
from gulliver.io.native import gather
from gulliver.memory.parts import Part
from gulliver.memory.pending import storage_of


# [Note: page-locked memory] CUDA copies to pageable memory block the caller. So the pool is
# page-locked once, and all saves use it.
class CopyStream:
    """Copies between device and host, in call order. This base class copies synchronously."""

    # This base class serves host memory, where copies are complete when the call returns.

    def prepare(self, regions: Iterable[tuple[int, int]]) -> None:
        """Prepares the pool's memory regions for asynchronous copies."""

    def begin(self) -> None:
        """Orders the copies after the work that the caller has queued."""

    def queue(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def mark(self) -> Any:
        """Returns an event that follows the copies queued so far."""
        return None

    def order(self, event: Any) -> None:
        """Makes the caller's later work wait for an event."""

    def wait(self, event: Any) -> None:
        """Blocks the calling thread until an event has completed."""


class CudaCopyStream(CopyStream):
    """CUDA copy stream into page-locked host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._locked: set[int] = set()

    def prepare(self, regions: Iterable[tuple[int, int]]) -> None:
        for address, nbytes in regions:
            if address in self._locked:
                continue
            runtime: Any = torch.cuda.cudart()
            code = runtime.cudaHostRegister(address, nbytes, 0)
            if int(code) != 0:
                raise GulliverError(
                    f"{nbytes} bytes of host memory could not be page-locked (CUDA error "
                    f"{int(code)}): free some memory, or use mode='ring'"
                )
            self._locked.add(address)

    def begin(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def queue(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def order(self, event: Any) -> None:
        """Makes the caller's current stream wait, without blocking the thread."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def wait(self, event: Any) -> None:
        event.synchronize()


class CopyTicket:
    """Ticket of a page that a copy stream fills and the engine writes."""

    def __init__(
        self,
        copy_stream: CopyStream,
        file: File,
        offset: int,
        sources: Sequence[tuple[Tensor, int, int]],
    ) -> None:
        self.copy_stream, self.file, self.offset, self.sources = copy_stream, file, offset, sources
        # Bytes of the page.
        self.nbytes = sum(count for _, _, count in sources)
        self._issued, self._written = threading.Event(), threading.Event()
        self._event: Any = None
        self._ticket: Ticket | None = None
        self._error: BaseException | None = None

    @property
    def checksum(self) -> int | None:
        return None if self._ticket is None else self._ticket.checksum

    def copy(self, page: Page) -> None:
        target, position = torch.from_numpy(page.array), 0
        with self.copy_stream.queue():
            for source, begin, count in self.sources:
                # `reshape` copies non-contiguous sources into memory of the copy stream, which may
                # be freed at once: its next user on this stream runs after the copy.
                run = source.detach().reshape(-1).view(torch.uint8)[begin : begin + count]
                target[position : position + count].copy_(run, non_blocking=True)
                position += count
            # `self.sources` keeps the sources alive until `write` has waited for this event: memory
            # freed earlier could be reused on the compute stream while it is being read.
            self._event = self.copy_stream.mark()
        self._issued.set()

    def write(self, engine: Engine, page: Page) -> None:
        self.copy_stream.wait(self._event)
        self.sources = ()  # their memory may be freed now
        self._ticket = engine.write_page(self.file, self.offset, page, self.nbytes)
        self._written.set()

    def wait_copies(self) -> None:
        """Waits until no copy writes to the page, or the device is lost."""
        with suppress(Exception):
            self.copy_stream.wait(self._event)

    def fail(self, error: BaseException) -> None:
        if not self._written.is_set():
            self._error = error
        self._issued.set()
        self._written.set()

    def wait_copied(self) -> None:
        """Orders the caller's later device work after the copies."""
        self._issued.wait()
        if self._event is not None:
            self.copy_stream.order(self._event)

    def wait(self) -> None:
        self._written.wait()
        if self._error is not None:
            raise self._error
        assert self._ticket is not None
        self._ticket.wait()


def pump(engine: Engine, tickets: Sequence[CopyTicket]) -> None:
    """Copies pages as far ahead as the pool allows, and writes them in order."""
    copying: deque[tuple[CopyTicket, Page]] = deque()
    left = deque(tickets)
    try:
        while left or copying:
            page = _page(engine, wait=not copying) if left else None
            if page is not None:
                copying.append((left.popleft(), page))
                copying[-1][0].copy(page)
                continue
            copying[0][0].write(engine, copying[0][1])
            copying.popleft()
    except BaseException as error:
        for ticket, page in copying:
            ticket.wait_copies()
            ticket.fail(error)
            engine.release(page)
        for ticket in left:
            ticket.fail(error)
        raise


def _page(engine: Engine, wait: bool) -> Page | None:
    try:
        return engine.acquire(None if wait else 0.0)
    except TimeoutError:
        return None


# Snapshot of a rank's part of a step, which is written to disk through the engine's pages.


SETTLE_S = 2.0
"""Minimum seconds that the end of a save waits for the thread that started it."""


# [Note: who waits for what] `submit` passes addresses and returns; the engine's threads gather and
# write page after page. A tensor must not change until its pages are gathered: `release` waits for
# this, and is called before writes (`memory.pending.before_write`) and by hooks of every torch
# optimizer's step. Only tensors that these modify are copied after `save` has returned (`guarded`).
# `save` itself waits for the rest (`unguarded`), whose writers call no hook and may not increment
# versions (``.data``, numpy, fused kernels).
#
# [Note: versions] If anything else modifies a guarded tensor, the save fails, because the
# checkpoint would mix two steps. An operation increments the version when it has ended, so a thread
# that compares versions meanwhile sees no change. Versions are therefore compared by the thread
# that called `save`, at its next call or wait, and the step is complete only after that. If that
# thread makes no call for long (an evaluation), versions are compared in the background, after a
# time longer than one operation on the state can take.
#
# [Note: who keeps memory] Under a memory limit, a tensor's memory is freed on eviction, which also
# calls `before_write`. So a snapshot keeps a tensor alive until `release` has waited for it or
# everything has been copied, and no longer: after `submit` it holds addresses, and `_alive` by
# storage.
class Snapshot:
    """A rank's content of one step: its files, and a read lock on the source tensors."""

    def __init__(
        self,
        collected: RankContent,
        rank: int = 0,
        world_size: int = 1,
        caught: Collection[str] = (),
    ) -> None:
        self.stall_s = 0.0
        self.copied_s: float | None = None
        self._begun = time.perf_counter()
        self._lock, self._submitted = threading.Lock(), threading.Event()
        self._caller, self._settled = threading.get_ident(), threading.Event()
        self.violations: list[str] = []
        """Names of tensors that were changed before they had been copied."""
        self._guarded, self._caught = collected.guarded, caught
        self.unguarded: set[int] = set()
        """Storages that may change without notice: release them before `save` returns."""
        self._versions: dict[int, list[tuple[str, Tensor, int]]] = {}
        self._waiting: dict[int, list[Ticket | CopyTicket]] = {}
        self._tickets: dict[str, list[Ticket | CopyTicket]] = {}
        self._copy_tickets: list[CopyTicket] = []
        self._files: dict[str, File] = {}
        self._engine: Engine | None = None
        self._mapped, self._gone = FileMappings(), defaultdict[int, list[tuple[int, int]]](list)
        self.devices: set[torch.device] = set()
        self._leaves: dict[str, tuple[str, Mapping[str, Leaf]]] = {}
        self._sources: dict[str, dict[str, Tensor]] = {}
        self._small = _Small()
        self._alive: dict[int, list[Tensor]] = defaultdict(list)
        for entry, leaves in collected.tensors.items():
            if not leaves and "@" not in entry:
                continue
            file = file_name(entry, rank, world_size)
            self._leaves[file] = entry, leaves
            sources = {key: self._source(entry, key, leaf) for key, leaf in leaves.items()}
            # Tensors that writers may wait for are copied first.
            order = sorted(sources.items(), key=lambda item: not self._is_awaited(item[1]))
            self._sources[file] = dict(order)
        order = self._sources.items()
        self._sources = dict(
            sorted(order, key=lambda item: not any(map(self._is_awaited, item[1].values())))
        )
        self._small.copy()

    def _is_awaited(self, source: Tensor) -> bool:
        return not self._small.has(source) and storage_of(source) in self.unguarded

    @cached_property
    def images(self) -> dict[str, Image]:
        """File layouts by name; created on first use, which is slow for many tensors."""
        return {file: Image(sources, {"format": "pt"}) for file, sources in self._sources.items()}

    @cached_property
    def parts(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {
            entry: {key: part_to_json(file, leaf) for key, leaf in leaves.items()}
            for file, (entry, leaves) in self._leaves.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(image.nbytes for image in self.images.values())

    @cached_property
    def source_bytes(self) -> int:
        return sum(s.nbytes for found in self._sources.values() for s in found.values())

    @cached_property
    def disk_bytes(self) -> int:
        sources = (s for found in self._sources.values() for s in found.values())
        return sum(s.nbytes for s in sources if self._is_mapped(s))

    def _source(self, entry: str, key: str, leaf: Leaf) -> Tensor:
        """Returns the memory to copy from; small tensors are queued for an immediate copy."""
        value = leaf.value.detach() if isinstance(leaf, Part) else leaf
        name, storage = f"{entry}: {key}", storage_of(value)
        guarded = storage in self._guarded and name not in self._caught
        if not value.is_cpu:
            self.devices.add(value.device)
        elif isinstance(leaf, Tensor) and (nbytes := value.nbytes) <= (TINY if guarded else SMALL):
            return self._small.add(value, nbytes)
        owner = leaf.owner if isinstance(leaf, Part) else value
        # A part is stored in the file as a flat row of elements.
        if isinstance(leaf, Part):
            value = value.reshape(leaf.shape if leaf.is_whole else -1)
        if owner is not None:
            self._versions.setdefault(storage, []).append((name, owner, owner._version))
            if name in self._caught or not (guarded or self._is_mapped(value)):
                self.unguarded.add(storage)
        return value

    def _is_mapped(self, value: Tensor) -> bool:
        return value.is_cpu and self._mapped.hold(value.data_ptr(), value.nbytes)

    def pages(self, page_bytes: int) -> int:
        return sum(-(-image.nbytes // page_bytes) for image in self.images.values())

    def submit(self, engine: Engine, folder: Path, copy_stream: CopyStream | None = None) -> None:
        """Creates the files and submits their pages; `release` waits for the copies."""
        self._engine = engine
        try:
            for name, image in self.images.items():
                self._files[name] = engine.create(folder / name, image.nbytes)
            for name, image in self.images.items():
                self._tickets[name] = self._submit_file(
                    engine, self._files[name], image, copy_stream
                )
                # From here on, only addresses are needed; `_alive` holds what is not copied yet.
                image.sources = []
            self._forget_leaves()
        except GulliverError:
            self.close_files(engine)
            raise
        finally:
            self._submitted.set()

    def _forget_leaves(self) -> None:
        assert self.parts is not None
        assert self.source_bytes >= 0
        self._leaves.clear()
        self._sources.clear()
        self._small.forget()

    def _submit_file(
        self, engine: Engine, file: File, image: Image, copy_stream: CopyStream | None
    ) -> list[Ticket | CopyTicket]:
        addresses = [self._small.address_of(source) for source in image.sources]
        views = {
            number: StridedView(address, source.itemsize, tuple(source.shape), source.stride())
            for number, (source, address) in enumerate(zip(image.sources, addresses, strict=True))
            if not source.is_contiguous()
        }
        # Tensors that are already copied need no wait.
        storages = [
            None if address != source.data_ptr() else storage_of(source)
            for source, address in zip(image.sources, addresses, strict=True)
        ]
        for storage, source in zip(storages, image.sources, strict=True):
            if storage is not None:
                self._alive[storage].append(source)
        tickets: list[Ticket | CopyTicket] = []
        for offset, runs in image.pages(engine.page_bytes):
            if copy_stream is None:
                apart = {k: views[n] for k, (n, _, _) in enumerate(runs) if n in views}
                table = np.array(
                    [(begin if n in views else addresses[n] + begin, c) for n, begin, c in runs]
                )
                ticket = engine.stage(file, offset, table, views=apart)
            else:
                sources = [
                    (self._small.held(image.sources[n]), begin, count) for n, begin, count in runs
                ]
                ticket = CopyTicket(copy_stream, file, offset, sources)
                self._copy_tickets.append(ticket)
            tickets.append(ticket)
            if self.disk_bytes and copy_stream is None:
                self._gone[id(ticket)] += [
                    (addresses[n] + begin, count) for n, begin, count in runs if n not in views
                ]
            for storage in {storages[n] for n, _, _ in runs} - {None}:
                assert storage is not None
                self._waiting.setdefault(storage, []).append(ticket)
        return tickets

    def pump(self, engine: Engine) -> None:
        """Copies from the device into pages and queues writes until all are in flight."""
        pump(engine, self._copy_tickets)

    def release(self, storages: set[int] | None) -> None:
        """Waits until the memory of these storages (None: all) has been copied."""
        begun = time.perf_counter()
        self._submitted.wait()
        with self._lock:
            # Tickets are collected under the lock but waited for outside, because the background
            # thread also needs the lock.
            wanted = self._waiting.keys() & storages if storages is not None else self._waiting
            # They stay listed until they are copied, so that other threads wait for them too.
            waited = {key: self._waiting[key] for key in wanted}
        if waited and self._engine is not None:
            # The caller is held up, so it copies, too: copiers run at a lower priority.
            staged = (t for tickets in waited.values() for t in tickets if isinstance(t, Ticket))
            self._engine.copy_now(staged)
        for tickets in waited.values():
            for ticket in tickets:
                _wait_copied(ticket)
        if storages is not None:
            self._compare(storages)
        elif threading.get_ident() == self._caller:
            self._compare(None)
            self._settled.set()
        self._end_read_lock(waited)
        if waited:
            self.stall_s += time.perf_counter() - begun

    def wait_copied(self) -> None:
        """Waits until everything has been copied; called in the background thread."""
        for tickets in self._tickets.values():
            for ticket in tickets:
                _wait_copied(ticket)
                # Pages of mapped files were only read for this; training needs the memory.
                for span in self._gone.pop(id(ticket), ()):
                    self._mapped.release_pages(*span)
        self._end_read_lock(None)
        self.copied_s = time.perf_counter() - self._begun

    def _compare(self, storages: Iterable[int] | None) -> None:
        """Records modifications of copied storages (None: all); call before they are released."""
        dropped = []
        with self._lock:
            for key in tuple(self._versions if storages is None else storages):
                noted = self._versions.pop(key, [])
                self.violations += [name for name, t, version in noted if t._version != version]
                # Freed after the lock is released, because finalizers may need it.
                dropped.append(noted)

    def _end_read_lock(self, storages: Iterable[int] | None) -> None:
        """Releases the read lock on copied storages (None: all)."""
        dropped = []
        with self._lock:
            for key in {*self._waiting, *self._alive} if storages is None else storages:
                dropped.append((self._waiting.pop(key, None), self._alive.pop(key, None)))

    def finish(self, engine: Engine) -> dict[str, FileEntry]:
        """Waits until everything is on disk; returns the file entries by name."""
        entries = {}
        try:
            for name, image in self.images.items():
                for ticket in self._tickets[name]:
                    ticket.wait()
                # Checksums are those of the staged bytes, so data read later is compared with
                # memory.
                engine.sync(self._files[name]).wait()
                checksums = tuple(int(ticket.checksum or 0) for ticket in self._tickets[name])
                entries[name] = FileEntry(image.nbytes, engine.page_bytes, checksums)
        finally:
            self.close_files(engine)
        if self._versions:
            self._settled.wait(max(SETTLE_S, 2 * (self.copied_s or 0.0)))
            self._compare(None)
        if self.violations:
            raise GulliverError(
                f"{self.violations[0]} was modified during the save, but not by its optimizer's "
                "step; call wait_copied() of the checkpointer or the booster before changing it "
                "(later saves copy it before they return)"
            )
        return entries

    def abandon(self, engine: Engine, error: Exception) -> None:
        self._submitted.set()
        for ticket in self._copy_tickets:
            ticket.fail(error)
        self.release(None)
        self.close_files(engine)

    def close_files(self, engine: Engine) -> None:
        for name in tuple(self._files):
            engine.close_file(self._files.pop(name))


class _Small:
    """Small tensors, which are copied together before `save` returns."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._places: dict[int, int] = {}
        self._tensors: list[Tensor] = []
        self._segments: list[tuple[int, int]] = []
        self._filled = 0

    def add(self, tensor: Tensor, nbytes: int) -> Tensor:
        """Queues a tensor for copying; returns the contiguous tensor that identifies the copy."""
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        self._places[id(tensor)] = self._filled
        self._tensors.append(tensor)
        self._segments.append((tensor.data_ptr(), nbytes))
        self._filled += nbytes
        return tensor

    def copy(self) -> None:
        if self._segments:
            self._memory = torch.empty(self._filled, dtype=torch.uint8)
            gather(self._memory.data_ptr(), np.array(self._segments, dtype=np.int64))
            self._segments = []

    def forget(self) -> None:
        self._tensors, self._places = [], {}

    def has(self, source: Tensor) -> bool:
        return id(source) in self._places

    def address_of(self, source: Tensor) -> int:
        """Returns the address of a tensor's copy, or of the tensor if it was not copied."""
        place = self._places.get(id(source))
        return source.data_ptr() if place is None else self._memory.data_ptr() + place

    def held(self, source: Tensor) -> Tensor:
        """Returns the bytes of a tensor's copy, or the tensor if it was not copied."""
        place = self._places.get(id(source))
        return source if place is None else self._memory[place : place + source.nbytes]


def _wait_copied(ticket: Ticket | CopyTicket) -> None:
    try:
        ticket.wait_copied()
    except GulliverError:
        # The save raises the error when it ends; the source is free in any case.
        return
