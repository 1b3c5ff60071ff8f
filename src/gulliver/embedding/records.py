"""Stores the per-row data of a table in host memory or on disk.

A record is one row of every column: the weight, and each per-row optimizer state.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gulliver.io.files import require_space
from gulliver.memory.pending import before_write
from gulliver.memory.stores import check_disk_folder
from gulliver.solve.rows import CacheTooSmall, RowPlan, RowReplacement, RowRequest

WEIGHT = "weight"


class RowStorage:
    """Allocates columns in host memory, or in files that are deleted when the process ends."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        if self.folder is not None:
            check_disk_folder(self.folder)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocates zeros; pages are committed on first write."""
        if self.folder is None:
            return torch.zeros(shape, dtype=dtype)
        count = int(torch.Size(shape).numel())
        require_space(self.folder, count * dtype.itemsize)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="gulliver-rows-") as file:
            # Unlinked once mapped: nothing is left on disk, however the process ends.
            flat = torch.from_file(file.name, shared=True, size=max(count, 1), dtype=dtype)
        return flat[:count].view(shape)


class Column:
    """One kind of per-row data, for all rows."""

    def __init__(self, storage: RowStorage, values: Tensor) -> None:
        self._storage, self._values = storage, values

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    @property
    def row_bytes(self) -> int:
        return self._values.nbytes // max(len(self._values), 1)

    def read(self, rows: Tensor) -> Tensor:
        return self._values.index_select(0, rows)

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Overwrites rows, which must be distinct."""
        before_write([self._values])
        self._values.index_copy_(0, rows, values)

    def whole(self) -> Tensor:
        """Returns all rows without a copy."""
        return self._values

    def fill(self, values: Tensor) -> None:
        before_write([self._values])
        self._values.copy_(values)

    def grow(self, values: Tensor) -> None:
        before, shape = self._values, (len(self._values) + len(values), *values.shape[1:])
        self._values = self._storage.zeros(shape, before.dtype)
        self._values[: len(before)], self._values[len(before) :] = before, values


# The record store: moves rows of a table and their optimizer state between host and device.
#
# A record is a row of the weight and of every per-row optimizer state. All records are stored in
# columns (`records.py`); the hot ones are copied to *slots* on the device and updated there.
# `gulliver.solve.rows.RowReplacement` selects them. Start with `begin`, which prepares a batch for
# use.


Records = dict[str, Tensor]


# [Note: two threads] The *planner* sorts announced batches and makes their replacement decisions,
# in order. The *mover* reads and writes host rows, in the order of these decisions. While a batch
# is computed, the next one is planned and its rows are copied into a staging buffer on the device.
# They move into their slots after the optimizer step of the current batch: until then the rows that
# they replace are in use. Evicted rows are copied out of the cache at that moment and written back
# after the next batch is fetched. Because the mover is one queue, a row that is evicted and then
# needed again is read after it was written.
#
# [Note: exactness] The contents of the cache never change the result: a row has one valid copy, in
# its slot if it has one, else in its columns. So replacement decisions affect speed only.
@dataclass
class IdBatch:
    """The ids of a batch, and the rows that it requests."""

    # Flat, on the host.
    ids: Tensor
    # Index of each id in the rows of the request.
    inverse: Tensor | None = None
    # Rows of the batch, sorted.
    request: RowRequest | None = None


@dataclass
class PrefetchedBatch:
    """A batch that is planned and fetched while the previous one is computed."""

    batch: IdBatch
    found: Future[tuple[RowPlan, Future[Records]]]


@dataclass
class RecordTraffic:
    """Bytes and rows moved so far."""

    # Bytes read from the columns.
    read: int = 0
    # Bytes written to them.
    written: int = 0
    # Unmodified rows that were evicted without being written.
    clean: int = 0
    # Seconds spent reading rows and copying them to the device.
    fetching: float = 0.0
    # Seconds that batches waited for them.
    waiting: float = 0.0

    @property
    def hidden(self) -> float:
        return max(1.0 - self.waiting / self.fetching, 0.0) if self.fetching else 1.0


