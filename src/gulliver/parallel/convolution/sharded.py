"""A tensor subclass that stores one shard of an activation and lets modules run unchanged.

A `Sharded` tensor has the full shape (in a stream: the shape of all frames so far) and stores
the elements of one shard along one dim. Torch dispatches its functions to `HANDLERS`; a handler
computes the function on the shard and fetches missing elements. So a module's own forward runs
unchanged over several ranks, or over successive segments of time. A function without a
handler raises an error, so no result is approximate.

The *holder* moves the data: `Ranks` (`ranks.py`) exchanges with other ranks, `FrameStream`
(`stream.py`) caches frames of earlier calls.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.layout.even import Interval, intervals
from gulliver.parallel.convolution.chunked import SlidingWindow

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[str, Handler] = {}
"""Implementation of each torch function on a shard, by the function's name."""

_WHOLE = (
    "shape ndim dtype layout is_sparse is_quantized is_nested dim size numel nelement element_size "
    "is_floating_point is_complex len hash itemsize"
)
OF_WHOLE = frozenset(_WHOLE.split())
_PART = "requires_grad device is_cuda is_cpu is_meta is_xpu is_mps grad_fn"
OF_PART = frozenset(_PART.split())
IN_PLACE = frozenset(["iadd", "isub", "imul", "itruediv", "idiv"])
"""Operators that work in place, in addition to functions whose names end with ``_``."""

_ALIASING = (
    "view unflatten permute transpose swapaxes swapdims movedim moveaxis unsqueeze squeeze expand "
    "getitem narrow select split split_with_sizes chunk tensor_split unbind detach reshape flatten "
    "contiguous to type type_as float double half bfloat16 cpu cuda"
)
ALIASING = frozenset(_ALIASING.split())
"""Functions whose results may share the elements of their argument."""


@dataclass(frozen=True)
class ShardedDim:
    """The sharded dim and the sizes of its shards."""

    dim: int  # Dim of the full tensor, counted from the front
    sizes: tuple[int, ...]  # Number of positions of each shard
    outer: int = 1  # Factor of the dim outside of the positions
    inner: int = 1  # Factor of the dim inside of them

    @property
    def extent(self) -> int:
        return sum(self.sizes)

    @property
    def length(self) -> int:
        return self.outer * self.extent * self.inner

    def resized(self, sizes: Sequence[int], times: int = 1) -> ShardedDim:
        """Returns the sharded dim with other sizes, or with positions repeated `times` times."""
        return replace(self, sizes=tuple(size * times for size in sizes))


class PartLayout(ABC):
    """The sharding of an activation, and how its shards exchange data."""

    rank: int  # Index of the local shard
    where: str  # Kind of the shards, for messages
    # Whether more positions may follow, so that a size of one is not final.
    grows = False
    # Whether gradients were enabled when the network was called.
    graded = False

    @abstractmethod
    def rows(self, x: Sharded, window: SlidingWindow, after: int, key: Key) -> tuple[Rows, Sizes]:
        """Returns the input of this shard's windows, and the sizes of the output shards."""

    @abstractmethod
    def whole(self, x: Sharded, key: Key) -> Tensor: ...

    @abstractmethod
    def align(self, parts: Sequence[Sharded], key: Key) -> list[Sharded]: ...

    @abstractmethod
    def at_ends(self, x: Sharded, before: int, after: int, mode: str) -> tuple[int, int]:
        """Returns the padding to apply now, before the first position and after the last."""

    @abstractmethod
    def statistics(self, x: Sharded, own: Statistics, key: Key) -> Statistics: ...


Sizes = tuple[int, ...]
Key = tuple[str, int]
Statistics = tuple[float, Tensor, Tensor]
"""Element count, mean, and sum of squared distances from the mean."""


@dataclass
class Rows:
    """Adjacent positions along one dim, stored in several tensors to avoid copies."""

    parts: list[Tensor]  # Consecutive tensors; at least one
    start: int
    dim: int  # Dim along which they are consecutive
    wanted: Interval  # Requested positions, which may include padding
    outputs: Interval  # Outputs that need them

    def take(self, start: int, stop: int) -> Tensor:
        if start >= stop:
            # Part of the graph, so that backward sends the same messages on all ranks.
            return torch.cat([part.narrow(self.dim, 0, 0) for part in self.parts], self.dim)
        taken, at = [], self.start
        if start < at:
            taken.append(self._filled(min(stop, at) - start))
        for part in self.parts:
            end = at + part.shape[self.dim]
            low, high = max(start, at), min(stop, end)
            if low < high:
                taken.append(part.narrow(self.dim, low - at, high - low))
            at = end
        if stop > at:
            taken.append(self._filled(stop - max(start, at)))
        return taken[0] if len(taken) == 1 else torch.cat(taken, self.dim)

    def all(self, span: int) -> Tensor:
        """Returns the input of all windows, or one constant window if the shard has no output."""
        if self.outputs[0] == self.outputs[1]:
            return torch.cat([self.take(0, 0), self._filled(span)], self.dim)
        return self.take(*self.wanted)

    def _filled(self, count: int) -> Tensor:
        shape = list(self.parts[0].shape)
        shape[self.dim] = count
        return self.parts[0].new_zeros(()).expand(shape)


