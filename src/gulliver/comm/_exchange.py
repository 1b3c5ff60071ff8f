"""Reduce-scatter and all-gather by direct exchange, for groups that send point to point.

Every rank posts all its receives, then all its sends, at once: part j of the input goes straight to
rank j. Each rank sends and receives (n-1)/n of the whole, as a ring does, in one
latency instead of n-1. (Gloo's reduce-scatter sends twice as much: it is an all-reduce.)

[Note: order of the sum] What arrived is added in the order of the ranks, when somebody waits for
it. So the bits of a sum depend neither on timing nor on where in a buffer a number lies, and sums
may be kept in a wider dtype than what travels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from gulliver._compat import is_gloo
from gulliver.comm._messages import Messages, give_buffer, next_tag, others, take_buffer
from gulliver.comm._messages import post as post_messages
from gulliver.comm._progress import Step

After = Callable[[], Step | None] | None


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
    rank, ranks, tag = dist.get_rank(group), _ranks(group), next_tag(group)
    parts = output.view(len(ranks), -1)
    order = others(rank, len(ranks))

    def post() -> Messages:
        if parts[rank].data_ptr() != input.data_ptr():
            parts[rank].copy_(input.view(-1))
        own = parts[rank]
        incoming, outgoing = ((ranks[p], parts[p]) for p in order), ((ranks[p], own) for p in order)
        return post_messages(incoming, outgoing, group, tag)

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
    rank, ranks, tag = dist.get_rank(group), _ranks(group), next_tag(group)
    size = len(ranks)
    parts = input.view(size, -1)
    order = others(rank, size)
    slots: dict[int, Tensor] = {}

    def post() -> Messages:
        received = take_buffer((size - 1) * parts.shape[1], input.dtype).view(size - 1, -1)
        slots.update({peer: received[peer - (peer > rank)] for peer in order})
        incoming = ((ranks[p], slots[p]) for p in order)
        outgoing = ((ranks[p], parts[p]) for p in order)
        return post_messages(incoming, outgoing, group, tag)

    def finish() -> Step | None:
        _add_up([parts[r] if r == rank else slots[r] for r in range(size)], output, op)
        base = slots[order[0]]
        give_buffer(base._base if base._base is not None else base)
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


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(group or dist.group.WORLD)
