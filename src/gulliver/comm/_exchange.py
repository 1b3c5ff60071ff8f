"""Reduce-scatter and all-gather by direct exchange, for groups that send point to point.

Every rank posts all its receives, then all its sends, at once: part j of the input goes straight to
rank j. The backend's own thread moves the bytes while Python computes, so that nothing has to be
driven from step to step. Each rank sends and receives (n-1)/n of the whole, as a ring does, in one
latency instead of n-1. (Gloo's reduce-scatter sends twice as much: it is an all-reduce.)

[Note: order of the sum] What arrived is added in the order of the ranks, when somebody waits for
it. So the bits of a sum depend neither on timing nor on where in a buffer a number lies, and sums
may be kept in a wider dtype than what travels.

[Note: tags] Messages are told apart by a tag that every operation takes from a counter of its
group. All ranks must call the operations of a group in one order, from one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import is_gloo

_FIRST_TAG, _TAGS = 1 << 20, 1 << 20
_counters: dict[Any, int] = {}
_buffers: dict[tuple[int, torch.dtype], list[Tensor]] = {}
KEPT = 8
"""Receive buffers of one size that are kept: fresh memory is slow to touch."""


class Messages:
    """Point-to-point messages under way."""

    def __init__(self, works: list[Any], keep: Any = None) -> None:
        self._works, self._keep = works, keep

    def wait(self) -> None:
        """Waits for all of them."""
        for work in self._works:
            work.wait()
        self._works, self._keep = [], None


def sends_directly(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether a group's backend for a tensor is one that this file is for."""
    return tensor.device.type == "cpu" and is_gloo(group, tensor.device)


def direct_all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None
) -> tuple[Messages, None]:
    """Starts an all-gather; every part is received where it belongs."""
    rank, ranks = dist.get_rank(group), _ranks(group)
    parts = output.view(len(ranks), -1)
    if parts[rank].data_ptr() != input.data_ptr():
        parts[rank].copy_(input.view(-1))
    incoming = [(peer, parts[peer]) for peer in _others(rank, len(ranks))]
    outgoing = [(peer, parts[rank]) for peer in _others(rank, len(ranks))]
    return _post(incoming, outgoing, ranks, group), None


def direct_reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: str,
    group: dist.ProcessGroup | None,
) -> tuple[Messages, Callable[[], None]]:
    """Starts a reduce-scatter.

    Args:
        output: this rank's part, perhaps of a wider dtype than the input.
        input: one part for each rank.
        op: sum, mean or max.
        group: of ranks.

    Returns:
        The messages, and what to do with what they brought.
    """
    rank, ranks = dist.get_rank(group), _ranks(group)
    size = len(ranks)
    parts = input.view(size, -1)
    received = _take((size - 1) * parts.shape[1], input.dtype).view(size - 1, -1)
    slots = {peer: received[peer - (peer > rank)] for peer in range(size) if peer != rank}
    order = _others(rank, size)
    messages = _post(
        [(peer, slots[peer]) for peer in order],
        [(peer, parts[peer]) for peer in order],
        ranks,
        group,
    )

    def add_up() -> None:
        terms = [parts[r] if r == rank else slots[r] for r in range(size)]
        in_place = output.data_ptr() == parts[rank].data_ptr()
        total = torch.empty_like(output) if in_place else output
        if op == "max" or total.dtype != input.dtype:
            total.copy_(terms[0])
            first = 1
        else:
            torch.add(terms[0], terms[1], out=total)
            first = 2
        for term in terms[first:]:
            torch.maximum(total, term, out=total) if op == "max" else total.add_(term)
        if op == "mean":
            total.div_(size)
        if in_place:
            output.copy_(total)
        _give(received.view(-1))

    return messages, add_up


def _post(
    incoming: list[tuple[int, Tensor]],
    outgoing: list[tuple[int, Tensor]],
    ranks: list[int],
    group: dist.ProcessGroup | None,
) -> Messages:
    tag = _next_tag(group)
    # Receives first: a send that meets no receive fills buffers, and the pair takes turns.
    works = [dist.irecv(_wire(t), ranks[peer], group=group, tag=tag) for peer, t in incoming]
    works += [dist.isend(_wire(t), ranks[peer], group=group, tag=tag) for peer, t in outgoing]
    return Messages(works, (incoming, outgoing))


def _others(rank: int, size: int) -> list[int]:
    """The other ranks, each rank beginning with its neighbour, so that not all send to one."""
    return [(rank + step) % size for step in range(1, size)]


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def _wire(tensor: Tensor) -> Tensor:
    """As bytes: backends do not know every dtype."""
    return tensor.view(torch.uint8) if tensor.numel() else tensor.new_zeros(1).view(torch.uint8)


def _next_tag(group: dist.ProcessGroup | None) -> int:
    key = group or dist.group.WORLD
    number = _counters.get(key, 0)
    _counters[key] = number + 1
    return _FIRST_TAG + number % _TAGS


def _take(numel: int, dtype: torch.dtype) -> Tensor:
    free = _buffers.get((numel, dtype))
    return free.pop() if free else torch.empty(numel, dtype=dtype)


def _give(buffer: Tensor) -> None:
    free = _buffers.setdefault((buffer.numel(), buffer.dtype), [])
    if len(free) < KEPT:
        free.append(buffer)
