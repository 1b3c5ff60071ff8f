"""Collectives over the axes of a torus by the backend's own collectives, one axis after the other.

For backends without the point-to-point messages of `_steps.py`, NCCL above all. On a GPU the steps
are chained on a stream of their own: the host never waits, and the stream that computes waits for
one event, when somebody asks for the result.

Between two steps the parts are put into the order that the next axis needs, by one copy in the
device's memory; that costs little compared with the link it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import all_gather_flat, reduce_scatter_flat
from gulliver.comm._messages import count_sent
from gulliver.comm._rank_group import RankGroup

_streams: dict[torch.device, torch.cuda.Stream] = {}


class OnStream:
    """Collectives that were queued on a side stream."""

    def __init__(self, device: torch.device, tensors: Sequence[Tensor], run: Callable[[], None]):
        self._stream = _streams.get(device)
        if self._stream is None:
            self._stream = _streams[device] = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            run()
            self._event = self._stream.record_event()
        for tensor in tensors:
            # Freed by the caller, its memory is not used again before the steps are through.
            tensor.record_stream(self._stream)

    def wait(self) -> None:
        """Makes the current stream wait for the last collective."""
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        """Whether the last collective is done."""
        return self._event.query()


def run_chained(tensors: Sequence[Tensor], steps: Callable[[], None]) -> list[Any]:
    """Runs collectives; on a GPU on the side stream, without blocking the host."""
    if tensors[0].is_cuda:
        return [OnStream(tensors[0].device, tensors, steps)]
    steps()
    return []


def chained_reduce_scatter(
    output: Tensor, input: Tensor, op: str, rank_groups: Sequence[RankGroup]
) -> None:
    """Reduce-scatters from the inner to the outer axis."""
    parts = input.view(*(rank_group.size for rank_group in rank_groups), output.numel())
    for depth in reversed(range(len(rank_groups))):
        parts = _reduced(parts.movedim(depth, 0), op, rank_groups[depth], output.dtype)
    output.copy_(parts.view_as(output))
    if op == "mean":
        output.div_(math.prod(rank_group.size for rank_group in rank_groups))


def chained_all_gather(output: Tensor, input: Tensor, rank_groups: Sequence[RankGroup]) -> None:
    """All-gathers from the outer to the inner axis, in the order of the torus."""
    parts = input.view(-1)
    for depth, rank_group in enumerate(rank_groups):
        parts = _gathered(parts.contiguous(), rank_group).movedim(0, depth)
    output.view(parts.shape).copy_(parts)


def chained_all_reduce(tensor: Tensor, op: str, rank_groups: Sequence[RankGroup]) -> None:
    """All-reduces in place: inner axes reduce-scatter and all-gather, the outermost all-reduces."""
    count = math.prod(rank_group.size for rank_group in rank_groups[1:])
    flat = tensor.view(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % count))
    shard = padded
    for rank_group in reversed(rank_groups[1:]):
        shard = _reduced(shard.view(rank_group.size, -1), op, rank_group, shard.dtype)
    count_sent(2 * shard.nbytes * (1 - 1 / rank_groups[0].size))
    work = dist.all_reduce(shard, _operator(op), group=rank_groups[0].process_group, async_op=True)
    assert work is not None
    work.wait()
    if op == "mean":
        shard.div_(math.prod(rank_group.size for rank_group in rank_groups))
    for rank_group in rank_groups[1:]:
        shard = _gathered(shard.view(-1), rank_group)
    flat.copy_(shard.view(-1)[: flat.numel()])


def exchange_and_add(
    output: Tensor, parts: Tensor, op: str, group: dist.ProcessGroup | None
) -> tuple[Any, Callable[[], None]]:
    """Sends parts to their ranks and adds them up there, in `output`'s dtype."""
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=group, async_op=True)

    def add_up() -> None:
        first, *others = received
        output.copy_(first.view_as(output))
        for other in others:
            term = other.view_as(output)
            torch.maximum(output, term, out=output) if op == "max" else output.add_(term)

    return work, add_up


def _reduced(parts: Tensor, op: str, rank_group: RankGroup, dtype: torch.dtype) -> Tensor:
    """Reduce-scatters ``[size, ...]`` over a rank group."""
    order = rank_group.group_order()
    ordered = order == sorted(order)
    source = parts.contiguous() if ordered else parts[order]
    count_sent(source.nbytes * (1 - 1 / rank_group.size))
    total = torch.empty_like(source[0], dtype=dtype)
    if dtype != source.dtype:
        work, finish = exchange_and_add(total, source, op, rank_group.process_group)
        work.wait()
        finish()
        return total
    work = reduce_scatter_flat(
        total.view(-1),
        source.view(-1),
        _operator(op),
        group=rank_group.process_group,
        async_op=True,
    )
    work.wait()
    return total


def _gathered(part: Tensor, rank_group: RankGroup) -> Tensor:
    """All-gathers a part over a rank group: ``[size, ...]``."""
    found = part.new_empty(rank_group.size, *part.shape)
    count_sent(found.nbytes * (1 - 1 / rank_group.size))
    all_gather_flat(
        found.view(-1), part.view(-1), group=rank_group.process_group, async_op=True
    ).wait()
    order = rank_group.group_order()
    return found if order == sorted(order) else found[torch.tensor(order).argsort()]


def _operator(op: str) -> Any:
    return dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
