"""Whole copies of chunks on a rank: for the length of a step, or to be read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gulliver._compat import storage_users, without_torch_functions
from gulliver.comm.collectives import Group, all_gather
from gulliver.comm.watchdog import Purpose
from gulliver.comm.world import guard
from gulliver.errors import GulliverError
from gulliver.memory.chunk import Chunk
from gulliver.memory.managed_chunk import ManagedChunk
from gulliver.memory.prefetch import Presence
from gulliver.parallel.zero.chunks import ShardedChunk
from gulliver.precision.wire.formats import IDENTITY


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


# Copies of chunks that are read and written between passes, and views that outlive their chunk.


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_READS = frozenset({Tensor.detach, _DATA, Tensor.numpy, Tensor.tolist, Tensor.item})  # type: ignore[attr-defined]


# [Note: between passes] Outside of passes and of autograd, such as for a state dict, it is a copy
# of a whole chunk that is read, so that nothing has to be given back. What is written to it, by an
# operation on a parameter or through any view of one (``weight[0].zero_()``,
# ``weight.detach().mul_(2)``, ``weight.data``), is written to the shards before anything else is
# done with the chunk: views share the version counter of the copy, ``.data`` has one of its own.
# While somebody has a view, everybody reads and writes that copy. One that was taken before a step
# has old values, so a write to it is refused, as is one that another write has overtaken.
#
# [Note: views that stay behind] A view of a chunk that is here, as ``weight.detach()`` inside a
# forward, outlives the buffer that it is of: its memory is not used again while it lives, but
# nobody reads it any more. It shares the version counter of its parameter, which nobody else moves
# while the chunk is absent: a write to it is refused.
def is_unrecorded(func: Callable[..., Any]) -> bool:
    """Whether an operation, or function of `torch.nn.init`, is never recorded by autograd."""
    return func in _READS or getattr(func, "__module__", None) == nn.init.__name__


class Copies:
    """Runs operations on copies of chunks, and brings to the shards what they have written."""

    def __init__(
        self,
        chunk_of: Mapping[int, ShardedChunk],
        gathered: Callable[[ShardedChunk], Tensor],
        finish: Callable[[ShardedChunk], None],
        release: Callable[[], None],
    ) -> None:
        self._chunk_of, self._gathered, self._finish = chunk_of, gathered, finish
        self._release = release
        # Copies that somebody may have views of.
        self.lent: list[_ChunkCopy] = []
        # Chunks that were given back while somebody had views, with versions of parameters.
        self.left: dict[ShardedChunk, list[int]] = {}

    def run(self, func: Callable[..., Any], args: tuple, kwargs: Any, step: int) -> Any:
        """Runs an operation on copies in place of parameters."""
        used: list[tuple[nn.Parameter, Tensor, _ChunkCopy | None]] = []

        def replaced(value: Any) -> Any:
            if isinstance(value, nn.Parameter) and id(value) in self._chunk_of:
                view, copy = self._view(value, step, [found for _, _, found in used])
                used.append((value, view, copy))
                return view
            if isinstance(value, list | tuple):
                return type(value)(replaced(v) for v in value)
            return value

        result = func(*replaced(args), **{k: replaced(v) for k, v in kwargs.items()})
        if func == _DATA and used[0][2] is not None:
            return used[0][2].watched(result)
        return next((parameter for parameter, view, _ in used if view is result), result)

    def _view(
        self, parameter: nn.Parameter, step: int, used: Sequence[_ChunkCopy | None]
    ) -> tuple[Tensor, _ChunkCopy | None]:
        """What an operation is given for a parameter, besides copies that it has got already."""
        sharded = self._chunk_of[id(parameter)]
        if sharded.presence is not Presence.ABSENT and sharded.chunk.wire is not IDENTITY:
            self._release()  # what is here was packed when it was sent, and a copy is exact
        if sharded.presence is not Presence.ABSENT:
            self._finish(sharded)
            return parameter.detach(), None
        found = next((c for c in self.lent if c.is_of(sharded, step)), None)
        if found is None:
            self._bring(step, used)  # one at a time, apart from those that somebody has views of
            # Versions are not counted of what is made in inference.
            with torch.inference_mode(False), torch.no_grad():
                found = _ChunkCopy(sharded, self._gathered(sharded), step)
            self.lent.append(found)
        return found.views[id(parameter)], found

    def flush(self, step: int) -> None:
        """Writes dirty copies back, and drops those that nobody has a view of."""
        self._check_left()
        self._bring(step)
        for copy in self.lent:
            copy.is_open = False  # the chunk itself may be written from here on

    def _bring(self, step: int, used: Sequence[_ChunkCopy | None] = ()) -> None:
        for copy in self.lent:
            if copy.is_written():
                self._write_back(copy, step)
        self.lent = [copy for copy in self.lent if copy in used or copy.is_held()]

    def _write_back(self, copy: _ChunkCopy, step: int) -> None:
        sharded = self._chunk_of[id(copy.parameters[0])]
        if isinstance(sharded.chunk, ManagedChunk) and sharded.chunk.has_copy:
            self.lent.remove(copy)
            sharded.chunk.refuse_write()
        if sharded.presence is not Presence.ABSENT:
            self._finish(sharded)
            sharded.chunk.take_writes()
        if copy.step != step or copy.is_overtaken(sharded):
            raise GulliverError(
                "a view of a parameter that was taken before a step, or before another write, was "
                "written: stage 3 gives a copy there, so take parameter.data anew for each write"
            )
        for parameter in copy.parameters:
            # Chunks may have been cut again since.
            sharded, view = self._chunk_of[id(parameter)], copy.views[id(parameter)]
            if sharded.presence is Presence.ABSENT:
                write_back(sharded, parameter, view)
            else:
                self._finish(sharded)
                with torch.no_grad():
                    parameter.detach().copy_(view)
        copy.remember(sharded)

    # Views that stay behind.

    def leave(self, sharded: ShardedChunk, viewed: bool) -> None:
        """Notes a chunk that was given back, and whether somebody has views of its buffer."""
        if viewed or sharded in self.left:
            self.left[sharded] = _versions(sharded)

    def remember(self) -> None:
        """Notes versions again: a step has moved them."""
        for sharded in self.left:
            self.left[sharded] = _versions(sharded)

    def _check_left(self) -> None:
        for sharded, versions in self.left.items():
            if sharded.presence is not Presence.ABSENT:
                continue
            found = _versions(sharded)
            if found != versions:
                names = list(sharded.chunk.parameters)
                name = next(n for n, a, b in zip(names, versions, found, strict=True) if a != b)
                self.left[sharded] = found
                raise GulliverError(
                    f"a view of {name!r} was written that was taken in a forward, or while it was "
                    "gathered: stage 3 has given its memory back since, so take the view anew"
                )


class _ChunkCopy:
    """A copy of a chunk's parameters, and how to see whether it was written."""

    def __init__(self, sharded: ShardedChunk, whole: Tensor, step: int) -> None:
        chunk = sharded.chunk
        self.step, self.is_open = step, True
        self.parameters, self._whole = chunk.members, whole
        views = chunk.named_views(whole)
        self.views = {id(p): views[name] for name, p in chunk.parameters.items()}
        self._users, self._data = storage_users(whole), list[tuple[Tensor, int]]()
        self.remember(sharded)

    def remember(self, sharded: ShardedChunk) -> None:
        """Takes what it holds now for what the shards hold."""
        self._sharded, self._writes = sharded, sharded.chunk.writes
        self._version = self._whole._version
        self._data = [(data, data._version) for data, _ in self._data]

    def is_of(self, sharded: ShardedChunk, step: int) -> bool:
        """Whether it has the values of a chunk now."""
        return self.is_open and self._sharded is sharded and self.step == step

    def watched(self, data: Tensor) -> Tensor:
        """A view of ``parameter.data`` of which writes are noticed."""
        self._data.append((data, data._version))
        return data.view(data.shape)

    def is_written(self) -> bool:
        """Whether something was written to it."""
        moved = self._whole._version != self._version
        return moved or any(data._version != version for data, version in self._data)

    def is_overtaken(self, sharded: ShardedChunk) -> bool:
        """Whether other values have come to the shards since."""
        return self._sharded is sharded and sharded.chunk.writes != self._writes

    def is_held(self) -> bool:
        """Whether somebody else has a view of it."""
        return storage_users(self._whole) > self._users + len(self._data)


def write_back(sharded: ShardedChunk, parameter: nn.Parameter, values: Tensor) -> None:
    """Brings values of a parameter to this rank's shard of its chunk."""
    chunk = sharded.chunk
    for piece in chunk.layout.pieces(chunk.part):
        if chunk.parameters[piece.name] is parameter:
            part = values.reshape(-1)[piece.offset : piece.offset + piece.numel]
            with chunk.opened(write=True):
                chunk.merge(chunk.master_shard[piece.start : piece.end], part)


def _versions(sharded: ShardedChunk) -> list[int]:
    with without_torch_functions():
        return [parameter._version for parameter in sharded.chunk.members]
