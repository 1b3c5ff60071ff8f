"""Executes residency decisions: allocates and frees memory, and overlaps transfers with compute."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from gulliver._compat import storage_users
from gulliver.errors import GulliverError
from gulliver.memory.buffers import ByteCounter
from gulliver.memory.pending import before_write
from gulliver.memory.stores import ManagedTensor, Pages, Residency, Store, whole_pages
from gulliver.solve.replacement import InsufficientMemory

PATIENCE_S = 1.0
COUNTS = ("loads", "cancelled", "writes", "bytes_in", "bytes_cancelled", "bytes_out")


_living: WeakSet[Traffic] = WeakSet()


# [Note: bytes in flight] For decisions, an evicted tensor is gone and a loaded one is present. In
# fact, a write holds its memory until it has ended, and a read has to wait for memory. So loads
# wait in a queue, in the order of the decisions, and the first one takes memory as soon as enough
# writes have ended. A thread, which exists only while the queue waits, takes care of that. A caller
# that needs a tensor, or memory, waits for the writes in its way, oldest first. Decisions always
# fit in the end, so no wait is endless; and held memory, including cached memory, never exceeds the
# budget.
#
# [Note: failures] A failed write is retried before its error is raised, and the content stays in
# the fast tier until a write succeeds. A failed read leaves its tensor in the store. So an error is
# raised at the next use, and nothing is lost.
@atexit.register
def end_workers() -> None:
    """Ends all worker threads at exit, before I/O engines are closed."""
    for traffic in [*_living]:
        traffic.end_worker()


class BufferStillReferenced(InsufficientMemory):
    """Views still refer to freed memory, and the budget has no other room."""


class Traffic:
    """Manages the memory of the fast tier, and transfers to and from the store."""

    def __init__(
        self,
        budget: int,
        device: torch.device,
        store: Store | None,
        counter: ByteCounter,
        lock: threading.RLock,
        pages: Pages | None = None,
    ) -> None:
        self.budget, self.device, self.store, self.counter = budget, device, store, counter
        # Bytes of memory held, including memory cached for reuse.
        self.held = 0
        # Numbers of loads, cancelled loads and writes, their bytes, and seconds of waiting.
        self.moved: dict[str, Any] = dict.fromkeys(COUNTS, 0)
        self.moved["seconds_waited"] = 0.0
        self._lock = lock
        self._queue: deque[ManagedTensor] = deque()
        self._leaving: deque[ManagedTensor] = deque()
        self._failed: list[tuple[ManagedTensor, GulliverError]] = []
        self._free: dict[int, list[tuple[Tensor, bool]]] = {}
        self._pages = pages or Pages(device)
        self._worker: threading.Thread | None = None
        self._ends, self._process = False, os.getpid()
        _living.add(self)

    # Objects

    def bring(self, managed: ManagedTensor, reads: bool, zero: bool = False) -> None:
        managed.reads, managed.zero = reads, zero
        if managed.residency is not Residency.LEAVING:
            managed.enter(Residency.QUEUED)
        self._queue.append(managed)
        self._advance()

    def send(self, managed: ManagedTensor) -> None:
        managed.enter(Residency.LEAVING)
        self._write(managed)

    def drop(self, managed: ManagedTensor) -> None:
        if managed.residency is not Residency.LEAVING:
            with suppress(GulliverError):  # dropped data need not be readable
                self.wait_arrived(managed)
        if managed in self._queue and managed.reads:
            self.moved["cancelled"] += 1
            self.moved["bytes_cancelled"] += managed.size
        self.cancel(managed)
        if managed.residency is Residency.LEAVING:  # nor writable
            self._failed = [(other, e) for other, e in self._failed if other is not managed]
            if managed in self._leaving:
                self._leaving.remove(managed)
                with suppress(GulliverError):
                    self._wait(managed)
            managed.transfer = None
        if managed.residency is not Residency.AWAY:
            self._release(managed)

    def cancel(self, managed: ManagedTensor) -> None:
        if managed in self._queue:
            self._queue.remove(managed)
        if managed.residency is Residency.QUEUED:
            managed.enter(Residency.AWAY)

    def wait_arrived(self, managed: ManagedTensor) -> None:
        if managed in self._queue:
            self._queue.remove(managed)  # other loads can wait
            self._queue.appendleft(managed)
            self._advance(managed)
        if managed.residency is Residency.ARRIVING:
            try:
                self._wait(managed)
            except GulliverError:
                self._release(managed)
                raise
            managed.enter(Residency.HERE)
        elif managed.residency is Residency.LEAVING:
            self.raise_write_error()
            if managed.residency is Residency.LEAVING:
                self._finish(managed)

    def wait_evicted(self, managed: ManagedTensor) -> None:
        """Waits until a tensor is evicted; it stays in the fast tier if its write fails."""
        if managed in self._leaving:
            with suppress(GulliverError):
                self._finish(managed, again=False)

    def has_arrived(self, managed: ManagedTensor) -> bool:
        """Whether a load has ended, successfully or not; does not wait."""
        self._advance()
        return managed.residency is Residency.HERE or (
            managed.residency is Residency.ARRIVING and managed.done
        )

    def unwritten(self) -> list[ManagedTensor]:
        """Returns tensors whose write failed and that were not loaded again."""
        return [managed for managed, _ in self._failed if managed not in self._queue]

    def keep(self, managed: ManagedTensor) -> None:
        """Keeps a tensor whose write failed in the fast tier."""
        self._failed = [(other, e) for other, e in self._failed if other is not managed]
        managed.enter(Residency.HERE)

    def raise_write_error(self) -> None:
        """Raises the error of a write that failed after the last call, and retries the write."""
        while self._leaving and self._leaving[0].done:
            with suppress(GulliverError):
                self._finish(self._leaving[0], again=False)
        if self._failed:
            failed, self._failed = self._failed, []
            for managed in [managed for managed, _ in failed]:
                self._write(managed)
            try:
                raise failed[0][1]
            finally:
                # The error holds this frame, which must not hold the error: the cycle would keep
                # the callers' tensors until garbage collection.
                del failed

    # Memory

    def memory(self, size: int) -> Tensor:
        """Allocates whole pages, for which the budget already has room."""
        found = self._memory(size, wait=True)
        assert found is not None
        return found

    def reserve(self, size: int) -> None:
        """Accounts for memory allocated elsewhere, for which the budget already has room."""
        while not self._trim(size):
            self._wait_oldest_write(size)
        self.held += size

    def give(self, memory: Tensor, trusted: bool = False) -> None:
        self._free.setdefault(memory.numel(), []).append((memory, trusted))

    def leave(self, memory: Tensor) -> None:
        self.held -= memory.numel()
        self._pages.forget(memory)

    def fit(self) -> None:
        while not self._trim(0):
            self._wait_oldest_write(0)
        self._advance()

    def close(self) -> None:
        for managed in (*self._queue,):
            self.cancel(managed)
        while self._leaving:
            with suppress(GulliverError):
                self._finish(self._leaving[0], again=False)

    def _memory(self, size: int, wait: bool) -> Tensor | None:
        while True:
            free = self._free.get(size, ())
            for number, (memory, trusted) in enumerate(free):
                if trusted or storage_users(memory) == 1:
                    assert isinstance(free, list)
                    free.pop(number)
                    self._free_of_users(memory)
                    return memory
            if self.held + size > self.budget and (found := self._resized(size)) is not None:
                return found
            if self._trim(size):
                self.held += size
                return self._pages.fresh(size)
            if not wait and not self._is_write_done():
                return None
            if wait:
                self._wait_oldest_write(size)

    def _free_of_users(self, memory: Tensor) -> None:
        # The manager's lock is held meanwhile. That is safe, because threads that copy a snapshot
        # read memory that they already have and never take this lock.
        before_write([memory])
        self._pages.wait_unused(memory)

    def _resized(self, size: int) -> Tensor | None:
        """Resizes the cached memory of the closest size; None if nothing is cached."""
        # A buffer of more than twice the size would return more pages than a new one needs.
        near = [(kept, many) for kept, many in self._free.items() if kept < 2 * size]
        found = [
            (abs(kept - size), kept, number)
            for kept, many in near
            for number, (memory, trusted) in enumerate(many)
            if self._pages.fits(memory, size) and (trusted or storage_users(memory) == 1)
        ]
        if not found:
            return None
        _, kept, number = min(found)
        taken = self._free[kept].pop(number)
        if not self._trim(size - kept):
            self._free.setdefault(kept, []).append(taken)
            return None
        self._free_of_users(taken[0])
        self.held += size - kept
        return self._pages.resized(taken[0], size)

    def _trim(self, size: int) -> bool:
        """Frees cached memory until `size` more bytes fit; False if they do not."""
        rest = list[tuple[Tensor, bool]]()
        for kept in sorted(self._free, reverse=True):
            many = self._free[kept]
            while (short := self.held + size - self.budget) > 0:
                # Memory with remaining views would not be freed.
                place = next((n for n, found in enumerate(many) if self._is_freed(*found)), None)
                if place is None:
                    break
                memory, trusted = many.pop(place)
                self._free_of_users(memory)
                left = kept - whole_pages(short)
                if left > 0 and self._pages.fits(memory, left):
                    rest.append((self._pages.resized(memory, left), trusted))
                else:
                    self._pages.drop(memory)
                    left = 0
                self.held -= kept - left
            if not many:
                del self._free[kept]
        for memory, trusted in rest:
            self.give(memory, trusted)
        return self.held + size <= self.budget

    def _is_freed(self, memory: Tensor, trusted: bool) -> bool:
        if trusted and storage_users(memory) > 1:
            self._free_of_users(memory)
        return (trusted and self._pages.keeps) or storage_users(memory) == 1

    def _wait_oldest_write(self, size: int) -> None:
        """Waits for the oldest write in flight, to free its memory."""
        if self._failed:
            self.raise_write_error()
        if not self._leaving and not self._is_released_soon():
            kept = sum(size * len(many) for size, many in self._free.items())
            raise BufferStillReferenced(
                f"the memory budget of {self.budget} bytes is too small because live views still "
                f"reference {kept} freed bytes; drop these views, or use at least "
                f"{self.held + size}",
                self.held + size,
            )
        if self._leaving:
            self._finish(self._leaving[0])

    def _is_released_soon(self) -> bool:
        """Whether references to memory, such as a sending thread's, end soon; polls for it."""
        # Such a thread drops its tensor shortly after the message has arrived, without
        # notification. So this polls for as long as a slow message may take.
        due = time.monotonic() + PATIENCE_S
        while time.monotonic() < due:
            if any(storage_users(m) == 1 for many in self._free.values() for m, _ in many):
                return True
            time.sleep(0.001)
        return False

    def _is_write_done(self) -> bool:
        """Whether a write has ended and its memory is freed; does not wait."""
        if not self._leaving or not self._is_over(self._leaving[0]):
            return False
        with suppress(GulliverError):
            self._finish(self._leaving[0], again=False)
        return True

    # Transfers

    def _advance(self, until: ManagedTensor | None = None) -> None:
        """Starts queued loads while memory is available, or up to a required tensor."""
        while self._queue:
            managed = self._queue[0]
            memory = None
            if self._is_gone(managed, wait=managed is until):
                memory = self._memory(managed.size, wait=managed is until)
            if memory is None:
                self._start_worker()
                return
            self._queue.popleft()
            self._begin(managed, memory)

    def _is_gone(self, managed: ManagedTensor, wait: bool) -> bool:
        """Whether the eviction of a tensor has ended; with `wait`, waits for it."""
        if managed.residency is Residency.LEAVING:
            if wait:
                self.raise_write_error()
            if managed in self._leaving and (wait or self._is_over(managed)):
                with suppress(*(() if wait else (GulliverError,))):
                    self._finish(managed, again=wait)
            if managed.residency is Residency.LEAVING:
                return False
        if managed.residency is Residency.AWAY:
            managed.enter(Residency.QUEUED)
        return True

    def _begin(self, managed: ManagedTensor, memory: Tensor) -> None:
        managed.memory = memory
        self.counter.add(managed.kind, managed.nbytes)
        if managed.reads:
            assert self.store is not None
            assert managed.offset is not None
            managed.enter(Residency.ARRIVING)
            managed.transfer = self.store.read(managed.offset, memory)
            self.moved["loads"] += 1
            self.moved["bytes_in"] += managed.size
        else:
            managed.enter(Residency.HERE)
            if managed.zero:
                memory.zero_()

    def _write(self, managed: ManagedTensor) -> None:
        """Starts a write; if the store is full, the write counts as failed."""
        assert self.store is not None
        assert managed.memory is not None
        try:
            if managed.offset is None:
                managed.offset = self.store.allocate(managed.size, managed)
            managed.transfer = self.store.write(managed.offset, managed.memory)
        except GulliverError as error:
            self._failed.append((managed, error))
            return
        self.moved["writes"] += 1
        self.moved["bytes_out"] += managed.size
        self._leaving.append(managed)

    def _finish(self, managed: ManagedTensor, again: bool = True) -> None:
        try:
            self._wait(managed)
        except GulliverError as error:
            self._leaving.remove(managed)
            if again:
                self._write(managed)
            else:
                self._failed.append((managed, error))
            raise
        self._leaving.remove(managed)
        self._release(managed)

    def _is_over(self, managed: ManagedTensor) -> bool:
        assert self.store is not None
        return self.store.in_stream or managed.done

    def _wait(self, managed: ManagedTensor) -> None:
        assert managed.transfer is not None
        begun = time.perf_counter()
        try:
            managed.transfer.wait()
        except GulliverError:
            managed.transfer = None
            raise
        finally:
            self.moved["seconds_waited"] += time.perf_counter() - begun
        managed.transfer = None  # an interrupted one is still in flight

    def _release(self, managed: ManagedTensor) -> None:
        memory, managed.memory = managed.memory, None
        assert memory is not None
        managed.enter(Residency.AWAY)
        self.counter.add(managed.kind, -managed.nbytes)
        if managed.given:
            self.leave(memory)
        else:
            self.give(memory, trusted=not managed.viewed)
        managed.viewed = managed.given = False

    # The thread that waits if no caller does

    def end_worker(self) -> None:
        """Stops the worker thread; a forked child has none."""
        if self._process == os.getpid():
            with self._lock:
                self._ends = True

    def _start_worker(self) -> None:
        # One thread for each backlog, which ends with it: an idle manager has none, so there is
        # nothing to stop before a fork, at exit, or when the manager is dropped.
        if self._worker is None and self._leaving and not self._failed and not self._ends:
            self._worker = threading.Thread(target=self._work, name="gulliver-memory", daemon=True)
            self._worker.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._ends:
                    return
                self._advance()
                if not self._queue or not self._leaving or self._failed:
                    self._worker = None
                    return
                # A tensor that is loaded again must first be fully evicted; others need memory.
                head = self._queue[0]
                transfer = (head if head in self._leaving else self._leaving[0]).transfer
            assert transfer is not None
            with suppress(GulliverError):
                transfer.wait()
