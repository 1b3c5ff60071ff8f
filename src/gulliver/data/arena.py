"""Pinned host memory for batches, and copies from it to a device."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.solve.extents import Extents, size_class


def map_leaves(batch: Any, visit: Callable[[Any], Any]) -> Any:
    """Rebuilds a batch, replacing every leaf by the result of `visit`."""
    # A leaf is a tensor, an object with a method ``pin_memory`` (which knows best how to pin
    # itself), or anything that is not a container. Containers keep their type if it can be rebuilt;
    # other sequences and mappings become lists and dicts. Leaves are visited in order.
    if isinstance(batch, Tensor | str | bytes | bytearray) or hasattr(batch, "pin_memory"):
        return visit(batch)
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: map_leaves(value, visit) for key, value in batch.items()})
    if isinstance(batch, tuple):
        parts = [map_leaves(part, visit) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else _sequence(batch, parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # A copy instead of a call: fields may be frozen, computed, or not be arguments at all.
        clone = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(clone, field.name, map_leaves(getattr(batch, field.name), visit))
        return clone
    if isinstance(batch, Sequence) and not isinstance(batch, range | memoryview):
        return _sequence(batch, [map_leaves(part, visit) for part in batch])
    return visit(batch)


def move_tensors(batch: Any, device: torch.device) -> Any:
    return map_leaves(batch, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)


def _mapping(like: Mapping, values: dict) -> Any:
    if type(like) is dict:
        return values
    try:
        if isinstance(like, MutableMapping):
            # Not rebuilt: a defaultdict, for example, has more state than its items.
            clone = copy.copy(like)
            clone.update(values)
            return clone
        return type(like)(values)  # type: ignore[call-arg]
    except TypeError:
        return values


def _sequence(like: Sequence, parts: list) -> Any:
    if type(like) is list:
        return parts
    try:
        return type(like)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


# Host memory for batches that is allocated once and reused.
#
# A `PinnedArena` owns a few large slabs, page-locked if CUDA is available, and lends blocks of them
# as ordinary tensors. Read `copy_all` first, then `_place`, then `_reclaim`.


_log = logging.getLogger("gulliver")
DEFAULT_LIMIT = 2**30  # default limit of an arena, in bytes
PORTABLE = 1  # `cudaHostRegisterPortable`: page-locked for all devices of the process


class CopyEvent(Protocol):
    """An event that reports whether a copy has finished, such as `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class ArenaStatistics:
    """Counters of an arena, in bytes or numbers of tensors."""

    # Tensors placed in existing memory.
    hits: int
    # Tensors for which a slab was allocated.
    grown: int
    # Tensors beyond the limit, in ordinary memory.
    plain: int
    # Bytes of all slabs.
    capacity: int
    # Bytes of the blocks in use.
    in_use: int
    # Bytes of the tensors in these blocks.
    asked: int
    # Largest `in_use` so far.
    high_water: int
    # Slabs allocated so far; constant once nothing is allocated any more.
    slabs_taken: int
    # Whether the slabs are page-locked.
    is_pinned: bool

    @property
    def misses(self) -> int:
        """Number of tensors for which memory had to be allocated."""
        return self.grown + self.plain

    @property
    def hit_rate(self) -> float:
        """Fraction of tensors placed in existing memory; 1 if there were none."""
        total = self.hits + self.misses
        return self.hits / total if total else 1.0

    def __str__(self) -> str:
        kind = "page-locked" if self.is_pinned else "page-aligned"
        return (
            f"{self.hit_rate:.2%} of {self.hits + self.misses} tensors from {kind} memory; "
            f"{self.in_use / 2**20:.1f} MiB in use, {self.high_water / 2**20:.1f} at most, "
            f"of {self.capacity / 2**20:.1f}"
        )


class _Block(NamedTuple):
    """A part of a slab; keeps the slab alive."""

    slab: _Slab
    start: int
    size: int
    asked: int


# [Note: who frees a block] A tensor of the arena is `torch.frombuffer` over a small array object,
# its *owner*. The storage holds the owner, and every view, slice and alias of the tensor holds the
# storage, so the owner is deleted exactly when nothing can access the memory any more. Its
# finalizer puts the block into a queue, from which the next request takes it. Copies to the device
# also hold the tensors, in a list, until the event after the copy has occurred. Nothing is released
# explicitly, dropped batches cannot leak, and nothing is identified by an `id` that may be reused.
#
# The finalizer only appends to a deque. It may run at any time, even while its thread holds the
# arena's lock, because garbage collection may start at any allocation.
#
# [Note: why a warmed-up arena never misses] All tensors of a batch are placed together, in one
# hole, and freed one by one. With `in_flight` slabs, each as large as the largest batch, and one
# batch fewer alive, each living batch is in one slab: at least one slab is empty, and any batch
# fits into it. No order of sizes or releases can break this, and it needs only the bytes of
# `in_flight` times the largest batch.
class PinnedArena:
    """Pre-allocated host memory for tensors, which is reclaimed automatically.

    A block is reused once its last tensor is freed and device copies from it are complete. The
    loader registers its own copies; other code that copies asynchronously must call `hold`, or keep
    the tensor until its copy is complete. Thread-safe. Blocks are page-aligned; beyond page
    rounding, they waste less than an eighth of their tensor's size.

    Args:
        limit: maximum bytes of all slabs together. Tensors that do not fit get ordinary memory,
            counted as a miss; an arena neither exceeds its limit nor waits for memory.
        pin: whether to page-lock memory, so that device copies are fast and asynchronous; None to
            do so if CUDA is available. Otherwise, buffers are only page-aligned.

    Raises:
        GulliverError: the limit is less than a page, or `pin` is set without CUDA.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT, pin: bool | None = None) -> None:
        if limit < mmap.PAGESIZE:
            raise GulliverError(f"an arena of {limit} bytes is less than a page: raise the limit")
        has_cuda = torch.cuda.is_available()
        if pin and not has_cuda:
            raise GulliverError("page-locked memory needs CUDA: omit `pin`, or pass pin=False")
        self.limit = limit
        self.is_pinned = has_cuda if pin is None else pin
        self._lock = threading.Lock()
        self._extents = Extents()
        self._slabs: dict[int, _Slab] = {}
        self._taken = self._capacity = 0
        self._in_use = self._asked = self._high_water = 0
        self._hits = self._grown = self._plain = 0
        self._returned: deque[_Block] = deque()
        self._held: deque[tuple[CopyEvent, list[Tensor]]] = deque()

    def copy(self, tensor: Tensor) -> Tensor:
        return self.copy_all([tensor])[0]

    def copy_all(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies the host tensors of a batch into the arena.

        Dense tensors keep their strides; others become contiguous. Tensors that are not plain host
        tensors (sparse, quantized, nested, subclasses, on a device) are returned unchanged; empty
        ones take no memory.
        """
        copies = list(tensors)
        chosen = [place for place, tensor in enumerate(tensors) if _is_plain(tensor)]
        buffers = self.empty_all([tensors[place] for place in chosen])
        for place, buffer in zip(chosen, buffers, strict=True):
            copies[place] = _fill(buffer, tensors[place])
        return copies

    def empty_all(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Allocates uninitialized host tensors, in one slab if possible.

        Args:
            like: tensors with the requested shapes, strides and dtypes; they may be on ``meta``.
        """
        needs = [tensor.numel() * tensor.element_size() for tensor in like]
        with self._lock:
            blocks = iter(self._place([need for need in needs if need]))
            owners = [self._owner(next(blocks)) if need else None for need in needs]
        return [_tensor(owner, tensor) for owner, tensor in zip(owners, like, strict=True)]

    def hold(self, tensors: Iterable[Tensor], until: CopyEvent) -> None:
        """Keeps tensors, and therefore their blocks, alive until an event has occurred."""
        self._held.append((until, list(tensors)))

    def warm_up(self, batches: Iterable[Any], in_flight: int) -> None:
        """Allocates the memory for batches of the given shapes.

        Afterwards, there are no misses while at most `in_flight` batches of these shapes are alive.

        Args:
            batches: one example of every shape, with the structure of the real batches; tensors may
                be on ``meta``.
            in_flight: maximum number of batches alive together, including the one being placed.

        Raises:
            GulliverError: the limit is too low, or the system cannot lock that much memory.
        """
        need = max((batch_bytes(batch) for batch in batches), default=0)
        with self._lock:
            self._reclaim()
            enough = [size for size in self._extents.slabs.values() if size >= need]
            missing = max(0, in_flight - len(enough)) if need else 0
            self._drop_slabs(missing * need, need)
            total = self._capacity + missing * need
            if total > self.limit:
                raise GulliverError(
                    f"{in_flight} batches of {need} bytes need {total} bytes of host memory, but "
                    f"the arena's limit is {self.limit}: raise it, or use fewer batches in flight"
                )
            for _ in range(missing):
                self._grow(need)

    def statistics(self) -> ArenaStatistics:
        with self._lock:
            self._reclaim()
            return ArenaStatistics(
                self._hits,
                self._grown,
                self._plain,
                self._capacity,
                self._in_use,
                self._asked,
                self._high_water,
                self._taken,
                self.is_pinned,
            )

    def __del__(self) -> None:
        # A device may still be reading held tensors.
        for event, _ in getattr(self, "_held", ()):
            event.synchronize()

    def _place(self, needs: list[int]) -> list[_Block | int]:
        """Returns a block for each size, or the size itself if it needs ordinary memory."""
        self._reclaim()
        sizes = [size_class(need) for need in needs]
        # One hole for all tensors; see [Note: why a warmed-up arena never misses].
        found = self._extents.take(sum(sizes)) if sizes else None
        if found is not None:
            number, start = found
            self._hits += len(needs)
            blocks = []
            for need, size in zip(needs, sizes, strict=True):
                blocks.append(self._allocate(number, start, size, need))
                start += size
            return blocks
        return [
            self._place_one(need, size, sum(sizes[number:]))
            for number, (need, size) in enumerate(zip(needs, sizes, strict=True))
        ]

    def _place_one(self, need: int, size: int, rest: int) -> _Block | int:
        """Places a single block; a new slab has room for the rest of its batch."""
        found = self._extents.take(size)
        if found is not None:
            self._hits += 1
            return self._allocate(*found, size, need)
        for slab in (rest, size):
            self._drop_slabs(slab, slab)
            if self._capacity + slab <= self.limit and self._try_grow(slab):
                found = self._extents.take(size)
                assert found is not None
                self._grown += 1
                return self._allocate(*found, size, need)
        self._plain += 1
        return need

    def _allocate(self, number: int, start: int, size: int, need: int) -> _Block:
        self._in_use += size
        self._asked += need
        self._high_water = max(self._high_water, self._in_use)
        return _Block(self._slabs[number], start, size, need)

    def _owner(self, block: _Block | int) -> np.ndarray:
        """Creates the object whose deletion frees a block; see [Note: who frees a block]."""
        if isinstance(block, int):
            return np.empty(block, np.uint8)
        owner = block.slab.bytes[block.start : block.start + block.asked]
        weakref.finalize(owner, self._returned.append, block).atexit = False
        return owner

    def _reclaim(self) -> None:
        # Events of one stream occur in order; of several streams, some are only noticed later.
        while self._held and self._held[0][0].query():
            self._held.popleft()
        while self._returned:
            block = self._returned.popleft()
            self._extents.give(block.slab.number, block.start, block.size)
            self._in_use -= block.size
            self._asked -= block.asked

    def _drop_slabs(self, size: int, below: int) -> None:
        """Frees empty slabs smaller than `below` bytes, smallest first, to make room for `size`."""
        slabs = self._extents.slabs
        idle = [n for n, length in slabs.items() if length < below and self._extents.is_empty(n)]
        if self._capacity - sum(slabs[number] for number in idle) + size > self.limit:
            return
        for number in sorted(idle, key=lambda number: slabs[number]):
            if self._capacity + size <= self.limit:
                return
            self._extents.remove(number)
            del self._slabs[number]
            self._capacity -= slabs[number]

    def _try_grow(self, size: int) -> bool:
        try:
            self._grow(size)
        except GulliverError as error:
            _log.warning("%s; going on in ordinary memory", error)
            return False
        return True

    def _grow(self, size: int) -> None:
        slab = _Slab(self._taken, size, self.is_pinned)
        self._slabs[slab.number] = slab
        self._extents.add(slab.number, size)
        self._taken += 1
        self._capacity += size


class _Slab:
    """Zeroed, populated memory from the system, optionally page-locked."""

    # Shared, not private: pages shared with a forked worker would be copied at the parent's next
    # write, and the device would still use the pages that were locked.

    def __init__(self, number: int, size: int, pin: bool) -> None:
        self.number = number
        try:
            self.bytes = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        except (OSError, ValueError) as error:
            raise GulliverError(
                f"cannot allocate {size} bytes of host memory for batches: {error}"
            ) from None
        # Touches every page now, because the first write to fresh memory is slow.
        self.bytes.fill(0)
        if pin:
            runtime: Any = torch.cuda.cudart()
            address = self.bytes.ctypes.data
            code = int(runtime.cudaHostRegister(address, size, PORTABLE))
            if code:
                raise GulliverError(
                    f"cannot page-lock {size} bytes of host memory (CUDA error {code}): lower the "
                    "arena's limit, or raise `ulimit -l`"
                )
            weakref.finalize(self, _unlock, runtime, address, self.bytes).atexit = False


def _unlock(runtime: Any, address: int, memory: np.ndarray) -> None:
    runtime.cudaHostUnregister(address)
    # Referenced until here, because memory must not be freed while it is locked.
    del memory


def batch_bytes(batch: Any) -> int:
    total = 0

    def count(leaf: Any) -> Any:
        nonlocal total
        if isinstance(leaf, Tensor) and leaf.numel():
            total += size_class(leaf.numel() * leaf.element_size())
        return leaf

    map_leaves(batch, count)
    return total


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
    )


def _tensor(owner: np.ndarray | None, like: Tensor) -> Tensor:
    if owner is None:
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(owner, dtype=like.dtype)
    if like.is_contiguous():
        return flat.view(like.shape)
    # If `like` is dense, these are its own strides.
    strides = torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.shape, strides)


def _fill(buffer: Tensor, source: Tensor) -> Tensor:
    """Copies in the calling thread without holding the GIL."""
    # torch's own copy would start a second set of compute threads in addition to the training's.
    source = source.detach()
    if source.is_conj() or source.is_neg() or not _same_order(buffer, source):
        return buffer.copy_(source)
    ctypes.memmove(buffer.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    return buffer


def _same_order(one: Tensor, other: Tensor) -> bool:
    return (one.is_contiguous() and other.is_contiguous()) or one.stride() == other.stride()


# Moves a finished batch into the arena, and to the device before it is used.


class CopyStream(Protocol):
    """Copies tensors to a device."""

    def send(self, leaves: list[Any]) -> tuple[list[Any], CopyEvent]:
        """Starts copies; the event occurs once the sources may be reused."""
        ...

    def receive(self, leaves: list[Any], event: CopyEvent) -> None:
        """Makes the caller's subsequent work wait for the copies."""
        ...


class CudaCopyStream:
    """Copies on a separate stream, which never waits for the compute stream."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device, self._depth = device, depth
        self._stream = torch.cuda.Stream(device)
        self._under_way: deque[CopyEvent] = deque()

    def send(self, leaves: list[Any]) -> tuple[list[Any], CopyEvent]:
        """Starts copies of tensors, and of objects with a ``to`` method."""
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        if len(self._under_way) >= self._depth:
            self._under_way.popleft().synchronize()
        # Copy stream. The results are allocated on it, not on the compute stream, for which copies
        # would have to wait; `record_stream` in `receive` keeps their memory from being reused too
        # early.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            sent = [leaf.to(self._device, non_blocking=True) for leaf in leaves]
            event = torch.cuda.Event()
            event.record(self._stream)
        self._under_way.append(event)
        return sent, event

    def receive(self, leaves: list[Any], event: CopyEvent) -> None:
        """Makes the current stream wait for the copies, and records their memory on it."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)  # type: ignore[arg-type]
        for leaf in leaves:
            if hasattr(leaf, "record_stream"):
                leaf.record_stream(stream)


class MovedBatch(NamedTuple):
    """A batch that is being copied, and the event that marks the end of the copy."""

    batch: Any
    leaves: list[Any]
    event: CopyEvent | None


class Mover:
    """Moves batches into an arena, and to a device on a copy stream."""

    def __init__(
        self, arena: PinnedArena | None, copy_stream: CopyStream | None, locks: bool = False
    ) -> None:
        self._arena, self._copy_stream, self._locks = arena, copy_stream, locks

    def move(self, batch: Any) -> MovedBatch:
        """Copies a batch into the arena, and starts its copy to the device."""
        if self._arena is None and self._copy_stream is None and not self._locks:
            return MovedBatch(batch, [], None)
        leaves: list[Any] = []

        def collect(leaf: Any) -> Any:
            if _is_moved(leaf):
                leaves.append(leaf)
            return leaf

        map_leaves(batch, collect)
        sent, event = self._stage(leaves), None
        if self._copy_stream is not None:
            sent, event = self._send(self._copy_stream, sent)
        moved = iter(sent)
        rebuilt = map_leaves(batch, lambda leaf: next(moved) if _is_moved(leaf) else leaf)
        return MovedBatch(rebuilt, sent, event)

    def receive(self, moved: MovedBatch) -> Any:
        """Returns a moved batch; the caller's subsequent work waits for its copies."""
        if moved.event is not None and self._copy_stream is not None:
            self._copy_stream.receive(moved.leaves, moved.event)
        return moved.batch

    def _stage(self, leaves: list[Any]) -> list[Any]:
        """Copies host tensors into the arena; calls `pin_memory` of other objects."""
        if self._arena is None:
            return [leaf.pin_memory() for leaf in leaves] if self._locks else leaves
        tensors = iter(self._arena.copy_all([leaf for leaf in leaves if isinstance(leaf, Tensor)]))
        return [
            next(tensors)
            if isinstance(leaf, Tensor)
            else (leaf.pin_memory() if self._arena.is_pinned else leaf)
            for leaf in leaves
        ]

    def _send(self, copy_stream: CopyStream, staged: list[Any]) -> tuple[list[Any], CopyEvent]:
        """Sends objects with a ``to`` method, keeping the sources until they have been read."""
        places = [place for place, leaf in enumerate(staged) if hasattr(leaf, "to")]
        arrived, event = copy_stream.send([staged[place] for place in places])
        sent = list(staged)
        for place, leaf in zip(places, arrived, strict=True):
            sent[place] = leaf
        if self._arena is not None:
            self._arena.hold([leaf for leaf in staged if isinstance(leaf, Tensor)], event)
        return sent, event


def _is_moved(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or hasattr(leaf, "pin_memory")


def copy_stream(device: torch.device | None, ahead: int) -> CopyStream | None:
    return CudaCopyStream(device, ahead) if device is not None and device.type == "cuda" else None


def device_of(device: torch.device | str | None) -> torch.device | None:
    """Resolves the device of batches; None for the host."""
    if device is None:
        return None
    found = torch.device(device)
    if found.type == "cuda":
        index = torch.cuda.current_device() if found.index is None else found.index
        found = torch.device("cuda", index)
    return found
