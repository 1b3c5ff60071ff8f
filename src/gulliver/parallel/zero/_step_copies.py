"""Whole copies of chunks on a rank: for the length of a step, or to be read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from gulliver.comm import Group, Purpose, all_gather, guard
from gulliver.memory import Chunk, ManagedChunk
from gulliver.parallel.zero._sharded import ShardedChunk


# [Note: copies of a step] Under a memory limit stage 3 gathers chunk by chunk, which all ranks do
# in one order. Ranks with unequal work cannot. So when such a step begins, every chunk is gathered
# once, into an object of the memory manager that may leave like any other state; after that this
# rank brings it by itself. Behind the first memory that takes the parameters once more on each
# rank.
def has_copy(chunk: Chunk) -> bool:
    """Whether this rank has a copy of all of a chunk now."""
    return isinstance(chunk, ManagedChunk) and chunk.has_copy


def comes_alone(chunk: Chunk) -> bool:
    """Whether a chunk is made whole by this rank, and no other takes part."""
    return chunk.layout.parts == 1 or has_copy(chunk)


@contextmanager
def step_copies(
    chunks: Sequence[ShardedChunk], group: Group, purpose: Callable[[ShardedChunk], Purpose]
) -> Iterator[None]:
    """Gathers chunks under a limit from copies on this rank; every rank enters and leaves it."""
    with ExitStack() as stack:
        for sharded in chunks:
            chunk = sharded.chunk
            assert isinstance(chunk, ManagedChunk), "there is a limit"
            with guard(), chunk.making_copy() as (whole, part):
                all_gather(whole, part, group, purpose=purpose(sharded))
            stack.callback(chunk.end_copy)
        yield


def whole_copy(sharded: ShardedChunk, group: Group, purpose: Purpose) -> Tensor:
    """A copy of a whole chunk; unless there is one every rank calls it, to send its part."""
    chunk = sharded.chunk
    if isinstance(chunk, ManagedChunk) and chunk.has_copy:
        return chunk.copied()
    with chunk.opened():
        part = chunk.master_shard.to(chunk.dtype, copy=True)
    if chunk.layout.parts == 1:
        return part
    whole = torch.empty(chunk.layout.size, dtype=chunk.dtype, device=chunk.device)
    with guard():
        all_gather(whole, part, group, purpose=purpose)
    return whole