class RecordStore:
    """Rows of a table, with hot rows in slots on a device."""

    def __init__(
        self,
        columns: dict[str, Column],
        replacement: RowReplacement,
        rows: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        spare: bool,
    ) -> None:
        self.columns, self.replacement, self.rows = columns, replacement, rows
        self.slots, self.moved = replacement.slots, RecordTraffic()
        # Slots, (slots, dim), a parameter; includes the padding slot at the end.
        self.weight = nn.Parameter(torch.zeros(self.slots + spare, dim, dtype=dtype, device=device))
        kind = torch.int64 if rows > 2**31 else torch.int32
        self._row_of_slot = torch.zeros(self.slots, dtype=kind, device=device)
        self._dirty = np.zeros(self.slots, bool)
        self._states: Callable[[], Mapping[str, Tensor]] = dict
        self._waiting: list[tuple[Tensor, Tensor]] = []
        # Slots of the rows that got gradients in the last backward, in its order.
        self.last_slots = torch.zeros(0, dtype=torch.int64)
        self._pinned: list[NDArray[np.int64]] = []
        self._queue: deque[IdBatch] = deque()
        self._announced: deque[Future[None]] = deque()
        self._ahead: PrefetchedBatch | None = None
        self._under_way: deque[Future[None]] = deque()
        self._planner = ThreadPoolExecutor(1, "gulliver-rows-plan")
        self._mover = ThreadPoolExecutor(1, "gulliver-rows-move")
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    # Batches

    def announce(self, ids: Tensor) -> None:
        """Queues the ids of an upcoming batch; batches must be used in the same order."""
        batch = IdBatch(_on_host(ids))
        self._queue.append(batch)
        self._announced.append(self._planner.submit(self._sort, batch, True))

    def begin(self, ids: Tensor, changes: bool = False, waits: bool = False) -> Tensor:
        """Loads the rows of a batch into slots; returns the slot of each id."""
        self._raise_failures()
        batch = self._next(_on_host(ids))
        plan, fetched = self._decided(batch)
        request = plan.request
        staged = self._take_staged(fetched, plan)
        self._leave(plan)
        slots = torch.from_numpy(plan.slots).to(self.weight.device)
        self._enter(slots[torch.from_numpy(plan.missing).to(slots.device)], staged, plan)
        if batch is (self._queue[0] if self._queue else None):
            self._queue.popleft()
            self._announced.popleft()
        if changes:
            self._dirty[plan.slots] = True
        if waits:
            self._pinned.append(plan.slots)
            rows = torch.from_numpy(request.rows).to(slots.device)
            self._waiting.append((rows, slots))
        self._ahead = None
        self._under_way.append(self._planner.submit(self.replacement.commit, plan))
        self._look_ahead()
        assert batch.inverse is not None, "the batch is already sorted"
        return slots[batch.inverse.to(slots.device)]

    def finish_lookups(self, last: int | None = None) -> None:
        """Unpins the rows of all batches so far, or of the `last` ones, after their step."""
        keep = 0 if last is None else max(len(self._pinned) - last, 0)
        del self._pinned[keep:], self._waiting[keep:]

    def flush(self) -> None:
        """Writes all modified rows to their columns; they stay in their slots."""
        self.drain()
        changed = np.flatnonzero(self._dirty)
        self._dirty[changed] = False
        self._write_back(changed)
        self.drain()

    def forget(self) -> None:
        """Empties the slots without writing them back, because the columns were overwritten."""
        self.drain()
        self._ahead = None
        self.finish_lookups()
        self._dirty[:] = False
        self._planner.submit(self.replacement.forget).result()
        self._look_ahead()

    def grow(self, weight: Tensor, states: Mapping[str, Tensor]) -> None:
        """Appends records; call `flush` first."""
        for name, values in {WEIGHT: weight, **states}.items():
            self.columns[name].grow(values)
        self.rows += len(weight)
        self._planner.submit(self.replacement.grow, self.rows).result()

    def use_states(self, states: Callable[[], Mapping[str, Tensor]]) -> None:
        """Registers the device states that belong to the records, by column."""
        self._states = states

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def device_bytes(self) -> int:
        states = sum(state.nbytes for state in self._states().values())
        return self.weight.nbytes + states + self._row_of_slot.nbytes

    @property
    def host_bytes(self) -> int:
        decisions = self.replacement.index.nbytes + self.replacement.nbytes
        return sum(column.nbytes for column in self.columns.values()) + decisions

    def rows_in(self, slots: Tensor) -> Tensor:
        return self._row_of_slot.index_select(0, slots).long()

    def slots_in_use(self, rows: Tensor) -> Tensor:
        """Returns the slots of rows used by batches that are waiting for a step."""
        known, slots = self._waiting[0]
        if len(self._waiting) > 1:
            known, order = torch.cat([rows for rows, _ in self._waiting]).sort()
            slots = torch.cat([slots for _, slots in self._waiting])[order]
        return slots[torch.searchsorted(known, rows)]

    def close(self) -> None:
        self._planner.shutdown()
        self._mover.shutdown()

    # Decisions

    def _next(self, ids: Tensor) -> IdBatch:
        """Returns the announced batch with these ids, skipping earlier ones, or a new batch."""
        for place, batch in enumerate(self._queue):
            if len(batch.ids) == len(ids) and torch.equal(batch.ids, ids):
                for _ in range(place):
                    self._skip()
                return batch
        return IdBatch(ids)

    def _skip(self) -> None:
        batch = self._queue.popleft()
        self._announced.popleft().result()
        self._ahead = None
        assert batch.request is not None, "the batch is already sorted"
        self._planner.submit(self.replacement.skip, batch.request).result()

    def _decided(self, batch: IdBatch) -> tuple[RowPlan, Future[Records] | None]:
        pinned = np.concatenate(self._pinned) if self._pinned else None
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.batch is batch:
            try:
                plan, fetched = ahead.found.result()
            except CacheTooSmall:
                pass  # it may fit by now; if not, the error lists what is pinned
            else:
                if pinned is None or not np.isin(plan.victims, pinned).any():
                    return plan, fetched
        return self._planner.submit(self._decide_now, batch, pinned).result(), None

    def _decide_now(self, batch: IdBatch, pinned: NDArray[np.int64] | None) -> RowPlan:
        if batch.request is None:
            self._sort(batch, False)
        assert batch.request is not None, "the batch is already sorted"
        return self.replacement.decide(batch.request, pinned)

    def _sort(self, batch: IdBatch, announced: bool) -> None:
        rows, inverse, counts = torch.unique(batch.ids, return_inverse=True, return_counts=True)
        batch.inverse = inverse
        make = self.replacement.announce if announced else self.replacement.sudden
        batch.request = make(rows.long().numpy(), counts.numpy())

    def _look_ahead(self) -> None:
        if self._queue and self._ahead is None:
            batch = self._queue[0]
            self._ahead = PrefetchedBatch(batch, self._planner.submit(self._look, batch))

    def _look(self, batch: IdBatch) -> tuple[RowPlan, Future[Records]]:
        assert batch.request is not None, "batches are sorted in order"
        plan = self.replacement.decide(batch.request)
        rows = torch.from_numpy(plan.request.rows[plan.missing])
        return plan, self._mover.submit(self._fetch, rows)

    # Moves

    def _take_staged(self, fetched: Future[Records] | None, plan: RowPlan) -> Records:
        if fetched is None:
            rows = torch.from_numpy(plan.request.rows[plan.missing])
            fetched = self._mover.submit(self._fetch, rows)
        begun = time.perf_counter()
        staged = fetched.result()
        self.moved.waiting += time.perf_counter() - begun
        return staged

    def _fetch(self, rows: Tensor) -> Records:
        """Reads rows and copies them to the device; runs in the transfer thread."""
        begun = time.perf_counter()
        found = {name: column.read(rows) for name, column in self.columns.items()}
        self.moved.read += sum(len(rows) * column.row_bytes for column in self.columns.values())
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                pinned = {name: values.pin_memory() for name, values in found.items()}
                device = self.weight.device
                found = {n: v.to(device, non_blocking=True) for n, v in pinned.items()}
            # Not an event: the pinned copies are freed after this call and must have been read by
            # then. This blocks only the mover thread, which has no other work meanwhile.
            self._stream.synchronize()
        self.moved.fetching += time.perf_counter() - begun
        return found

    def _enter(self, slots: Tensor, staged: Records, plan: RowPlan) -> None:
        for name, target in self._targets().items():
            if name in staged:
                target.index_copy_(0, slots, staged[name])
                if self._stream is not None:
                    # Allocated on the copy stream, which must not reuse its memory yet.
                    staged[name].record_stream(torch.cuda.current_stream())
        rows = torch.from_numpy(plan.request.rows[plan.missing]).to(self._row_of_slot)
        self._row_of_slot.index_copy_(0, slots, rows)

    def _leave(self, plan: RowPlan) -> None:
        # Unmodified rows have a valid copy in their column: dropping them costs nothing.
        changed = plan.victims[self._dirty[plan.victims]]
        self.moved.clean += len(plan.victims) - len(changed)
        self._dirty[changed] = False
        self._write_back(changed)

    def _write_back(self, slots: NDArray[np.int64]) -> None:
        """Copies modified rows out of their slots; the transfer thread writes them back."""
        if not len(slots):
            return
        places = torch.from_numpy(slots).to(self.weight.device)
        rows = self.rows_in(places)
        taken = {n: t.index_select(0, places) for n, t in self._targets().items()}
        ready = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._under_way.append(self._mover.submit(partial(self._write, rows, taken, ready)))

    def _write(self, rows: Tensor, taken: Records, ready: Any) -> None:
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                # `taken` was gathered on the compute stream.
                self._stream.wait_event(ready)
                rows = rows.cpu()
                taken = {name: values.cpu() for name, values in taken.items()}
        for name, values in taken.items():
            self.columns[name].write(rows, values)
        self.moved.written += sum(len(rows) * self.columns[name].row_bytes for name in taken)

    def _targets(self) -> dict[str, Tensor]:
        # `data`, because autograd need not track this: slots of a batch are not written while in
        # use.
        return {WEIGHT: self.weight.data, **self._states()}

    def drain(self) -> None:
        """Waits until no transfers are in flight."""
        self._planner.submit(bool).result()
        self._mover.submit(bool).result()
        self._raise_failures()

    def _raise_failures(self) -> None:
        # A failed write stays at the head of the queue: its row is lost, so every later call must
        # raise the error again.
        while self._under_way and self._under_way[0].done():
            self._under_way[0].result()
            self._under_way.popleft()


def _on_host(ids: Tensor) -> Tensor:
    return ids.detach().reshape(-1).cpu().long()
