"""The way of a finished batch: into the arena, and on to the device ahead of its use.

It does not know where batches come from, nor in which thread it runs.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gulliver.data.arena import CopyEvent, PinnedArena, map_leaves
from gulliver.errors import GulliverError


class CopyStream(Protocol):
    """A way of copying tensors to a device."""

    def send(self, leaves: list[Any]) -> tuple[list[Any], CopyEvent]:
        """Starts copies; the event happens when the sources are no longer read."""
        ...

    def receive(self, leaves: list[Any], event: CopyEvent) -> None:
        """Orders what the caller does next behind the copies."""
        ...


class CudaCopyStream:
    """Copies on a copy stream of its own, which never waits for the compute stream."""

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device, self._depth = device, depth
        self._stream = torch.cuda.Stream(device)
        self._under_way: deque[CopyEvent] = deque()

    def send(self, leaves: list[Any]) -> tuple[list[Any], CopyEvent]:
        """Starts copies of tensors, and of objects that have a method ``to``."""
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
        """Makes the caller's current stream wait for the copies; memory waits for it."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)  # type: ignore[arg-type]
        for leaf in leaves:
            if hasattr(leaf, "record_stream"):
                leaf.record_stream(stream)


class MovedBatch(NamedTuple):
    """A batch that is being copied, and what its receiver has to wait for."""

    batch: Any
    leaves: list[Any]
    event: CopyEvent | None


class Mover:
    """Moves batches into an arena and, by a copy stream, on to a device."""

    def __init__(
        self, arena: PinnedArena | None, copy_stream: CopyStream | None, locks: bool = False
    ) -> None:
        self._arena, self._copy_stream, self._locks = arena, copy_stream, locks

    def move(self, batch: Any) -> MovedBatch:
        """Copies a batch; starts its copy to the device."""
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
        """Returns the batch; what the caller does next is ordered behind its copies."""
        if moved.event is not None and self._copy_stream is not None:
            self._copy_stream.receive(moved.leaves, moved.event)
        return moved.batch

    def _stage(self, leaves: list[Any]) -> list[Any]:
        """Copies host tensors into the arena; other objects lock their memory by `pin_memory`."""
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
        """Sends what has a method ``to``; its sources are kept until the device has read them."""
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
    """Makes the way to a device; None for the host."""
    return CudaCopyStream(device, ahead) if device is not None and device.type == "cuda" else None


def device_of(device: torch.device | str | None) -> torch.device | None:
    """Resolves the device that batches go to; None where none is named."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise GulliverError(f"no device {device!r}: {str(error).splitlines()[0]}") from None
    if found.type not in ("cpu", "cuda"):
        raise GulliverError(f"batches go to 'cpu' or 'cuda', not to {found.type!r}")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise GulliverError("there is no CUDA device: leave `device` out, or choose 'cpu'")
        index = torch.cuda.current_device() if found.index is None else found.index
        found = torch.device("cuda", index)
    return found
