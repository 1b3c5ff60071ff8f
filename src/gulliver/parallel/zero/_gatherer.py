"""From shards to parameters: who asks for a chunk waits for just that chunk.

[Note: one order] All ranks must issue collectives in one order, whatever parameters they use. With
stages 0 to 2 that is simple: a step gathers every chunk once, in the order of use. With stage 3 a
*pass* (a forward or a backward of the model) is a list of chunks that every rank gathers once, in
that order, used or not. Touching a chunk issues the gathers up to it and a few ahead. What a rank
does not touch it gathers when it comes past, at the latest at the end of the pass. So ranks may
differ in the parameters that they use, and no rank waits for one that has nothing to send. In a
backward, though, gradients are reduced between the gathers, when a chunk is complete: ranks that
differ in whole chunks would reduce at another place, and are told (see `comm/_ledger.py`).

[Note: out of order] A chunk that is touched again after it was given back (a tied weight, a module
called twice) ends the pass and starts it anew, and is kept from then on. Outside of passes a
touched chunk is gathered at once: there every rank has to touch the same ones, which is so when
they run the same program.

[Note: reading] Touching is noticed by `gulliver.memory.await_parameter`, not by hooks of modules:
whoever reads a parameter waits for it, in a forward or not. Outside of passes and of autograd, such
as for a state dict, it is a copy that is read, so that nothing has to be given back; what is
written there is written to the shards. ``parameter.data`` may be written later; its version
counter tells, which is looked at before anything is gathered.

It does not know of gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from gulliver._compat import at_end_of_backward, saving_is_hooked, storage_users
from gulliver.comm import Group, Handle, Purpose, all_gather, guard
from gulliver.errors import GulliverError
from gulliver.memory import arrived, await_parameter, before_write, storage_of
from gulliver.parallel.zero._sharded import Presence, ShardedChunk


class Pass(Enum):
    """What is under way."""

    NONE = auto()
    FORWARD = auto()
    BACKWARD = auto()


_WHY = {
    Pass.NONE: "for a read of parameters",
    Pass.FORWARD: "for a forward",
    Pass.BACKWARD: "for a backward",
}


class Gatherer:
    """Brings parameters of chunks to every rank, ahead of use where it can.

    Args:
        chunks: in the order of use.
        sharded: whether parameters are given back after use (stage 3).
        group: ranks that own the parts.
        ahead: chunks that are gathered ahead of the one in use (stage 3).
        overlap: False waits for every gather at once, for comparison.
    """

    def __init__(
        self,
        chunks: Sequence[ShardedChunk],
        sharded: bool,
        group: Group,
        ahead: int = 2,
        overlap: bool = True,
    ) -> None:
        self.chunks, self.sharded, self.group = list(chunks), sharded, group
        self.ahead, self.overlap = ahead, overlap
        self.step = 0
        self._home = {id(p): c for c in chunks for p in c.chunk.parameters.values()}
        self._pass, self._depth = Pass.NONE, 0
        self._order: list[ShardedChunk] = []
        self._issued = self._reached = 0
        self._at: dict[int, ShardedChunk] = {}
        self._peeked: tuple[ShardedChunk, dict[str, Tensor]] | None = None
        self.lent: list[_Lent] = []
        self._needed: list[ShardedChunk] = []
        for released in chunks:
            if released.chunk.buffer is None:
                released.presence = Presence.ABSENT
                for parameter in released.chunk.parameters.values():
                    await_parameter(parameter, self._touched)

    # A chunk's way: absent or updated, arriving, whole, absent.

    def start(self, sharded: ShardedChunk) -> None:
        """Starts the way of a chunk's parameters to this rank; what `home` holds is sent."""
        self.settle_lent()
        if sharded.presence is Presence.ABSENT:
            for parameter in sharded.chunk.parameters.values():
                arrived(parameter)
            sharded.chunk.materialise()
            self._at[sharded.chunk.data.untyped_storage().data_ptr()] = sharded
        else:
            before_write([sharded.chunk.data])
            sharded.chunk.publish()
        if sharded.chunk.layout.parts == 1:
            sharded.gathering = Handle()
        else:
            sharded.gathering = all_gather(
                sharded.chunk.data,
                sharded.chunk.shard,
                self.group,
                async_op=True,
                purpose=self._purpose(sharded),
            )
        sharded.enter(Presence.ARRIVING)
        for parameter in sharded.chunk.parameters.values():
            await_parameter(parameter, self._touched)
        if not self.overlap or sharded.chunk.layout.parts == 1:
            self.finish(sharded)

    def finish(self, sharded: ShardedChunk) -> None:
        """Waits until a chunk is whole."""
        if sharded.presence is not Presence.ARRIVING:
            return
        assert sharded.gathering is not None
        with guard():
            sharded.gathering.wait()
        sharded.gathering = None
        sharded.enter(Presence.WHOLE)
        for parameter in sharded.chunk.parameters.values():
            arrived(parameter)

    def release(self, sharded: ShardedChunk) -> None:
        """Gives a chunk's parameters back to their owners."""
        self.finish(sharded)
        if sharded.presence is not Presence.WHOLE:
            return
        sharded.chunk.take_writes()
        self._at.pop(sharded.chunk.data.untyped_storage().data_ptr(), None)
        sharded.chunk.release()
        sharded.enter(Presence.ABSENT)
        for parameter in sharded.chunk.parameters.values():
            await_parameter(parameter, self._touched)

    def finish_all(self) -> None:
        """Waits for everything under way."""
        self.settle_lent()
        for sharded in self.chunks:
            self.finish(sharded)

    def release_all(self, held: bool = True) -> None:
        """Gives everything back, with `held` also what a graph may refer to.

        With stages below 3 it only waits.
        """
        self._peeked = None
        self.settle_lent()
        self._pass = Pass.NONE
        for sharded in self.chunks:
            if self.sharded and (held or not sharded.held):
                sharded.held = False
                self.release(sharded)
            else:
                self.finish(sharded)

    def _purpose(self, sharded: ShardedChunk) -> Purpose:
        return sharded.purpose("gathers", _WHY[self._pass] if self.sharded else "after a step")

    def _release_used(self, passed: ShardedChunk) -> None:
        wanted = passed.kept or passed.held or passed in self._needed
        if passed.presence is Presence.WHOLE and not wanted:
            self.release(passed)

    # Passes, of stage 3 only.

    def enter_forward(self) -> None:
        """The model is called."""
        self._depth += 1
        if self.sharded and self._depth == 1 and self._pass is not Pass.BACKWARD:
            self._begin(Pass.FORWARD)

    def leave_forward(self) -> None:
        """The model's call ends, well or not."""
        self._depth -= 1
        if self.sharded and self._depth == 0 and self._pass is Pass.FORWARD:
            self._complete()
            if torch.is_grad_enabled():
                for sharded in self.chunks[:-1]:
                    self.finish(sharded)
                    self._release_used(sharded)
            else:
                self.release_all(held=False)
            self._pass = Pass.NONE

    def enter_backward(self) -> None:
        """A backward begins."""
        if self.sharded and self._pass is not Pass.BACKWARD:
            self._begin(Pass.BACKWARD)

    def leave_backward(self) -> None:
        """A backward ends."""
        if self.sharded and self._pass is Pass.BACKWARD:
            self._complete()
            self._pass = Pass.NONE
            self.release_all()

    def prefetch(self) -> None:
        """Starts the next forward's first gathers; its first modules will wait for just those."""
        if self.sharded:
            self._begin(Pass.FORWARD)
            self._issue(self.ahead)
            self._pass = Pass.NONE

    def _begin(self, kind: Pass) -> None:
        untouched = self._reached == 0 and self._order == self.chunks
        if kind is Pass.FORWARD and untouched and self._issued:
            self._pass = kind  # begun by `prefetch`
            return
        if kind is Pass.FORWARD:
            self.release_all(held=False)
            self._order = list(self.chunks)
        else:
            # The forward has left its last chunk: it is the first that backward uses.
            last = self.chunks[-1]
            skip = last.presence is not Presence.ABSENT
            self._order = self.chunks[-2::-1] if skip else self.chunks[::-1]
        self._pass, self._issued, self._reached = kind, 0, 0

    def _issue(self, count: int) -> None:
        """Issues the pass's gathers up to `count` of them."""
        while self._issued < min(count, len(self._order)):
            sharded = self._order[self._issued]
            self._issued += 1
            if sharded.presence is not Presence.ABSENT:
                # It is here, but the others wait for this rank's part all the same.
                self.finish(sharded)
                sharded.chunk.take_writes()
            self.start(sharded)

    def _complete(self) -> None:
        """Takes part in what is left of the pass; nothing of it is used here."""
        while self._issued < len(self._order):
            self._issue(self._issued + 1)
            if self._issued > 1 + self.ahead:
                passed = self._order[self._issued - 2 - self.ahead]
                self.finish(passed)
                self._release_used(passed)
        self._reached = len(self._order)

    def use(self, sharded: ShardedChunk) -> None:
        """Makes a chunk whole, gathers ahead and gives back what has been used."""
        self._hold(sharded)
        if not self.sharded or self._pass is Pass.NONE:
            if sharded.presence is Presence.ABSENT:
                self.start(sharded)
            self.finish(sharded)
            return
        place = self._place(sharded)
        if place is not None:
            self._reached = max(self._reached, place + 1)
            self._issue(place + 1)
        self.finish(sharded)
        if place is not None:
            self._issue(place + 1 + self.ahead)
            for passed in self._order[: max(0, place - 1)]:
                self._release_used(passed)

    def use_together(self, chunks: Sequence[ShardedChunk]) -> None:
        """Makes chunks whole that a compiled region reads all at once."""
        self._needed = list(chunks)
        try:
            for sharded in chunks:
                self.use(sharded)
        finally:
            self._needed = []

    def _hold(self, sharded: ShardedChunk) -> None:
        if self.sharded and torch.is_grad_enabled() and not saving_is_hooked():
            sharded.held = True  # autograd may refer to the parameters themselves

    def _place(self, sharded: ShardedChunk) -> int | None:
        """Where the pass uses a chunk; starts the pass anew for one that it has behind it."""
        place = self._order.index(sharded) if sharded in self._order else None
        if sharded.presence is not Presence.ABSENT:
            return place
        if place is None or place < self._issued:
            sharded.kept = True
            self._complete()
            forward = self._pass is Pass.FORWARD
            self._order = self.chunks[:] if forward else self.chunks[::-1]
            self._issued = self._reached = 0
            place = self._order.index(sharded)
        return place

    # Reading.

    def _touched(
        self, parameters: list[nn.Parameter], func: Callable[..., Any], args: tuple, kwargs: Any
    ) -> Any:
        # Others may be of another optimizer: the operation comes back for them.
        mine = [p for p in parameters if id(p) in self._home]
        chunks = {id(c): c for c in (self._home[id(p)] for p in mine)}
        absent = any(c.presence is Presence.ABSENT for c in chunks.values())
        reading = func in _READS or not torch.is_grad_enabled()
        if self._pass is Pass.NONE and self._depth == 0 and absent and reading:
            return self._outside(func, args, kwargs)
        for sharded in chunks.values():
            self.use(sharded)
        return func(*args, **kwargs)

    def _outside(self, func: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs an operation on copies of the parameters, and writes back what it wrote."""
        copies: dict[int, tuple[nn.Parameter, Tensor, int]] = {}

        def replaced(value: Any) -> Any:
            if isinstance(value, nn.Parameter) and id(value) in self._home:
                copy = self._peek(value)
                copies[id(copy)] = (value, copy, copy._version)
                return copy
            if isinstance(value, list | tuple):
                return type(value)(replaced(v) for v in value)
            return value

        result = func(*replaced(args), **{k: replaced(v) for k, v in kwargs.items()})
        if func == _DATA:
            return self._lend(args[0], result)
        for parameter, copy, version in copies.values():
            if copy._version != version:
                self._write_back(parameter, copy)
        return copies[id(result)][0] if id(result) in copies else result

    def _peek(self, parameter: nn.Parameter) -> Tensor:
        sharded = self._home[id(parameter)]
        if sharded.presence is not Presence.ABSENT:
            self.finish(sharded)
            return parameter.detach()
        if self._peeked is None or self._peeked[0] is not sharded:
            self._peeked = None
            self.settle_lent()
            chunk = sharded.chunk
            part = chunk.home.to(chunk.dtype)
            whole = torch.empty(chunk.layout.size, dtype=chunk.dtype, device=chunk.device)
            if chunk.layout.parts == 1:
                whole.copy_(part)
            else:
                with guard():
                    all_gather(whole, part, self.group, purpose=self._purpose(sharded))
            self._peeked = (sharded, chunk.named_views(whole))
        name = next(n for n, p in sharded.chunk.parameters.items() if p is parameter)
        return self._peeked[1][name]

    def _write_back(self, parameter: nn.Parameter, copy: Tensor) -> None:
        chunk = self._home[id(parameter)].chunk
        for piece in chunk.layout.pieces(chunk.part):
            if chunk.parameters[piece.name] is parameter:
                part = copy.reshape(-1)[piece.offset : piece.offset + piece.numel]
                chunk.merge(chunk.home[piece.start : piece.end], part)

    def _lend(self, parameter: nn.Parameter, data: Tensor) -> Tensor:
        """A view of ``parameter.data`` of which writes can be noticed later."""
        if self._home[id(parameter)].presence is not Presence.ABSENT:
            return data
        self.lent.append(_Lent(parameter, data, self.step))
        return data.view(data.shape)

    def settle_lent(self) -> None:
        """Brings what was written to ``parameter.data`` to the shards.

        Raises:
            GulliverError: it was written after a step that changed the parameter.
        """
        for lent in self.lent:
            if lent.data._version == lent.version:
                continue
            if lent.step != self.step:
                raise GulliverError(
                    "parameter.data that was taken before a step was written after it: stage 3 "
                    "gives a copy there, so take parameter.data anew in every step"
                )
            lent.version = lent.data._version
            sharded = self._home[id(lent.parameter)]
            if sharded.presence is Presence.ABSENT:
                self._write_back(lent.parameter, lent.data)
            else:
                self.finish(sharded)
                lent.parameter.detach().copy_(lent.data)
        mine = Counter(storage_of(lent.data) for lent in self.lent)
        if self._peeked is not None:
            views = list(self._peeked[1].values())
            mine[storage_of(views[0])] += len(views) + 1  # and the tensor that they are views of
        self.lent = [v for v in self.lent if storage_users(v.data) > mine[storage_of(v.data)]]

    # What autograd saves.

    def pack(self, tensor: Tensor) -> Any:
        """Saves a reference instead of a parameter, so that its buffer can be given back."""
        found = self._find(tensor)
        if found is None:
            return tensor
        sharded, name = found
        parameter = sharded.chunk.parameters[name]
        offset = int(tensor.storage_offset()) - int(parameter.storage_offset())
        return _Saved(parameter, self.step, tensor.size(), tensor.stride(), offset)

    def unpack(self, saved: Any) -> Tensor:
        """The tensor that was saved, gathered again where that is needed."""
        if not isinstance(saved, _Saved):
            return saved
        if saved.step != self.step:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: the optimizer has stepped since this graph was made"
            )
        if self._pass is Pass.NONE:
            self.enter_backward()
            at_end_of_backward(self.leave_backward)
        self.use(self._home[id(saved.parameter)])
        with torch.no_grad():
            start = saved.parameter.storage_offset() + saved.offset
            return saved.parameter.detach().as_strided(saved.size, saved.stride, start)

    def _find(self, tensor: Tensor) -> tuple[ShardedChunk, str] | None:
        if type(tensor) not in (Tensor, nn.Parameter):
            return None
        sharded = self._at.get(tensor.untyped_storage().data_ptr())
        if sharded is None or tensor.dtype != sharded.chunk.dtype:
            return None
        for slot in sharded.chunk.layout.slots:
            if slot.start <= tensor.storage_offset() < slot.end:
                return sharded, slot.name
        return None


class _Lent:
    """What was given out as ``parameter.data``, while somebody has it."""

    __slots__ = ("data", "parameter", "step", "version")

    def __init__(self, parameter: nn.Parameter, data: Tensor, step: int) -> None:
        self.parameter, self.data, self.step = parameter, data, step
        self.version = data._version


class _Saved:
    """A parameter, or a view of one, as autograd keeps it."""

    __slots__ = ("offset", "parameter", "size", "step", "stride")

    def __init__(self, parameter: nn.Parameter, step: int, size: Any, stride: Any, offset: int):
        self.parameter, self.step = parameter, step
        self.size, self.stride, self.offset = size, stride, offset


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_READS = frozenset({Tensor.detach, _DATA, Tensor.numpy, Tensor.tolist, Tensor.item})  # type: ignore[attr-defined]
