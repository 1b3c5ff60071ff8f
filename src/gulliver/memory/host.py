"""Page-locked host memory as a tier below GPU memory, with copies on separate streams."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io.engine import BLOCK
from gulliver.memory.manager import Manager
from gulliver.memory.stores import DiskStore, ManagedTensor, Middle, Pages, Transfer, whole_pages
from gulliver.solve.extents import Extents
from gulliver.solve.replacement import Transit

SLAB = 1 << 30
"""Bytes of a slab of page-locked memory; larger for larger tensors."""


# All CUDA streams, events and page-locked memory of the package are created here.


# [Note: order of copies] A copy waits for earlier work of the current stream, and the current
# stream waits for the copy before it uses the memory; both waits are queued on the device. So the
# host never waits, and no memory is written while it is read.
class Copy(Transfer, Protocol):
    """A copy between device and host memory."""

    def synchronize(self) -> None: ...


class Copier(Protocol):
    """Copies between device and host memory."""

    def pinned(self, nbytes: int) -> Tensor:
        """Allocates a flat uint8 tensor of page-locked host memory."""
        ...

    def lock_pages(self, memory: Tensor) -> None: ...

    def unlock_pages(self, memory: Tensor) -> None: ...

    def mark(self) -> Any: ...

    def copy(self, target: Tensor, source: Tensor, incoming: bool, after: Any = None) -> Copy:
        """Starts a copy to the device (`incoming`) or from it; waits for the event `after`."""
        ...

    def synchronize(self) -> None: ...


def cuda_runtime() -> Any:
    return torch.cuda.cudart()


class CudaTransfer:
    """A copy on a stream; `wait` makes the current stream wait."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    @property
    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaCopier:
    """Copies on two streams, one per direction, as the bus transfers in both at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgoing, self._incoming = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def lock_pages(self, memory: Tensor) -> None:
        # `pinned` takes powers of two.
        if cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0) != 0:
            raise GulliverError(
                f"the system cannot lock {memory.numel()} more bytes of host memory: use a "
                "smaller host_limit, or raise ulimit -l"
            )

    def unlock_pages(self, memory: Tensor) -> None:
        cuda_runtime().cudaHostUnregister(memory.data_ptr())

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(
        self, target: Tensor, source: Tensor, incoming: bool, after: Any = None
    ) -> CudaTransfer:
        # Nothing here keeps source and target alive. Host memory belongs to a store. Device memory
        # is held by its owner until `CudaTransfer.wait`, which queues the wait on the current
        # stream: when the caching allocator reuses the memory there, the copy has ended.
        stream = self._incoming if incoming else self._outgoing
        stream.wait_event(self.mark() if after is None else after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return CudaTransfer(event, self._device)

    def synchronize(self) -> None:
        self._outgoing.synchronize()


class HostStore:
    """A store in slabs of page-locked host memory."""

    # Pinned memory is allocated in powers of two. So slabs are powers of two and are shared by
    # tensors: rounding wastes only the end of the last slabs.

    name = "host"
    in_stream = True
    middle = Middle()

    def __init__(
        self, capacity: int, device: torch.device | str = "cuda", copier: Copier | None = None
    ) -> None:
        if copier is None and torch.device(device).type != "cuda":
            raise GulliverError(
                f"pinned host memory needs a GPU, not {device}: without a GPU, use a disk"
            )
        self.capacity, self.used, self.pinned = capacity, 0, 0
        self._copier: Copier = copier or CudaCopier(torch.device(device))
        self._slabs: list[Tensor] = []
        self._starts: list[int] = []
        self._extents = Extents()

    def allocate(self, nbytes: int, owner: ManagedTensor | None = None) -> int:
        size = whole_pages(nbytes)
        found = self._extents.take(size)
        if found is None:
            self._add_slab(size)
            found = self._extents.take(size)
        assert found is not None
        self.used += size
        return self._starts[found[0]] + found[1]

    def free(self, offset: int, nbytes: int) -> None:
        slab, begin = self._place(offset)
        self._extents.give(slab, begin, whole_pages(nbytes))
        self.used -= whole_pages(nbytes)

    def read(self, offset: int, into: Tensor) -> Transfer:
        return self._copier.copy(into, self._bytes(offset, into.numel()), incoming=True)

    def write(self, offset: int, data: Tensor) -> Transfer:
        return self._copier.copy(self._bytes(offset, data.numel()), data, incoming=False)

    def mapped(self, offset: int, nbytes: int, write: bool = False) -> Tensor:
        self._copier.synchronize()
        return self._bytes(offset, nbytes)

    def close(self) -> None:
        self._copier.synchronize()
        self._slabs.clear()

    def _add_slab(self, size: int) -> None:
        left = self.capacity - self.pinned
        least = 1 << (size - 1).bit_length()
        if least > left:
            raise GulliverError(
                f"the host memory of {self.capacity} bytes is full: pinned memory is allocated in "
                f"powers of two and needs {least} bytes, but only {left} are free; raise host_limit"
            )
        slab = max(least, min(SLAB, 1 << (left.bit_length() - 1)))
        self._extents.add(len(self._slabs), slab)
        self._starts.append(self.pinned)
        self._slabs.append(self._copier.pinned(slab))
        self.pinned += slab

    def _place(self, offset: int) -> tuple[int, int]:
        slab = bisect_right(self._starts, offset) - 1
        return slab, offset - self._starts[slab]

    def _bytes(self, offset: int, nbytes: int) -> Tensor:
        slab, begin = self._place(offset)
        return self._slabs[slab][begin : begin + nbytes]


# Page-locked host memory behind a GPU, and a disk behind that: three tiers in all.
#
# Host memory is also a fast tier, relative to the disk, and has its own manager (`Manager`), which
# keeps it within its budget: it evicts the tensor with the farthest next use to the disk, and reads
# ahead of the device's loads. The order of use follows from the device's moves alone
# (`solve.Transit`).


# [Note: who waits for whom] Copies between device and host run on streams, in the order of the
# device's work; the disk has no streams. Three dependencies are enforced by waiting on the host:
#
# 1. A load is copied to the device once the disk has read it: each call of `advance` checks this.
# 2. Data are written to disk once the device has copied them to the host: `DeferredWrite`.
# 3. Host memory is reused once all copies to and from it have ended: `CopiedPages.wait_unused`.
#
# There are no circular waits. Device memory is available immediately (`in_stream`), so a load waits
# only for the disk. A write waits for host memory, which waits for the disk and for earlier copies
# to the device.
class CopiedPages(Pages):
    """Page-locked buffers, which track the copies in flight to and from them."""

    def __init__(self, copier: Copier) -> None:
        super().__init__(torch.device("cpu"))
        self.keeps = False  # locked pages cannot be moved
        self._copier, self._lock = copier, threading.Lock()
        self._copies: dict[int, list[Copy]] = {}

    def fresh(self, size: int) -> Tensor:
        memory = super().fresh(size)
        self._copier.lock_pages(memory)
        return memory

    def drop(self, memory: Tensor) -> None:
        self._copier.unlock_pages(memory)
        super().drop(memory)

    def add(self, memory: Tensor, copy: Copy) -> None:
        with self._lock:
            self._copies.setdefault(memory.data_ptr(), []).append(copy)

    def copies(self, memory: Tensor) -> list[Copy]:
        with self._lock:
            found = [c for c in self._copies.pop(memory.data_ptr(), ()) if not c.done]
            if found:
                self._copies[memory.data_ptr()] = found
            return [*found]

    def wait_unused(self, memory: Tensor) -> None:
        for copy in self.copies(memory):
            copy.synchronize()

    def close(self) -> None:
        for room in self._rooms.values():
            self._copier.unlock_pages(room.shown(room.nbytes))
        self._rooms.clear()


class DeferredWrite:
    """A disk write that starts once the device has copied its data to the host."""

    def __init__(self, disk: DiskStore, offset: int, data: Tensor, copies: list[Copy]) -> None:
        self._disk, self._offset, self._data, self._copies = disk, offset, data, copies
        self._lock = threading.Lock()
        self._write: Transfer | None = None

    @property
    def done(self) -> bool:
        """Whether the write has finished; starts it if its data have arrived."""
        if self._write is None and all(copy.done for copy in self._copies):
            self._begin()
        return self._write is not None and self._write.done

    def wait(self) -> None:
        for copy in self._copies:
            copy.synchronize()
        self._begin().wait()

    def _begin(self) -> Transfer:
        with self._lock:
            if self._write is None:
                self._write = self._disk.write(self._offset, self._data)
            return self._write


class CopiedDisk:
    """A disk below host memory that a device copies to and from."""

    name = "disk"
    in_stream = False
    middle = Middle()

    def __init__(self, disk: DiskStore, pages: CopiedPages) -> None:
        self._disk, self._pages = disk, pages
        # The caller holds it while waiting; a longer reference would keep its memory allocated.
        self._late = list[weakref.ref[DeferredWrite]]()
        self.capacity = disk.capacity

    @property
    def used(self) -> int:
        return self._disk.used

    def allocate(self, nbytes: int, owner: ManagedTensor | None = None) -> int:
        return self._disk.allocate(nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        self._disk.free(offset, nbytes)

    def read(self, offset: int, into: Tensor) -> Transfer:
        return self._disk.read(offset, into)

    def write(self, offset: int, data: Tensor) -> Transfer:
        copies = self._pages.copies(data)
        if not copies:
            return self._disk.write(offset, data)
        late = DeferredWrite(self._disk, offset, data, copies)
        self._late.append(weakref.ref(late))
        return late

    def advance(self) -> None:
        left = list[weakref.ref[DeferredWrite]]()
        for found in self._late:
            late = found()
            if late is not None and not late.done:
                left.append(found)
        self._late = left

    def mapped(self, offset: int, nbytes: int, write: bool = False) -> Tensor:
        return self._disk.mapped(offset, nbytes)

    def close(self) -> None:
        self._disk.close()


class StagedRead:
    """A load from host memory, or from the disk through host memory."""

    def __init__(self, store: HostDiskStore, key: int, into: Tensor, after: Any) -> None:
        self._store, self.key, self.into, self.after = store, key, into, after
        self.copy: Copy | None = None
        self.error: GulliverError | None = None

    @property
    def done(self) -> bool:
        self._store.advance()
        return self.error is not None or (self.copy is not None and self.copy.done)

    def wait(self) -> None:
        """Waits for the disk; the device's current stream waits for the copy."""
        self._store.send(self)
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # the traceback holds this frame, and so the callers' variables
        assert self.copy is not None
        self.copy.wait()


