"""Reduce-scatter and all-gather by direct exchange, for groups that send point to point.

Every rank posts all its receives, then all its sends, at once: part j of the input goes straight to
rank j. Each rank sends and receives (n-1)/n of the whole, as a ring does, in one
latency instead of n-1. (Gloo's reduce-scatter sends twice as much: it is an all-reduce.)
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import is_gloo
from gulliver.comm._flight_recorder import ANY, Purpose
from gulliver.comm._messages import exchange_parts, give_buffer, next_tag, others, take_buffer
from gulliver.comm._progress import Steps
from gulliver.comm._steps import add_up


# [Note: order of the sum] What arrived is added in the order of the ranks, when somebody waits for
# it. So the bits of a sum depend neither on timing nor on where in a buffer a number lies, and sums
# may be kept in a wider dtype than what travels.
def sends_directly(group: dist.ProcessGroup | None, tensor: Tensor) -> bool:
    """Whether a group's backend for a tensor is one that this file is for."""
    return tensor.device.type == "cpu" and _place(group).gloo


def direct_all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None, purpose: Purpose = ANY
) -> Steps:
    """An all-gather; every part is received where it belongs."""
    # Tags are taken when the collective is handed in, not when it is begun.
    return _all_gather(output, input, group, next_tag(group, 1, purpose))


def direct_reduce_scatter(
    output: Tensor, input: Tensor, op: str, group: dist.ProcessGroup | None, purpose: Purpose = ANY
) -> Steps:
    """A reduce-scatter."""
    return _reduce_scatter(output, input, op, group, next_tag(group, 1, purpose))


def _all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup | None, tag: int) -> Steps:
    rank, ranks, _ = _place(group)
    parts = output.view(len(ranks), input.numel())
    if parts[rank].data_ptr() != input.data_ptr():
        parts[rank].copy_(input.view(-1))
    own, order = parts[rank], others(rank, len(ranks))
    incoming, outgoing = ((ranks[p], parts[p]) for p in order), ((ranks[p], own) for p in order)
    yield exchange_parts(incoming, outgoing, group, tag)


def _reduce_scatter(
    output: Tensor, input: Tensor, op: str, group: dist.ProcessGroup | None, tag: int
) -> Steps:
    rank, ranks, _ = _place(group)
    size, order = len(ranks), others(rank, len(ranks))
    parts = input.view(size, output.numel())
    buffer = take_buffer((size - 1) * parts.shape[1], input.dtype)
    received = buffer.view(size - 1, parts.shape[1])
    incoming = ((ranks[p], received[p - (p > rank)]) for p in order)
    outgoing = ((ranks[p], parts[p]) for p in order)
    yield exchange_parts(incoming, outgoing, group, tag)
    add_up(output, parts[rank], received, rank, op)
    if op == "mean":
        output.div_(size)
    give_buffer(buffer)


class _Place(NamedTuple):
    """Where this process is in a group."""

    rank: int
    ranks: list[int]
    gloo: bool


_places: WeakKeyDictionary[Any, _Place] = WeakKeyDictionary()


def _place(group: dist.ProcessGroup | None) -> _Place:
    """This process's place in a group, asked once: torch takes dozens of calls to tell it."""
    key = group or dist.group.WORLD
    found = _places.get(key)
    if found is None:
        gloo = is_gloo(group, torch.device("cpu"))
        found = _Place(dist.get_rank(group), dist.get_process_group_ranks(key), gloo)
        _places[key] = found
    return found
