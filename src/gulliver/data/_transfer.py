"""The way of a finished batch: into the arena, and on to the device ahead of its use.

It does not know where batches come from, nor in which thread it runs.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gulliver.data._arena import Event, PinnedArena
from gulliver.data._nested import map_leaves


class Lane(Protocol):
    """How tensors get to a device."""

    def send(self, leaves: list[Any]) -> tuple[list[Any], Event]:
        """Starts copies; the event happens when the sources are no longer read."""
        ...

    def receive(self, leaves: list[Any], event: Event) -> None:
        """Orders what the caller does from now on behind the copies."""
        ...


class CudaLane:
    """Copies on a stream of its own, which waits for nothing.

    Args:
        device: with its index.
        depth: most copies under way; one more waits for the oldest, in the thread that sends. So
            the host memory that copies hold is bounded too.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self._device, self._depth = device, depth
        self._stream = torch.cuda.Stream(device)
        self._under_way: deque[Event] = deque()

    def send(self, leaves: list[Any]) -> tuple[list[Any], Event]:
        """Starts copies of tensors, and of objects that have a method ``to``."""
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        if len(self._under_way) >= self._depth:
            self._under_way.popleft().synchronize()
        # The results' memory belongs to this stream: it never waits for the compute stream, but
        # what `receive` records keeps it from being used again too early.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            sent = [leaf.to(self._device, non_blocking=True) for leaf in leaves]
            event = torch.cuda.Event()
            event.record(self._stream)
        self._under_way.append(event)
        return sent, event

    def receive(self, leaves: list[Any], event: Event) -> None:
        """Makes the caller's current stream wait for the copies, and the memory for that stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)  # type: ignore[arg-type]
        for leaf in leaves:
            if hasattr(leaf, "record_stream"):
                leaf.record_stream(stream)


class Moved(NamedTuple):
    """A batch on its way, and what its receiver has to wait for."""

    batch: Any
    leaves: list[Any]
    event: Event | None


class Mover:
    """Moves batches into an arena and, where there is a lane, on to a device.

    Args:
        arena: None leaves host tensors where they are.
        lane: None leaves batches on the host.
    """

    def __init__(self, arena: PinnedArena | None, lane: Lane | None) -> None:
        self._arena, self._lane = arena, lane

    def move(self, batch: Any) -> Moved:
        """Copies a batch; starts its copy to the device."""
        if self._arena is None and self._lane is None:
            return Moved(batch, [], None)
        leaves: list[Any] = []

        def collect(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) or hasattr(leaf, "pin_memory"):
                leaves.append(leaf)
            return leaf

        map_leaves(batch, collect)
        staged = leaves if self._arena is None else self._stage(self._arena, leaves)
        sent, event = staged, None
        if self._lane is not None:
            travelling = [place for place, leaf in enumerate(staged) if hasattr(leaf, "to")]
            arrived, event = self._lane.send([staged[place] for place in travelling])
            sent = list(staged)
            for place, leaf in zip(travelling, arrived, strict=True):
                sent[place] = leaf
            if self._arena is not None:
                self._arena.hold([leaf for leaf in staged if isinstance(leaf, Tensor)], event)
        moved = iter(sent)
        rebuilt = map_leaves(
            batch,
            lambda leaf: (
                next(moved) if isinstance(leaf, Tensor) or hasattr(leaf, "pin_memory") else leaf
            ),
        )
        return Moved(rebuilt, sent, event)

    def receive(self, moved: Moved) -> Any:
        """The batch, in order behind its copies for what the caller does next."""
        if moved.event is not None and self._lane is not None:
            self._lane.receive(moved.leaves, moved.event)
        return moved.batch

    @staticmethod
    def _stage(arena: PinnedArena, leaves: list[Any]) -> list[Any]:
        """Host tensors go into the arena; objects lock their own memory, where locking is on."""
        tensors = iter(arena.copy_all([leaf for leaf in leaves if isinstance(leaf, Tensor)]))
        return [
            next(tensors)
            if isinstance(leaf, Tensor)
            else (leaf.pin_memory() if arena.is_pinned else leaf)
            for leaf in leaves
        ]