class Sharded(Tensor):
    """An activation of which this process stores one shard."""

    local: Tensor
    cut: ShardedDim
    holder: Any
    aliased: bool

    @staticmethod
    def __new__(cls, local: Tensor, cut: ShardedDim, holder: PartLayout) -> Sharded:
        if cut.outer == 1 and cut.inner > 1:
            cut = ShardedDim(cut.dim, tuple(size * cut.inner for size in cut.sizes))
        shape = list(local.shape)
        shape[cut.dim] = cut.length
        # Without storage, because its elements are never read.
        made = torch.empty(shape, dtype=local.dtype, device="meta").as_subclass(cls)
        made.local, made.cut, made.holder, made.aliased = local, cut, holder, False
        return made

    def __init__(self, local: Tensor, cut: ShardedDim, holder: PartLayout) -> None:
        pass

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Sharded({tuple(self.shape)}, {self.cut}, holds {tuple(self.local.shape)})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == "__get__":
            name = func.__self__.__name__
        name = name.strip("_")
        if name in OF_PART:
            return func(args[0].local)
        if name in OF_WHOLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler, x = HANDLERS.get(name), first(args, kwargs)
        if handler is None:
            reject(f"torch's {name}", x)
        _keep_gradients(name, x, (args, kwargs))
        target = _written(func, name, x, args, kwargs)
        try:
            made = handler(func, args, kwargs)
        except Exception as error:
            # Other errors are Gulliver's own, torch's signal to stop recomputing, or errors of a
            # device or a link.
            if type(error).__module__ != "builtins" or _of_messages(error):
                raise
            reject(f"this form of torch's {name} ({type(error).__name__}: {error})", x, cause=error)
        if target is not None and made is not target:
            reject(f"writing in place by torch's {name}", x, _NOT_IN_PLACE)
        if name in ALIASING:
            for part in (x, *parts_in(made)):
                part.aliased = True
        return made


_NOT_IN_PLACE = "call the function that returns a new tensor"


def _keep_gradients(name: str, x: Sharded, given: Any) -> None:
    """Rejects computation without autograd inside a trained module; see the note."""
    # [Note: autograd disabled inside of a module] A `Sharded` has no autograd graph; the functions
    # build the graph of the local tensors. Results that an autograd.Function or a reentrant
    # checkpoint computes from a `Sharded` would be in no graph, and its backward would never be
    # called. A non-reentrant checkpoint detaches the tensors that it keeps.
    if not x.holder.graded or torch.is_grad_enabled() or name == "detach":
        return
    tensors: list[Tensor] = []
    locals_of(given, tensors.append)
    if any((t.local if isinstance(t, Sharded) else t).requires_grad for t in tensors):
        reject(
            f"torch's {name} while gradients are off inside of the module", x,
            "an autograd.Function, a reentrant checkpoint or a no_grad block loses gradients "
            "here; use checkpoint(..., use_reentrant=False)",
        )  # fmt: skip


def in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    name = func.__name__
    by_name = name.endswith("_") and not name.endswith("__")
    return by_name or name.strip("_") in IN_PLACE or bool(kwargs.get("inplace"))


def _written(func: Any, name: str, x: Sharded, args: Any, kwargs: Any) -> Sharded | None:
    """Returns the activation that a function writes in place; rejects it if it may have views."""
    # Some views of a shard are views and others copies (a slice along the sharded dim is fetched
    # from other ranks), so a write would change other elements than in the full tensor.
    target = args[0] if in_place(func, kwargs) else None
    if kwargs.get("out") is not None or (target is not None and _is_aliased(target)):
        reject(f"writing in place by torch's {name}", x, _NOT_IN_PLACE)
    return target


def _is_aliased(target: Any) -> bool:
    return not isinstance(target, Sharded) or target.aliased


def _of_messages(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(str(f.f_globals.get("__name__")).startswith("gulliver.comm") for f, _ in frames)


def handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def reject(what: str, x: Sharded, right: str = "", cause: BaseException | None = None) -> NoReturn:
    fix = right or "do not shard this module, or shard another dim"
    raise GulliverError(
        f"{what} of an activation {tuple(x.shape)} whose dim {x.cut.dim} is sharded over "
        f"{x.holder.where} is not supported: {fix}"
    ) from cause


def first(args: Any, kwargs: Any = None) -> Sharded:
    return parts_in((args, kwargs or {}))[0]


def parts_in(values: Any) -> list[Sharded]:
    if isinstance(values, Sharded):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [part for value in values for part in parts_in(value)]
    return []


def locals_of(values: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, dict):
        return {name: locals_of(value, change) for name, value in values.items()}
    if isinstance(values, list | tuple) and not isinstance(values, torch.Size):
        return type(values)(locals_of(value, change) for value in values)
    return values


def like(x: Sharded, local: Tensor, cut: ShardedDim | None = None) -> Sharded:
    return Sharded(local, cut or x.cut, x.holder)


def is_plain(x: Sharded) -> bool:
    return x.cut.outer == x.cut.inner == 1


def opened(local: Tensor, cut: ShardedDim, held: int) -> Tensor:
    """Unflattens the sharded dim into its three factors; positions are at ``cut.dim + 1``."""
    return local.unflatten(cut.dim, (cut.outer, held, cut.inner))


def own_run(x: Sharded) -> Interval:
    return intervals(x.cut.sizes)[x.holder.rank]


def own_of(whole: Tensor, cut: ShardedDim, holder: PartLayout) -> Tensor:
    """Returns the local shard of a full tensor; a view if the dim is not merged."""
    start, stop = intervals(cut.sizes)[holder.rank]
    parts = opened(whole, cut, cut.extent).narrow(cut.dim + 1, start, stop - start)
    return parts.flatten(cut.dim, cut.dim + 2)


def window_rows(
    x: Sharded, window: SlidingWindow, after: int, name: str, weight: Tensor | None = None
) -> tuple[Rows, Sizes]:
    """Returns the input of windows along the sharded dim; see `PartLayout.rows`."""
    if not is_plain(x):
        reject(f"torch's {name} along a merged dim", x)
    return x.holder.rows(x, window, after, (name, 0 if weight is None else id(weight)))
