"""Keeps or recomputes the tensors that each call saves for backward.

A tensor that autograd saves in a call is identified by its origin: an input of the call (as
produced by another call, or after a change of layout), or memory that the call allocated. If it is
to be recomputed, autograd saves a handle instead. The first handle that backward unpacks recomputes
its entire run, including communication; each value is freed after its last use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from gulliver.errors import GulliverError

if TYPE_CHECKING:
    from gulliver.operators.run import OperatorMode


# [Note: runs] A run consists of the calls of recomputed operators, starting with the first one and
# ending when none of their values is needed. They are repeated without the model's code, on the
# run's external inputs, which are kept, and on values that the run has computed. Calls that draw
# random numbers are rejected.
class Origin(NamedTuple):
    """Source of a saved storage: an input, a layout conversion, or the call itself."""

    # Number of the call.
    call: int
    # "given": an input; "changed": an input after a layout conversion; "inner": allocated by the
    # call.
    kind: str
    # Index among origins of this kind.
    place: int


@dataclass
class _RecomputedRun:
    """Consecutive calls that are recomputed together."""

    # Calls with their inputs: a tensor from outside, or an origin within the run.
    tape: list[tuple[Any, list[Tensor | Origin]]] = field(default_factory=list)
    # Number of handles of each origin.
    wanted: Counter[Origin] = field(default_factory=Counter)
    # Recomputed storages, by origin.
    found: dict[Origin, Tensor] = field(default_factory=dict)
    # Whether it was recomputed.
    done: bool = False


class _Handle(NamedTuple):
    run: _RecomputedRun
    origin: Origin
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SavedCalls:
    """Keeps or recomputes the tensors saved by the calls of one forward pass."""

    def __init__(self, runs: Mapping[int, int], stays: frozenset[int]) -> None:
        self._numbers, self._stays = runs, stays
        self._runs = dict[int, _RecomputedRun]()
        self.runner: OperatorMode | None = None

    def begin(
        self, planned: Any, taken: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> RecomputedCall:
        number = planned.number
        origins = [
            self._origin(number, n, *pair) for n, pair in enumerate(zip(taken, parts, strict=True))
        ]
        if number in self._numbers:
            run = self.run_of(number)
            sources = [self._source(run, number, tensor) for tensor in taken]
            run.tape.append((planned, sources))
        return RecomputedCall(self, planned, parts, origins)

    def run_of(self, call: int) -> _RecomputedRun:
        return self._runs.setdefault(self._numbers[call], _RecomputedRun())

    def packed(self, origin: Origin | None, tensor: Tensor) -> Any:
        tensor = tensor.detach()
        form = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        if origin is None:
            return tensor
        if origin.call in self._numbers:
            run = self.run_of(origin.call)
            run.wanted[origin] += 1
            return _Handle(run, origin, *form)
        return tensor

    def unpacked(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Handle):
            return saved
        run = saved.run
        if not run.done:
            self._replay(run)
        if saved.origin not in run.found:
            raise GulliverError(
                "backward ran twice through recomputed operators: call it once, or use keep"
            )
        tensor = run.found[saved.origin]
        run.wanted[saved.origin] -= 1
        if not run.wanted[saved.origin]:
            del run.found[saved.origin]
        return tensor.as_strided(saved.size, saved.stride, saved.offset)

    def _origin(self, call: int, number: int, taken: Tensor, part: Tensor) -> Origin | None:
        """Origin of a shard; None for tensors that are kept anyway."""
        source = vars(taken).get("_gulliver_origin")
        same = isinstance(taken, DTensor) and _storage(_own(taken)) == _storage(part)
        if same or taken is part:
            return source
        return Origin(call, "changed", number)

    def _source(self, run: _RecomputedRun, number: int, tensor: Tensor) -> Tensor | Origin:
        given = vars(tensor).get("_gulliver_given")
        if given is not None and self._numbers.get(given.call) == self._numbers[number]:
            return given
        assert self.runner is not None, "a forward runs"
        return self.runner.kept(tensor)

    def name(
        self, planned: Any, given: Sequence[DTensor], aliases: Mapping[int, Origin | None]
    ) -> None:
        for index, (tensor, value) in enumerate(zip(given, planned.call.gives, strict=True)):
            own = Origin(planned.number, "given", index)
            vars(tensor)["_gulliver_given"] = own
            origin = aliases.get(_storage(_own(tensor)), own)
            vars(tensor)["_gulliver_origin"] = None if value in self._stays else origin

    def _replay(self, run: _RecomputedRun) -> None:
        assert self.runner is not None, "a forward has run"
        run.done = True
        env: dict[Origin, DTensor] = {}
        for planned, sources in run.tape:
            taken = [env[s] if isinstance(s, Origin) else s for s in sources]
            parts, call = self.runner.replayed(planned, taken)
            inner = list[Tensor]()
            known = {_storage(p) for p in parts}

            def pack(tensor: Tensor, inner: list[Tensor] = inner, known: Any = known) -> Tensor:
                if _storage(tensor) not in known:
                    inner.append(tensor.detach())
                return tensor.detach()

            with torch.enable_grad(), saved_tensors_hooks(pack, lambda t: t):
                out = call()
            given = self.runner.spread_given(planned, out)
            for index, tensor in enumerate(given):
                env[Origin(planned.number, "given", index)] = tensor
                run.found[Origin(planned.number, "given", index)] = _own(tensor)
            for kind, tensors in (("changed", parts), ("inner", inner)):
                for index, tensor in enumerate(tensors):
                    run.found[Origin(planned.number, kind, index)] = tensor.detach()
            run.found = {o: t for o, t in run.found.items() if run.wanted[o]}
            del out, parts, call, inner, known, pack
        run.tape.clear()


class RecomputedCall:
    """Intercepts what autograd saves during one planned call, so that backward can recompute it."""

    def __init__(
        self,
        again: SavedCalls,
        planned: Any,
        parts: Sequence[Tensor],
        origins: Sequence[Origin | None],
    ) -> None:
        self._again, self._planned = again, planned
        self._origins = {_storage(p): o for p, o in zip(parts, origins, strict=True)}
        self._inner = 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._again.unpacked):
            yield

    def end_call(self, given: Sequence[DTensor]) -> None:
        self._again.name(self._planned, given, self._origins)

    def _pack(self, tensor: Tensor) -> Any:
        key = _storage(tensor)
        if key in self._origins:
            origin = self._origins[key]
        else:
            origin = Origin(self._planned.number, "inner", self._inner)
            self._inner += 1
        return self._again.packed(origin, tensor)


def _own(tensor: Any) -> Tensor:
    with torch.no_grad():
        return tensor.to_local()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
