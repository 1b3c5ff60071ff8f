"""Page-locked memory for batches, and copies from it to a device ahead of use."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_HOST = torch.device("cpu")


def map_leaves(batch: Any, visit: Callable[[Any], Any]) -> Any:
    """Rebuilds a batch, replacing every leaf with the result of `visit`."""
    # A leaf is a tensor, an object with a method ``pin_memory`` (which knows its own tensors best),
    # or anything that is no container. Containers keep their type where it can be built again; a
    # sequence or mapping that cannot becomes a list or dict. Leaves are visited in their order.
    if isinstance(batch, Tensor | str | bytes | bytearray) or hasattr(batch, "pin_memory"):
        return visit(batch)
    if isinstance(batch, Mapping):
        return _mapping(batch, {key: map_leaves(value, visit) for key, value in batch.items()})
    if isinstance(batch, tuple):
        parts = [map_leaves(part, visit) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else _sequence(batch, parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        # A copy, not a call: fields may be frozen, computed, or no arguments at all.
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
            # Not rebuilt: a defaultdict, say, has more to it than its items.
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


class CopyEvent(Protocol):
    """An event that reports whether a copy has finished, such as `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CopyStream(Protocol):
    """Copies tensors to a device."""

    def send(self, leaves: list[Any]) -> tuple[list[Any], CopyEvent]:
        """Starts copies; the event completes once the sources may be reused."""
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
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        if len(self._under_way) >= self._depth:
            self._under_way.popleft().synchronize()
        # Copy stream. The results are allocated on it, not on the compute stream, or the copies
        # would have to wait for that; `record_stream` in `receive` keeps their memory from being
        # used again too early.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            sent = [leaf.to(self._device, non_blocking=True) for leaf in leaves]
            event = torch.cuda.Event()
            event.record(self._stream)
        self._under_way.append(event)
        return sent, event

    def receive(self, leaves: list[Any], event: CopyEvent) -> None:
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
    """Page-locks batches, and moves them to a device on a copy stream."""

    def __init__(self, copy_stream: CopyStream | None, locks: bool = False) -> None:
        self._copy_stream, self._locks = copy_stream, locks

    def move(self, batch: Any) -> MovedBatch:
        """Page-locks a batch, and starts its copy to the device."""
        if self._copy_stream is None and not self._locks:
            return MovedBatch(batch, [], None)
        leaves: list[Any] = []

        def collect(leaf: Any) -> Any:
            if _is_moved(leaf):
                leaves.append(_locked(leaf) if self._locks else leaf)
            return leaf

        map_leaves(batch, collect)
        event = None
        if self._copy_stream is not None:
            leaves, event = _send(self._copy_stream, leaves)
        moved = iter(leaves)
        rebuilt = map_leaves(batch, lambda leaf: next(moved) if _is_moved(leaf) else leaf)
        return MovedBatch(rebuilt, leaves, event)

    def receive(self, moved: MovedBatch) -> Any:
        """Returns a moved batch; the caller's subsequent work waits for its copies."""
        if moved.event is not None and self._copy_stream is not None:
            self._copy_stream.receive(moved.leaves, moved.event)
        return moved.batch


def _send(copy_stream: CopyStream, leaves: list[Any]) -> tuple[list[Any], CopyEvent]:
    places = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "to")]
    arrived, event = copy_stream.send([leaves[place] for place in places])
    sent = list(leaves)
    for place, leaf in zip(places, arrived, strict=True):
        sent[place] = leaf
    return sent, event


def _locked(leaf: Any) -> Any:
    # torch's allocator of page-locked memory caches blocks and reuses one only when the copies from
    # it are complete, so the sources need not be kept until then.
    return leaf.pin_memory() if getattr(leaf, "device", _HOST) == _HOST else leaf


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
