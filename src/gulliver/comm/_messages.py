"""Point-to-point messages: how they are posted and matched, and the buffers they arrive in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver.comm._flight_recorder import ANY, Purpose, flight_recorder
from gulliver.comm._wire import as_bytes

TAGS = 1 << 20
"""Tags of one purpose; the first so many are left to others. Those of gloo have 31 bits."""
_NUMBERS = 1 << 15
"""Those of one purpose in one wire format; many more than can be under way."""
_counters: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_exchanges: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}
_lock = threading.Lock()
_kept_bytes = _sent_bytes = 0
KEPT_BYTES = 128 << 20
"""Receive buffers that are kept for the next operation: fresh memory is slow to touch."""


# [Note: tags] Messages are matched by tags that every operation takes from a counter of its
# group when it is handed in, and by what the operation is for, where that is known (see
# `_flight_recorder.py`). All ranks must hand in the operations of a group in one order; after that,
# nothing depends on the order in which they are posted.
class Messages:
    """Point-to-point messages in flight."""

    def __init__(
        self, works: list[Any], keep: Any = None, finish: Callable[[], None] | None = None
    ) -> None:
        self._works, self._keep, self._finish = works, keep, finish

    def wait(self) -> None:
        """Waits for all of them."""
        for work in self._works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        self._works, self._keep = [], None


def receive(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Any:
    """Starts a receive from a rank of the world."""
    return dist.irecv(_content(tensor), peer, group=group, tag=tag)


def count_sent(count: float) -> None:
    """Counts bytes sent to other ranks; called from any thread."""
    global _sent_bytes
    with _lock:
        _sent_bytes += int(count)


def sent_bytes() -> int:
    """Bytes of tensors that this process has sent to other ranks so far."""
    # Those of our own messages are counted as they are posted. What a backend does by itself counts
    # as a ring: (n - 1) / n of the tensor, of an all-reduce twice. Objects, broadcasts and the
    # messages of torch's DDP are not counted.
    return _sent_bytes


def send(tensor: Tensor, peer: int, group: dist.ProcessGroup | None, tag: int) -> Any:
    """Starts a send to a rank of the world."""
    count_sent(tensor.nbytes)
    return dist.isend(_content(tensor), peer, group=group, tag=tag)


def exchange_parts(
    incoming: Iterable[tuple[int, Tensor]],
    outgoing: Iterable[tuple[int, Tensor]],
    group: dist.ProcessGroup | None,
    tag: int,
) -> Messages:
    """Posts one message from and one to each of some ranks of the world."""
    incoming, outgoing = list(incoming), list(outgoing)
    # Receives first: a send that meets no receive fills buffers, and the pair takes turns.
    works = [receive(tensor, peer, group, tag) for peer, tensor in incoming]
    works += [send(tensor, peer, group, tag) for peer, tensor in outgoing]
    return Messages(works, (incoming, outgoing))


def others(rank: int, size: int) -> list[int]:
    """The other ranks, beginning with the next one, so that not all ranks send to the same."""
    return [(rank + step) % size for step in range(1, size)]


def next_tag(group: dist.ProcessGroup | None, count: int = 1, purpose: Purpose = ANY) -> int:
    """The first of `count` tags that follow each other and belong to the caller."""
    key = group or dist.group.WORLD
    with _lock:
        number = _counters.get(key, 0)
        if number + count > _NUMBERS:
            number = 0
        _counters[key] = number + count
    flight_recorder.note(key, number, purpose)
    return (1 + purpose.code) * TAGS + purpose.wire * _NUMBERS + number


def note_exchange(group: dist.ProcessGroup | None, purpose: Purpose) -> None:
    """Records an exchange that all ranks of a group make with tags of their own."""
    # Numbered by themselves, below those of collectives, whose tags stay what they are.
    key = group or dist.group.WORLD
    with _lock:
        _exchanges[key] = (_exchanges.get(key, 0) + 1) % TAGS
        number = _exchanges[key] - TAGS
    flight_recorder.note(key, number, purpose)


def take_buffer(numel: int, dtype: torch.dtype) -> Tensor:
    """A flat, uninitialized buffer."""
    global _kept_bytes
    with _lock:
        free = _buffers.get((numel, dtype))
        if free:
            buffer = free.pop()
            _kept_bytes -= buffer.nbytes
            return buffer
    return torch.empty(numel, dtype=dtype)


def give_buffer(buffer: Tensor) -> None:
    """Gives a buffer of `take_buffer` back; the least recently used are freed above a limit."""
    global _kept_bytes
    key = (buffer.numel(), buffer.dtype)
    with _lock:
        # The size that was used last stands last.
        free = _buffers.pop(key, [])
        free.append(buffer)
        _buffers[key] = free
        _kept_bytes += buffer.nbytes
        while _kept_bytes > KEPT_BYTES:
            oldest = next(iter(_buffers))
            if not _buffers[oldest]:
                del _buffers[oldest]
                continue
            _kept_bytes -= _buffers[oldest].pop().nbytes


def _content(tensor: Tensor) -> Tensor:
    """The bytes to send for a tensor; an empty one is sent as one element."""
    return as_bytes(tensor if tensor.numel() else tensor.new_zeros(1))
