"""Gathers parameters before use and frees them afterwards; autograd saves references to them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from gulliver._compat import (
    Recomputed,
    at_end_of_backward,
    backward_number,
    outside_transforms,
    saving_is_hooked,
    storage_users,
)
from gulliver.comm.collectives import Group, Handle, all_gather
from gulliver.comm.watchdog import Purpose, guard
from gulliver.errors import GulliverError
from gulliver.memory.buffers import Presence
from gulliver.memory.chunk import Chunk
from gulliver.memory.managed_chunk import ManagedChunk
from gulliver.memory.pending import before_write, mark_pending, mark_ready
from gulliver.memory.prefetch import Pass, Prefetcher
from gulliver.parallel.zero.chunks import ShardedChunk, check_not_ahead
from gulliver.precision.wire.formats import IDENTITY


class SavedParameter:
    """Reference that autograd saves in place of a parameter, or of a view of one."""

    __slots__ = ("offset", "parameter", "size", "step", "stride")

    def __init__(self, parameter: nn.Parameter, step: int, size: Any, stride: Any, offset: int):
        self.parameter, self.step = parameter, step
        self.size, self.stride, self.offset = size, stride, offset


# Gathers parameters from the shards; an access waits only for its chunk.
#
# With stages 0 to 2 a step gathers every chunk once, in the order of use. With stage 3 parameters
# are gathered and freed in passes, see `gulliver.memory.prefetch`: access to a chunk issues the
# gathers up to it and a few ahead, in the same order on all ranks. In backward, reductions are
# issued between gathers, so ranks that skip different chunks would reduce at different times (see
# `comm/watchdog.py`).


_alone: WeakSet[Gatherer] = WeakSet()
"""Gatherers under a memory limit whose chunks can be freed and restored without communication."""

_WHY = {
    Pass.NONE: "for a read of parameters",
    Pass.FORWARD: "for a forward",
    Pass.BACKWARD: "for a backward",
}


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_READS = frozenset({Tensor.detach, _DATA, Tensor.numpy, Tensor.tolist, Tensor.item})  # type: ignore[attr-defined]


def _is_unrecorded(func: Callable[..., Any]) -> bool:
    """Whether an operation is never recorded by autograd, or is a function of `torch.nn.init`."""
    return func in _READS or getattr(func, "__module__", None) == nn.init.__name__


def _comes_alone(chunk: Chunk) -> bool:
    return chunk.layout.parts == 1 or (isinstance(chunk, ManagedChunk) and chunk.has_copy)


# [Note: reading] Access is detected by `gulliver.memory.pending.mark_pending`, not by hooks of
# modules. Outside of passes and autograd, as for a state dict, the chunk is gathered for the reader
# and stays until another chunk is read, or a pass, a step or a save begins. Only then are writes to
# it copied to the shards. A later write to a view would have no effect, so it is rejected: the view
# shares the version counter of its parameter, which is not incremented otherwise while the chunk is
# absent. `full_parameters` keeps all chunks gathered for a block.
#
# [Note: writes through .data] A write through ``parameter.data`` does not increment the version
# counter of the parameter, and no hook detects it. Below stage 3, without master weights, it needs
# no handling: the shard is a view of the parameters, so the write also changes the shard. With
# stage 3 the shard is a separate tensor, and the written buffer is about to be freed. So values are
# compared: before a chunk is freed, gathered again or stepped, each rank compares its own part of
# the buffer with the shard, and copies differing elements (`Chunk.take_writes`); only these,
# because master weights have more bits than the parameters. As every rank only checks its own part,
# a write must be the same on all ranks.
#
# Packed parameters, and those under a memory limit, are compared only if a version counter has
# changed; between passes `parameter.data` shares it.
#
# [Note: packed parameters] In a wire format all ranks compute with the same rounded values,
# including the owner, whose shard keeps the exact ones. With stages 1 and 2 the buffers persist
# between gathers, so changes are sent: the difference between this rank's part and its shard, which
# includes earlier packing errors. So the error of parameters is that of packing one change. With
# stage 3 values are sent, with the full error of the format; nothing is gathered before the forward
# that uses it, because reads between passes return exact values. Checkpoints have the values of the
# shards.
class Gatherer:
    """Gathers the parameters of chunks on every rank, and prefetches chunks."""

    def __init__(
        self,
        sharded: bool,
        group: Group,
        ahead: int = 2,
        overlap: bool = True,
        every: bool = True,
        tight: bool = False,
    ) -> None:
        self.chunks: list[ShardedChunk] = []
        self.sharded, self.group = sharded, group
        self.ahead, self.overlap = ahead, overlap
        self.step = 0
        self._every, self._tight = every, tight
        self._prefetcher = Prefetcher([], self, ahead, every, tight)
        self._chunk_of: dict[int, ShardedChunk] = {}
        self._depth, self._stays = 0, False
        self._now: list[ShardedChunk] = []
        self._at: list[tuple[int, ShardedChunk]] = []
        self._begins: list[int] = []
        # Chunks that were gathered for reads between passes.
        self._reads: list[ShardedChunk] = []
        # Chunks that were freed while views existed, with the versions of their parameters.
        self._left: dict[ShardedChunk, list[int]] = {}
        if sharded and not every:
            _alone.add(self)

    def take(self, chunks: Sequence[ShardedChunk]) -> None:
        self.chunks = list(chunks)
        self._chunk_of.clear()
        self._chunk_of.update({id(p): c for c in chunks for p in c.chunk.members})
        self._prefetcher = Prefetcher(self.chunks, self, self.ahead, self._every, self._tight)
        self._at, self._begins = [], []
        self._reads, self._left = [], {}
        for sharded in chunks:
            if sharded.chunk.buffer is None:
                sharded.presence = Presence.ABSENT
                mark_pending(sharded.chunk.members, self.touched)

    # States of a chunk: absent or updated, arriving, whole, absent.

    def start(self, sharded: ShardedChunk, exact: bool = False) -> None:
        chunk = sharded.chunk
        # Reads between passes are as exact as checkpoints.
        exact = exact or (self.sharded and self._prefetcher.current is Pass.NONE)
        chunk.sent_exact = exact
        if sharded.presence is Presence.ABSENT:
            chunk.materialise()
            sharded.users = storage_users(chunk.data)
            self._remember(sharded)
        else:
            before_write([chunk.data])
            if exact or chunk.shown_part is None:
                chunk.publish()
        if alone := _comes_alone(chunk):
            if sharded.presence is Presence.WHOLE:
                return  # the parameters are the stepped tensors
            sharded.gathering = Handle()
        else:
            changes = chunk.shown_part is not None and not exact
            sharded.gathering = all_gather(
                chunk.data,
                chunk.change() if changes else chunk.shard,
                self.group,
                async_op=True,
                purpose=self._purpose(sharded),
                wire=IDENTITY if exact else chunk.wire,
                add=changes,
            )
        sharded.enter(Presence.ARRIVING)
        if not self.overlap or alone:
            self.finish(sharded)
        else:
            mark_pending(chunk.members, self.touched)

    def show(self, sharded: ShardedChunk, part: Tensor) -> None:
        """Unshards a chunk from values that differ from its shards; `part` is this rank's part."""
        self.finish(sharded)
        before_write([sharded.chunk.data])
        with guard():
            purpose = self._purpose(sharded)
            all_gather(sharded.chunk.data, part.contiguous(), self.group, purpose=purpose)
        sharded.chunk.note_gathered()

    def bring(self, sharded: ShardedChunk) -> None:
        if sharded.presence is not Presence.ABSENT:
            # It is loaded here, but other ranks still need this rank's part.
            self.finish(sharded)
            sharded.chunk.take_writes()
        self.start(sharded)

    def finish(self, sharded: ShardedChunk) -> None:
        if sharded.presence is not Presence.ARRIVING:
            return
        assert sharded.gathering is not None
        with guard():
            sharded.gathering.wait()
        sharded.gathering = None
        sharded.chunk.note_gathered()
        sharded.enter(Presence.WHOLE)
        if not sharded.is_ahead:
            mark_ready(sharded.chunk.members)

    def release(self, sharded: ShardedChunk) -> None:
        self.finish(sharded)
        if sharded.presence is not Presence.WHOLE:
            return
        sharded.chunk.take_writes()
        self._forget(sharded)
        viewed = storage_users(sharded.chunk.data) > sharded.users
        sharded.chunk.release(viewed, viewed and sharded in self._reads)
        if viewed or sharded in self._left:
            self._left[sharded] = sharded.chunk.versions()
        sharded.enter(Presence.ABSENT)
        sharded.asked = False
        mark_pending(sharded.chunk.members, self.touched)

    def _remember(self, sharded: ShardedChunk) -> None:
        """Records the addresses of a chunk whose parameters autograd may save."""
        begin, nbytes = sharded.chunk.data.data_ptr(), sharded.chunk.nbytes
        number = bisect_right(self._begins, begin)
        self._begins.insert(number, begin)
        self._at.insert(number, (begin + nbytes, sharded))

    def _forget(self, sharded: ShardedChunk) -> None:
        number = next((n for n, (_, chunk) in enumerate(self._at) if chunk is sharded), None)
        if number is not None:
            del self._begins[number], self._at[number]

    def finish_all(self) -> None:
        self.check_views()
        for sharded in self.chunks:
            self.finish(sharded)

    def release_all(self) -> None:
        """Reshards all chunks; below stage 3, only waits for pending gathers."""
        if self.sharded:
            self.check_views()
            self._prefetcher.release_all()
            self._reads = []
        else:
            self.finish_all()

    def _purpose(self, sharded: ShardedChunk) -> Purpose:
        why = _WHY[self._prefetcher.current] if self.sharded else "after a step"
        return sharded.purpose("gathers", why)

    # Passes (stage 3 only).

    def enter_forward(self) -> None:
        self._depth += 1
        if self.sharded and self._depth == 1 and self._prefetcher.current is not Pass.BACKWARD:
            self._begin(Pass.FORWARD)

    def leave_forward(self) -> None:
        self._depth -= 1
        if self.sharded and self._depth == 0 and self._prefetcher.current is Pass.FORWARD:
            self._prefetcher.end_forward(keep_last=torch.is_grad_enabled())
            self._see_operations(self.chunks)

    def enter_backward(self) -> None:
        if self.sharded and not self._stays and self._prefetcher.current is not Pass.BACKWARD:
            self._begin(Pass.BACKWARD)

    def leave_backward(self) -> None:
        if self.sharded and self._prefetcher.current is Pass.BACKWARD:
            self._prefetcher.end_backward()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Context in which all chunks stay unsharded, so passes neither gather nor free."""
        # Every rank enters and leaves it, but may run different passes inside. Under a limit chunks
        # are evicted and loaded, by each rank from its own copy, which is created here.
        if not self.sharded or self in _alone:
            yield
            return
        if self._tight:
            with self._from_copies():
                yield
            return
        self.enter_forward()
        self._stays = True
        try:
            with torch.no_grad():  # no graph refers to them yet
                self.use_together(self.chunks)
            yield
        finally:
            self._stays = False
            self._depth -= 1
            self.release_all()

    # [Note: copies of a step] Under a memory limit stage 3 gathers chunk by chunk, in the same
    # order on all ranks, which is impossible for ranks with unequal work. So at the beginning of
    # such a step, every chunk is gathered once into a managed tensor, which may be evicted like any
    # other state; afterwards each rank loads it independently. So the slower tiers hold another
    # copy of the parameters on each rank.
    @contextmanager
    def _from_copies(self) -> Iterator[None]:
        self.release_all()
        before = self._prefetcher
        with ExitStack() as stack:
            for sharded in self.chunks:
                chunk = sharded.chunk
                assert isinstance(chunk, ManagedChunk), "there is a limit"
                with guard(), chunk.making_copy() as (whole, part):
                    all_gather(whole, part, self.group, purpose=self._purpose(sharded))
                stack.callback(chunk.end_copy)
            self._prefetcher = Prefetcher(self.chunks, self, 0, every=False, tight=True)
            stack.callback(setattr, self, "_prefetcher", before)
            _alone.add(self)
            stack.callback(_alone.discard, self)
            stack.callback(self.release_all)
            yield

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        # Under a limit there is no room for all chunks, so each is loaded when it is read.
        self.release_all()
        if self.sharded and not self._tight:
            self._stays, self._reads = True, list(self.chunks)
            with torch.no_grad():
                for sharded in self.chunks:
                    self._prefetcher.use(sharded)
            self._see_operations(self.chunks)
        try:
            yield
        finally:
            self._stays = False
            self.release_all()
            if not self.sharded:
                for sharded in self.chunks:
                    sharded.chunk.take_writes()

    def _follow_backward(self) -> None:
        """Detects a backward pass whose hook was not called, as in a pipeline's micro-batch."""
        if self.sharded and self._prefetcher.current is Pass.NONE:
            self.enter_backward()
            at_end_of_backward(self.leave_backward)

    @property
    def idle(self) -> bool:
        return self._depth == 0 and self._prefetcher.current is Pass.NONE

    def end_step(self) -> None:
        self.step += 1
        # Buffers are written without autograd, so earlier graphs must not be used.
        increment_version([p for c in self.chunks if c.trained for p in c.chunk.members])
        self.note_versions()
        if self.sharded and all(c.chunk.wire is IDENTITY for c in self.chunks):
            self._prefetcher.prefetch()  # no more than the first modules of the next forward need

    def _begin(self, kind: Pass) -> None:
        self.check_views()
        self._end_reads((), viewed=True)
        self._prefetcher.begin(kind)

    def use(self, sharded: ShardedChunk) -> None:
        """Unshards a chunk, prefetches the next ones and reshards unneeded ones."""
        if self.sharded:
            self._hold(sharded)
            self._prefetcher.use(sharded)
        else:
            self.finish(sharded)

    def release_idle(self) -> None:
        """Reshards unreferenced chunks that can be gathered again at any time."""
        # With several ranks, no chunk can be gathered again by one of them alone.
        for sharded in self.chunks if self in _alone else ():
            whole, wanted = sharded.presence is Presence.WHOLE, sharded.held or sharded in self._now
            if whole and not wanted and storage_users(sharded.chunk.data) <= sharded.users:
                self.release(sharded)

    def use_together(self, chunks: Sequence[ShardedChunk]) -> None:
        check_not_ahead(chunks)
        for sharded in chunks:
            if self.sharded:
                self._hold(sharded)
            else:
                self.finish(sharded)
        if self.sharded:
            with self._using(chunks):
                self._prefetcher.use_together(chunks)

    def _hold(self, sharded: ShardedChunk) -> None:
        self._show(sharded)
        if not sharded.held and torch.is_grad_enabled() and not saving_is_hooked():
            sharded.held = True  # autograd may refer to the parameters themselves

    def _show(self, sharded: ShardedChunk) -> None:
        if sharded.asked:
            sharded.asked = False
            mark_ready(sharded.chunk.members)

    # Reading.

    def touched(
        self, parameters: list[nn.Parameter], func: Callable[..., Any], args: tuple, kwargs: Any
    ) -> Any:
        """Runs an operation on pending parameters, after gathering them."""
        if func == _DATA and self.sharded:
            func = Tensor.detach  # a view by `.data` would have a separate version counter
        mine = [p for p in parameters if id(p) in self._chunk_of]
        chunks = {id(c): c for c in (self._chunk_of[id(p)] for p in mine)}
        check_not_ahead(chunks.values())
        reading = not torch.is_grad_enabled() or _is_unrecorded(func)
        if not reading and self._depth == 0 and backward_number() >= 0:
            self._follow_backward()  # recomputation there begins with its parameters
        outside = self.idle and self in _alone and not reading
        if self.sharded and self.idle and reading and self._tight and len(chunks) > 1:
            result = self._on_copies(func, args, kwargs)
        elif self.sharded and self.idle and reading:
            with self._using(chunks.values()), outside_transforms():
                self._read(list(chunks.values()))
            result = func(*args, **kwargs)
        elif outside and len(mine) == len(parameters) and not saving_is_hooked():
            result = self._recorded(chunks.values(), func, args, kwargs)
        else:
            with self._using(chunks.values()), outside_transforms():
                for sharded in chunks.values():
                    self.use(sharded)
            result = func(*args, **kwargs)
        if self.idle:
            self._see_operations(chunks.values())
        return result

    def _read(self, chunks: Sequence[ShardedChunk]) -> None:
        self._end_reads(chunks, viewed=self._tight)
        for sharded in chunks:
            if sharded.chunk.wire is not IDENTITY and not sharded.chunk.sent_exact:
                self.release(sharded)  # it was packed when it was sent
            if sharded.presence is Presence.ABSENT and sharded not in self._reads:
                self._reads.append(sharded)
            self._show(sharded)
            self._prefetcher.use(sharded)

    def _on_copies(self, func: Callable[..., Any], args: tuple, kwargs: Any) -> Any:
        """Runs an operation on copies, if the chunks together may exceed the memory limit."""
        copies: dict[nn.Parameter, Tensor] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, nn.Parameter) and id(value) in self._chunk_of:
                if value not in copies:
                    with torch.inference_mode(False), torch.no_grad():
                        copies[value] = value.detach().clone()
                return copies[value]
            return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value

        result = func(*copied(args), **{key: copied(value) for key, value in kwargs.items()})
        for parameter, copy in copies.items():
            if copy._version > 0:  # it was written
                parameter.copy_(copy)
        return next((p for p, copy in copies.items() if copy is result), result)

    def _end_reads(self, wanted: Sequence[ShardedChunk], viewed: bool) -> None:
        """Reshards chunks that were read, except `wanted`; those with views only if `viewed`."""
        reads = [] if self._stays else self._reads
        for sharded in [c for c in reads if c not in wanted and not c.held]:
            here = sharded.presence is Presence.WHOLE
            if viewed or not here or storage_users(sharded.chunk.data) <= sharded.users:
                self.release(sharded)
                self._reads.remove(sharded)

    def check_views(self) -> None:
        for sharded, versions in self._left.items():
            found = sharded.chunk.versions()
            if sharded.presence is not Presence.ABSENT or found == versions:
                continue
            names = list(sharded.chunk.parameters)
            name = next(n for n, a, b in zip(names, versions, found, strict=True) if a != b)
            self._left[sharded] = found
            raise GulliverError(
                f"a view of {name!r} was written after stage 3 had freed its memory: create a "
                "new view for each write, or write inside booster.full_parameters(model)"
            )

    def note_versions(self) -> None:
        for sharded in self._left:
            self._left[sharded] = sharded.chunk.versions()

    def _recorded(
        self, chunks: Iterable[ShardedChunk], func: Callable[..., Any], args: tuple, kwargs: Any
    ) -> Any:
        """Runs an operation outside a forward, such as a loss; autograd saves references."""
        # References are saved, so that chunks may be freed; those with views stay until backward.
        with self._using(chunks), saved_tensors_hooks(self.pack, self.unpack):
            for sharded in chunks:
                self.use(sharded)
            result = func(*args, **kwargs)
        for sharded in chunks:
            sharded.held = sharded.held or storage_users(sharded.chunk.data) > sharded.users
        return result

    def _see_operations(self, chunks: Iterable[ShardedChunk]) -> None:
        for sharded in chunks if self.sharded else ():
            if sharded.presence is Presence.WHOLE and not sharded.held:
                sharded.asked = True
                mark_pending(sharded.chunk.members, self.touched)

    @contextmanager
    def _using(self, chunks: Iterable[ShardedChunk]) -> Iterator[None]:
        before, self._now = self._now, [*self._now, *chunks]
        try:
            yield
        finally:
            self._now = before

    def copied(self, sharded: ShardedChunk) -> Tensor:
        chunk = sharded.chunk
        with chunk.opened():
            part = chunk.master_shard.to(chunk.dtype, copy=True)
        if chunk.layout.parts == 1:
            return part
        whole = torch.empty(chunk.layout.size, dtype=chunk.dtype, device=chunk.device)
        with guard():
            all_gather(whole, part, self.group, purpose=self._purpose(sharded))
        return whole

    # Tensors that autograd saves.

    def pack(self, tensor: Tensor) -> Any:
        """Saves a reference in place of a parameter, so that its buffer can be freed."""
        # Also called for every activation; the address shows that a tensor is in no chunk.
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return tensor
        address = tensor.data_ptr()
        number = bisect_right(self._begins, address) - 1
        if number < 0 or address >= self._at[number][0]:
            return tensor
        sharded = self._at[number][1]
        if tensor.dtype != sharded.chunk.dtype:
            return tensor
        start = int(tensor.storage_offset())
        for slot, parameter in zip(sharded.chunk.layout.slots, sharded.chunk.members, strict=True):
            if slot.start <= start < slot.start + slot.numel:
                offset, step = start - slot.start, self.step + sharded.updates
                return SavedParameter(parameter, step, tensor.size(), tensor.stride(), offset)
        return tensor

    def unpack(self, saved: Any) -> Tensor:
        if type(saved) is not SavedParameter:
            return saved
        sharded = self._chunk_of[id(saved.parameter)]
        if saved.step != self.step + sharded.updates:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: the optimizer has stepped since this graph was recorded"
            )
        self._follow_backward()
        self.use(sharded)
        with torch.no_grad():
            start = saved.parameter.storage_offset() + saved.offset
            return saved.parameter.detach().as_strided(saved.size, saved.stride, start)


def refer(tensor: Tensor) -> Recomputed | None:
    """Saves a reference to a parameter, for recomputation; its chunk can be freed."""
    for gatherer in _alone:
        saved = gatherer.pack(tensor)
        if saved is not tensor:
            return Recomputed(tensor, partial(gatherer.unpack, saved))
    return None
