"""The memory manager, which keeps tensors within a byte budget and the rest in a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.memory.buffers import ACTIVATIONS, KINDS, ByteCounter
from gulliver.memory.pending import before_write, before_write_at, storage_of
from gulliver.memory.stores import (
    ManagedTensor,
    Middle,
    Pages,
    Residency,
    Store,
    typed,
    whole_pages,
)
from gulliver.memory.traffic import Traffic
from gulliver.solve.replacement import Action, Move, Replacement

# `solve.Replacement` decides what is in the fast tier, from the order of calls alone; `Traffic`
# executes that in parallel with compute. Between the two, this file keeps track of tensors by
# number, and of lent buffers.
#
# It is independent of training. Users call::
#
#     managed = manager.add("block 3", PARAMETERS, numel, torch.float32, value)
#     tensor = manager.use(managed, write=True)       # in the fast tier from now on
#     ...                                            # new views of it
#     manager.done(managed)                           # evictable: no view of it is used any more
#     manager.end_step()                             # next step: loads run ahead of use
#
# The budget counts whole pages of 4096 bytes; `counter` counts the bytes of tensors.


class Manager:
    """Keeps tensors in a fast tier of limited size, and the rest in a store."""

    def __init__(
        self,
        budget: int,
        device: torch.device | str,
        store: Store | None,
        *,
        ahead: int | None = None,
        pages: Pages | None = None,
    ) -> None:
        self.device, self.store = torch.device(device), store
        if self.device.type != "cpu" and store is not None and not store.in_stream:
            raise GulliverError(
                f"a {store.name} store needs a CPU, not {self.device}: use host memory (HostStore)"
            )
        # Bytes in the fast tier by kind: of tensors being loaded, in use or being written, and of
        # lent buffers.
        self.counter = ByteCounter()
        self._process, self._lock = os.getpid(), threading.RLock()
        self._core = Replacement(budget, backed=store is not None, ahead=ahead)
        self._traffic = Traffic(budget, self.device, store, self.counter, self._lock, pages)
        self._middle = Middle() if store is None else store.middle
        self._placed: dict[int, ManagedTensor] = {}
        self._lent: dict[int, Tensor] = {}
        self._number = self._total = self._steps = self._evictions = 0
        self._closed = False
        # Callback that ends restartable uses when there is no room; None while it runs.
        self.release_idle: Callable[[], None] | None = None

    @property
    def budget(self) -> int:
        return self._core.budget

    @property
    def minimum(self) -> int:
        """Peak bytes in use at the same time: the smallest sufficient budget."""
        return self._core.minimum

    @property
    def held(self) -> int:
        return self._traffic.held

    def release_with(self, release_idle: Callable[[], None]) -> None:
        """Sets a callback that, when memory is short, releases tensors that can be reloaded."""
        self.release_idle = release_idle

    # Objects

    def add(
        self,
        name: str,
        kind: str,
        numel: int,
        dtype: torch.dtype,
        value: Tensor | None = None,
        brief: bool = False,
    ) -> ManagedTensor:
        """Adds a managed tensor; without a value it is zero, and allocated on first use."""
        with self._entered():
            if kind not in (*KINDS, ACTIVATIONS):
                raise GulliverError(
                    f"unknown kind {kind!r} of {name}: use one of {', '.join(KINDS)}"
                )
            managed = ManagedTensor(name, kind, numel, dtype, number=self._number, brief=brief)
            self._check_total(managed)
            self._tell()
            self._number += 1
            actions = self._core.add(managed.number, name, managed.size, value is not None)
            self._placed[managed.number] = managed
            self._total += managed.kept
            try:
                self._run(actions)
                if value is not None:
                    self._traffic.wait_arrived(managed)
                    assert managed.tensor is not None
                    managed.tensor.copy_(value.detach().reshape(-1))
            except BaseException:
                self.remove(managed)
                raise
            return managed

    def remove(self, managed: ManagedTensor) -> None:
        with self._entered():
            self._check(managed)
            self._run(self._core.remove(managed.number))
            self._middle.remove(managed.number)
            del self._placed[managed.number]
            self._total -= managed.kept

    def use(self, managed: ManagedTensor, write: bool = False, fresh: bool = False) -> Tensor:
        """Loads a tensor into the fast tier and keeps it there until `done`."""
        with self._entered():
            self._check(managed)
            self._tell()
            return self.arrive(managed, self.begin_use(managed, write, fresh), write or fresh)

    def begin_use(self, managed: ManagedTensor, write: bool = False, fresh: bool = False) -> bool:
        with self._entered():
            stored = self._core.is_stored(managed.number)
            actions = self._decided(lambda: self._core.use(managed.number, write, fresh))
            self._run(actions)
            return stored

    def arrive(self, managed: ManagedTensor, stored: bool, write: bool) -> Tensor:
        """Waits for the load that `begin_use` started; undoes the use on failure."""
        with self._entered():
            try:
                self._traffic.wait_arrived(managed)
            except BaseException:
                self._traffic.cancel(managed)
                arrived = managed.residency in (Residency.ARRIVING, Residency.HERE)
                self._core.undo(managed.number, stored, arrived)
                raise
            self._middle.end_prefetch(managed.number)
            assert managed.tensor is not None
            if write:
                self._written(managed)
            return managed.tensor

    def has_arrived(self, managed: ManagedTensor) -> bool:
        with self._entered():
            return self._traffic.has_arrived(managed)

    def raise_write_error(self) -> None:
        with self._entered():
            self._tell()

    def done(self, managed: ManagedTensor) -> None:
        """Ends one `use`; after the last one, the tensor may be evicted."""
        with self._entered():
            actions = self._core.done(self._check(managed).number)
            self._run(actions)

    def revert(self, managed: ManagedTensor) -> None:
        """Undoes changes made without ``write=True``, if the store has the content."""
        with self._entered():
            self._run(self._core.revert(self._check(managed).number))

    @contextmanager
    def using(
        self, managed: ManagedTensor, write: bool = False, fresh: bool = False
    ) -> Iterator[Tensor]:
        tensor = self.use(managed, write, fresh)
        try:
            yield tensor
        finally:
            self.done(managed)

    def discard(self, managed: ManagedTensor) -> None:
        with self._entered():
            actions = self._core.discard(self._check(managed).number)
            self._run(actions)

    def view(self, managed: ManagedTensor, write: bool = False) -> Tensor:
        """Returns a tensor's content from the tier it is in, without moving it."""
        # The result is valid until the tensor is used again or evicted. Its memory is not
        # overwritten before background copies of checkpoints have ended.
        with self._entered():
            self._check(managed)
            if write:
                if managed.residency is not Residency.AWAY:
                    self._traffic.wait_arrived(managed)
                self._make_writable(managed)
            self._traffic.wait_evicted(managed)  # a thread reuses its memory once it is written
            if managed.residency in (Residency.HERE, Residency.LEAVING):
                assert managed.memory is not None
                return typed(managed.memory, managed.nbytes, managed.dtype)
            if managed.offset is None:  # one zero stands for all
                return torch.zeros((), dtype=managed.dtype, device=self.device).expand(
                    managed.numel
                )
            assert self.store is not None
            shown = self.store.mapped(managed.offset, managed.size, write)
            managed.shown.add(storage_of(shown))
            return typed(shown, managed.nbytes, managed.dtype)

    # Loans, budget, steps

    def allocate_buffer(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
        with self._entered():
            self._tell()
            nbytes = numel * dtype.itemsize
            size = whole_pages(nbytes)
            actions = self._decided(lambda: self._core.allocate_buffer(size, f"a buffer of {kind}"))
            self._run(actions)
            try:
                memory = self._traffic.memory(size)
            except BaseException:
                self._run(self._core.free_buffer(size))
                raise
            tensor = typed(memory, nbytes, dtype)
            self._lent[tensor.data_ptr()] = memory
            self.counter.add(kind, nbytes)
            return tensor

    def free_buffer(self, tensor: Tensor, kind: str, keeps: bool = False) -> None:
        with self._entered():
            memory = self._lent.pop(tensor.data_ptr(), None)
            if memory is None:
                raise GulliverError(
                    "this tensor was not allocated by this manager, or was already freed"
                )
            self.counter.add(kind, -tensor.nbytes)
            self._traffic.leave(memory) if keeps else self._traffic.give(memory)
            actions = self._core.free_buffer(memory.numel())
            self._run(actions)

    @contextmanager
    def reserved(self, nbytes: int, kind: str) -> Iterator[None]:
        size = whole_pages(nbytes)
        with self._entered():
            self._tell()
            actions = self._decided(lambda: self._core.allocate_buffer(size, f"new {kind}"))
            self._run(actions)
            try:
                self._traffic.reserve(size)
            except BaseException:
                self._run(self._core.free_buffer(size))
                raise
            self.counter.add(kind, nbytes)
        try:
            yield
        finally:
            with self._entered():
                self.counter.add(kind, -nbytes)
                self._traffic.held -= size
                self._run(self._core.free_buffer(size))

    def set_budget(self, nbytes: int, ahead: int | None = None) -> None:
        with self._entered():
            actions = self._decided(lambda: self._core.set_budget(nbytes))
            self._traffic.budget = nbytes
            self._core.ahead = self._core.ahead if ahead is None else ahead
            self._run(actions)
            self._traffic.fit()

    def end_step(self) -> None:
        with self._entered():
            self._core.end_step()
            self._steps += 1
            self._middle.end_step()

    # Statistics and end

    def stats(self) -> dict[str, Any]:
        # Loads dropped before they started are ``cancelled``, and not counted as loads; ``behind``
        # has the statistics of the next slower tier if that has another one below.
        done: dict[str, Any] = {"evictions": self._evictions, "steps": self._steps}
        done |= {"held": self.held, "minimum": self.minimum, "behind": self._middle.stats()}
        return {**self._traffic.moved, **done}

    def close(self) -> None:
        """Waits for transfers in flight, and frees everything, including the store."""
        with self._entered():
            self._closed = True
            self._traffic.close()
            for managed in self._placed.values():
                self._traffic.drop(managed)
            self._placed.clear()
            if self.store is not None:
                self.store.close()

    # Inside

    def _decided(self, decide: Callable[[], list[Action]]) -> list[Action]:
        try:
            return decide()
        except GulliverError:
            release_idle, self.release_idle = self.release_idle, None
            if release_idle is None:
                raise
            try:
                release_idle()
            finally:
                self.release_idle = release_idle
        return decide()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        if os.getpid() != self._process:
            raise GulliverError(
                "this memory manager belongs to the parent process: create another one after "
                "forking"
            )
        with self._lock:
            if self._closed:
                raise GulliverError("this memory manager is closed")
            yield

    def _tell(self) -> None:
        """Raises errors from background writes, unless the tensors now fit in memory."""
        for managed in self._traffic.unwritten():
            if self._core.restore(managed.number):
                self._traffic.keep(managed)
                self._free(managed)
        self._traffic.raise_write_error()
        self._middle.raise_write_error()

    def _check(self, managed: ManagedTensor) -> ManagedTensor:
        if self._placed.get(managed.number) is not managed:
            raise GulliverError(f"{managed.name} does not belong to this memory manager")
        return managed

    def _check_total(self, managed: ManagedTensor) -> None:
        total, behind = self._total + managed.kept, self.store.capacity if self.store else 0
        if self.store is not None and total > self.budget + behind:
            raise GulliverError(
                f"{managed.name} does not fit: all tensors together need {total} bytes, but the "
                f"memory budget of {self.budget} and the {self.store.name} of {behind} are "
                f"{total - self.budget - behind} bytes too small"
            )

    def _run(self, actions: Iterable[Action]) -> None:
        for action in actions:
            assert isinstance(action.key, int)
            managed = self._placed[action.key]
            self._evictions += action.move in (Move.WRITE, Move.DROP)
            match action.move:
                case Move.MAKE:
                    self._traffic.bring(managed, reads=False, zero=action.zero)
                case Move.LOAD:
                    self._middle.expect(managed.number)
                    self._traffic.bring(managed, reads=True)
                case Move.WRITE:
                    self._traffic.send(managed)
                case Move.DROP:
                    self._drop(managed)
                case Move.FORGET:
                    self._drop(managed)
                    self._free(managed)

    def _drop(self, managed: ManagedTensor) -> None:
        self._traffic.drop(managed)
        self._middle.end_prefetch(managed.number)

    def _written(self, managed: ManagedTensor) -> None:
        if managed.tensor is not None:
            before_write([managed.tensor])
        self._free(managed)

    def _make_writable(self, managed: ManagedTensor) -> None:
        self._wait_shown(managed)
        if managed.residency is Residency.HERE:
            self._core.changed(managed.number)
            self._written(managed)
        elif self.store is None:
            with self.using(managed, fresh=True):
                pass
        elif managed.offset is None:
            managed.offset = self.store.allocate(managed.size, managed)
            self._core.keep(managed.number)

    def _free(self, managed: ManagedTensor) -> None:
        if managed.offset is not None:
            assert self.store is not None
            self._wait_shown(managed)
            self.store.free(managed.offset, managed.size)
            managed.offset = None

    def _wait_shown(self, managed: ManagedTensor) -> None:
        """Waits for readers of data that `view` returned from the store."""
        if managed.shown:
            before_write_at(managed.shown)
            managed.shown.clear()