class HostDiskStore(Middle):
    """A store in page-locked host memory, which overflows to a disk."""

    name = "host memory and disk"
    in_stream = True

    def __init__(
        self,
        host: int,
        disk: DiskStore,
        device: torch.device | str = "cuda",
        copier: Copier | None = None,
    ) -> None:
        host = host // BLOCK * BLOCK
        self._copier: Copier = copier or CudaCopier(torch.device(device))
        self._pages = CopiedPages(self._copier)
        self._disk = CopiedDisk(disk, self._pages)
        self.host = Manager(host, "cpu", self._disk, pages=self._pages)
        self.transit = Transit(self, disk.capacity)
        self.capacity = host + disk.capacity
        self._objects: dict[Hashable, ManagedTensor] = {}
        self._reads: dict[Hashable, StagedRead] = {}
        self._stored: dict[Hashable, bool] = {}
        weakref.finalize(self, self._pages.close).atexit = False

    @property
    def middle(self) -> Middle:
        """The store itself, which decides which tensors are in host memory."""
        return self

    @property
    def used(self) -> int:
        return self.transit.used

    def allocate(self, nbytes: int, owner: ManagedTensor | None = None) -> int:
        """Allocates storage for a tensor of the device; returns the tensor's number."""
        assert owner is not None, "objects keep their position from step to step"
        number = owner.number
        if number not in self._objects:
            about = owner.name, owner.kind, nbytes, torch.uint8
            self._objects[number] = self.host.add(*about, brief=owner.brief)
            self.transit.add(number, nbytes)
        self.transit.fill(number)
        return number

    def free(self, offset: int, nbytes: int) -> None:
        self.transit.forget(offset)

    def read(self, offset: int, into: Tensor) -> StagedRead:
        self.transit.expect(offset)
        read = self._reads[offset] = StagedRead(self, offset, into, self._copier.mark())
        self.advance()
        return read

    def write(self, offset: int, data: Tensor) -> Transfer:
        """Starts a copy from the device, after waiting for room in host memory."""
        self.transit.begin_write(offset)
        memory = self._arrived(offset, fresh=True)
        copy = self._copier.copy(memory, data, incoming=False)
        self._pages.add(memory, copy)
        self.transit.end_write(offset)
        self.advance()
        return copy

    def advance(self) -> None:
        for read in [*self._reads.values()]:
            if self.host.has_arrived(self._objects[read.key]):
                self.send(read)
        self._disk.advance()

    def send(self, read: StagedRead) -> None:
        """Waits for the disk, then starts the copy to the device; stores disk errors in `read`."""
        if self._reads.get(read.key) is not read:
            return
        del self._reads[read.key]
        try:
            memory = self._arrived(read.key)
        except GulliverError as error:
            read.error = error
            self.transit.lost(read.key)
            return
        read.copy = self._copier.copy(read.into, memory, incoming=True, after=read.after)
        self._pages.add(memory, read.copy)

    def mapped(self, offset: int, nbytes: int, write: bool = False) -> Tensor:
        if write and self.transit.needs_memory(offset):
            self.transit.begin_write(offset)
            self._arrived(offset, fresh=True)
            self.transit.end_write(offset)
        self._copier.synchronize()
        return self.host.view(self._objects[offset], write)[:nbytes]

    def close(self) -> None:
        for read in [*self._reads.values()]:
            self.send(read)
        self._copier.synchronize()
        self.host.close()
        self._pages.close()

    def _arrived(self, key: Hashable, fresh: bool = False) -> Tensor:
        managed = self._objects[key]
        self.host.arrive(managed, self._stored.pop(key), fresh)
        assert managed.memory is not None
        return managed.memory

    # Events of the manager of the device's memory.

    def expect(self, number: int) -> None:
        self.transit.expect(number)

    def end_prefetch(self, number: int) -> None:
        self.transit.end_prefetch(number)

    def remove(self, number: int) -> None:
        if number in self._objects:
            self.transit.remove(number)
            self.host.remove(self._objects.pop(number))

    def end_step(self) -> None:
        self.host.end_step()

    def raise_write_error(self) -> None:
        self.advance()
        self.host.raise_write_error()

    def stats(self) -> dict[str, Any]:
        return self.host.stats()

    # Operations that `Transit` requests.

    def use(self, key: Hashable, fresh: bool) -> None:
        self._stored[key] = self.host.begin_use(self._objects[key], fresh=fresh)

    def done(self, key: Hashable) -> None:
        read = self._reads.get(key)
        if read is not None:
            self.send(read)
        if read is None or read.error is None:
            self.host.done(self._objects[key])

    def discard(self, key: Hashable) -> None:
        self.host.discard(self._objects[key])
