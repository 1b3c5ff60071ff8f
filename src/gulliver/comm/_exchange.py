"""Reduce-scatter and all-gather by direct exchange, for groups that send point to point.

Every rank posts all its receives, then all its sends, at once: part j of the input goes straight to
rank j. Each rank sends and receives (n-1)/n of the whole, as a ring does, in one
latency instead of n-1. (Gloo's reduce-scatter sends twice as much: it is an all-reduce.)

[Note: order of the sum] What arrived is added in the order of the ranks, when somebody waits for
it. So the bits of a sum depend neither on timing nor on where in a buffer a number lies, and sums
may be kept in a wider dtype than what travels.

[Note: tags] Messages are told apart by a tag that every operation takes from a counter of its
group when it is handed in. All ranks must hand in the operations of a group in one order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import is_gloo
from gulliver.comm._progress import Step

After = Callable[[], Step | None] | None

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
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None, after: After = None
) -> Step:
    """An all-gather; every part is received where it belongs.

    Args:
        output: one part for each rank.
        input: this rank's part, perhaps in its place in `output`.
        group: of ranks.
        after: names the step that follows.
    """
    rank, ranks, tag = dist.get_rank(group), _ranks(group), _next_tag(group)
    parts = output.view(len(ranks), -1)
    order = _others(rank, len(ranks))

    def post() -> Messages:
        if parts[rank].data_ptr() != input.data_ptr():
            parts[rank].copy_(input.view(-1))
        own = parts[rank]
        return _post([(p, parts[p]) for p in order], [(p, own) for p in order], ranks, group, tag)

    return Step(post, after or (lambda: None))


def direct_reduce_scatter(
    output: Tensor, input: Tensor, op: str, group: dist.ProcessGroup | None, after: After = None
) -> Step:
    """A reduce-scatter.

    Args:
        output: this rank's part, perhaps of a wider dtype than the input.
        input: one part for each rank.
        op: sum, mean or max.
        group: of ranks.
        after: names the step that follows.
    """
    rank, ranks, tag = dist.get_rank(group), _ranks(group), _next_tag(group)
    size = len(ranks)
    parts = input.view(size, -1)
    order = _others(rank, size)
    slots: dict[int, Tensor] = {}

    def post() -> Messages:
        received = _take((size - 1) * parts.shape[1], input.dtype).view(size - 1, -1)
        slots.update({peer: received[peer - (peer > rank)] for peer in order})
        incoming, outgoing = [(p, slots[p]) for p in order], [(p, parts[p]) for p in order]
        return _post(incoming, outgoing, ranks, group, tag)

    def finish() -> Step | None:
        _add_up([parts[r] if r == rank else slots[r] for r in range(size)], output, op)
        base = slots[order[0]]
        _give(base._base if base._base is not None else base)
        return after() if after else None

    return Step(post, finish)


def _add_up(terms: list[Tensor], output: Tensor, op: str) -> None:
    """Reduces terms in their order; `output` may be one of them."""
    in_place = any(output.data_ptr() == term.data_ptr() for term in terms)
    total = torch.empty_like(output) if in_place else output
    if op == "max" or total.dtype != terms[0].dtype:
        total.copy_(terms[0])
        rest = terms[1:]
    else:
        torch.add(terms[0], terms[1], out=total)
        rest = terms[2:]
    for term in rest:
        torch.maximum(total, term, out=total) if op == "max" else total.add_(term)
    if op == "mean":
        total.div_(len(terms))
    if in_place:
        output.copy_(total)


def _post(
    incoming: list[tuple[int, Tensor]],
    outgoing: list[tuple[int, Tensor]],
    ranks: list[int],
    group: dist.ProcessGroup | None,
    tag: int,
) -> Messages:
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
