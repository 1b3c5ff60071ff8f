"""The memory manager: keeps the bytes of its objects within a budget, the rest in a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.memory._bytes import ByteCounter
from gulliver.memory._claims import before_write, before_write_at, storage_of
from gulliver.memory._placed import Placed
from gulliver.memory._stores import Store, page_aligned, whole_pages
from gulliver.solve import Action, Move, Replacement


class Manager:
    """Keeps objects in a fast tier of a given size, and what does not fit in a store.

    Args:
        budget: size of the fast tier, in bytes.
        device: device whose memory is the fast tier.
        store: tier behind it; without one everything stays, or does not fit.
        ahead: bytes prefetched at most; None for as many as fit.

    Attributes:
        counter: bytes of the tensors that exist, by kind.
    """

    def __init__(
        self,
        budget: int,
        device: torch.device | str,
        store: Store | None,
        *,
        ahead: int | None = None,
    ) -> None:
        self.device, self.store, self.ahead = torch.device(device), store, ahead
        self.counter = ByteCounter()
        self._core = Replacement(budget, backed=store is not None)
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._placed: dict[int, Placed] = {}
        self._lent: dict[int, int] = {}
        self._number = 0
        self._steps: list[list[Action]] = [[]]
        self._stats = dict.fromkeys(("loads", "evictions", "bytes_in", "bytes_out", "steps"), 0)

    @property
    def budget(self) -> int:
        """Size of the fast tier, in bytes."""
        return self._core.budget

    @property
    def minimum(self) -> int:
        """Most bytes that were in use at once so far: no smaller budget would have done."""
        return self._core.minimum

    def add(
        self, name: str, kind: str, numel: int, dtype: torch.dtype, value: Tensor | None = None
    ) -> Placed:
        """Takes a new object; without a value it is zeros, without memory until it is used."""
        with self._entered():
            placed = Placed(name, kind, numel, dtype, number=self._number)
            self._number += 1
            self._placed[placed.number] = placed
            size = whole_pages(placed.nbytes)
            try:
                self._run(self._core.add(placed.number, name, size, value is not None))
            except BaseException:
                del self._placed[placed.number]
                raise
            if value is not None:
                assert placed.tensor is not None
                placed.tensor.copy_(value.detach().reshape(-1))
            return placed

    def remove(self, placed: Placed) -> None:
        """Forgets an object."""
        with self._entered():
            self._run(self._core.remove(placed.number))
            del self._placed[placed.number]

    def use(self, placed: Placed, write: bool = False, fresh: bool = False) -> Tensor:
        """Brings an object into the fast tier, and keeps it there until `done`.

        Args:
            placed: object to use.
            write: whether its content will be changed.
            fresh: whether it will be overwritten as a whole: nothing is read.

        Returns:
            Its content, flat.
        """
        with self._entered():
            self._run(self._core.use(placed.number, write, fresh))
            if (write or fresh) and placed.offset is not None:
                self._free(placed)
            assert placed.tensor is not None
            return placed.tensor

    def done(self, placed: Placed) -> None:
        """Ends one `use`: after the last the object may be evicted."""
        with self._entered():
            self._run(self._core.done(placed.number))

    @contextmanager
    def using(self, placed: Placed, write: bool = False, fresh: bool = False) -> Iterator[Tensor]:
        """Uses an object for a block, which may fail."""
        tensor = self.use(placed, write, fresh)
        try:
            yield tensor
        finally:
            self.done(placed)

    def discard(self, placed: Placed) -> None:
        """Forgets the content of an object: it is zeros from now on, and takes no memory."""
        with self._entered():
            self._run(self._core.discard(placed.number))

    def lend(self, numel: int, dtype: torch.dtype, kind: str) -> Tensor:
        """Lends a flat buffer with any content, for which room is made."""
        with self._entered():
            nbytes = numel * dtype.itemsize
            size = whole_pages(nbytes)
            self._run(self._core.lend(size, f"a buffer of {kind}"))
            memory = self._memory(size)
            tensor = memory[:nbytes].view(dtype)
            self._lent[tensor.data_ptr()] = size
            self.counter.add(kind, nbytes)
            return tensor

    def give(self, tensor: Tensor, kind: str) -> None:
        """Takes back what was lent."""
        with self._entered():
            size = self._lent.pop(tensor.data_ptr(), None)
            if size is None:
                raise GulliverError("this tensor was not lent by this manager, or was given back")
            self.counter.add(kind, -tensor.nbytes)
            self._run(self._core.give(size))

    def view(self, placed: Placed, write: bool = False) -> Tensor:
        """Shows the content of an object wherever it lies, without moving anything.

        The tensor is good until the object is used again, or room is made for others. What a
        checkpoint copies from it in the background is waited for before its place is written.

        Args:
            placed: object to show.
            write: whether its content will be overwritten as a whole, before anything else is used.
        """
        with self._entered():
            if write:
                self._make_writable(placed)
            if placed.tensor is not None:
                return placed.tensor
            if placed.offset is None:
                return self._zeros(placed)
            assert self.store is not None
            memory = self.store.mapped(placed.offset, whole_pages(placed.nbytes))
            placed.shown.add(storage_of(memory))
            return memory[: placed.nbytes].view(placed.dtype)

    def _make_writable(self, placed: Placed) -> None:
        """Gives an object a place to be filled at; nothing leaves the fast tier for it."""
        self._wait_shown(placed)
        if placed.tensor is not None or self.store is None:
            with self.using(placed, write=True):
                return
        if placed.offset is None:
            placed.offset = self.store.allocate(whole_pages(placed.nbytes))
            self._core.keep(placed.number)

    def _wait_shown(self, placed: Placed) -> None:
        if placed.shown:
            before_write_at(placed.shown)
            placed.shown.clear()

    def set_budget(self, nbytes: int) -> None:
        """Changes the size of the fast tier."""
        with self._entered():
            self._run(self._core.set_budget(nbytes))

    def end_step(self) -> None:
        """Ends a step: its accesses are the schedule of the next."""
        with self._entered():
            self._core.end_step()
            self._stats["steps"] += 1
            self._steps = [*self._steps[-3:], []]

    def stats(self) -> dict[str, Any]:
        """Returns loads, evictions, bytes in and out, steps and seconds waited so far."""
        return {**self._stats, "seconds_waited": 0.0}

    def explain(self, step: int = -1) -> str:
        """Says every decision of a step as text; -1 is the last that has ended."""
        actions = self._steps[:-1][step] if len(self._steps) > 1 else self._steps[-1]
        lines = [f"{a.move.value} {self._name(a)}: {a.reason}" for a in actions]
        return "\n".join(lines) or "nothing moved"

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the timeline of the last step."""
        raise GulliverError("draw() comes with the schedule")

    def close(self) -> None:
        """Frees everything, the store too."""
        with self._entered():
            for placed in self._placed.values():
                if placed.tensor is not None:
                    self.counter.add(placed.kind, -placed.nbytes)
                placed.tensor = None
            self._placed.clear()
            if self.store is not None:
                self.store.close()

    def _name(self, action: Action) -> str:
        placed = self._placed.get(action.key) if isinstance(action.key, int) else None
        return placed.name if placed else str(action.key)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        if os.getpid() != self._process:
            raise GulliverError(
                "this memory manager belongs to the parent process: make another after forking"
            )
        with self._lock:
            yield

    def _memory(self, nbytes: int) -> Tensor:
        if self.device.type == "cpu":
            return page_aligned(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _zeros(self, placed: Placed) -> Tensor:
        return torch.zeros(placed.numel, dtype=placed.dtype, device=self.device)

    def _run(self, actions: Iterable[Action]) -> None:
        for action in actions:
            assert isinstance(action.key, int)
            placed = self._placed[action.key]
            self._steps[-1].append(action)
            match action.move:
                case Move.MAKE:
                    self._make(placed)
                    if action.zero:
                        assert placed.tensor is not None
                        placed.tensor.zero_()
                case Move.LOAD:
                    self._load(placed)
                case Move.WRITE:
                    self._write(placed)
                case Move.DROP:
                    self._drop(placed)
                case Move.FORGET:
                    if placed.tensor is not None:
                        self._drop(placed)
                    if placed.offset is not None:
                        self._free(placed)

    def _make(self, placed: Placed) -> Tensor:
        memory = self._memory(whole_pages(placed.nbytes))
        placed.tensor = memory[: placed.nbytes].view(placed.dtype)
        self.counter.add(placed.kind, placed.nbytes)
        return memory

    def _load(self, placed: Placed) -> None:
        assert self.store is not None
        assert placed.offset is not None
        memory = self._make(placed)
        self.store.read(placed.offset, memory).wait()
        self._stats["loads"] += 1
        self._stats["bytes_in"] += memory.nbytes

    def _write(self, placed: Placed) -> None:
        assert self.store is not None
        assert placed.tensor is not None
        size = whole_pages(placed.nbytes)
        if placed.offset is None:
            placed.offset = self.store.allocate(size)
        memory = torch.as_strided(placed.tensor.view(torch.uint8), (size,), (1,))
        self.store.write(placed.offset, memory).wait()
        self._stats["bytes_out"] += size
        self._drop(placed)

    def _drop(self, placed: Placed) -> None:
        if placed.tensor is not None:
            # A snapshot that copies it keeps its memory, which would not be there for others.
            before_write([placed.tensor])
        self._stats["evictions"] += 1
        self.counter.add(placed.kind, -placed.nbytes)
        placed.tensor = None

    def _free(self, placed: Placed) -> None:
        assert self.store is not None
        assert placed.offset is not None
        self._wait_shown(placed)
        self.store.free(placed.offset, whole_pages(placed.nbytes))
        placed.offset = None
