"""Gathers the inputs of column layers in forward, and reduces their gradients in backward.

A weight is ``[outputs, inputs]``, or ``[inputs, outputs]`` if *transposed*, as in GPT-2's Conv1D.
Shapes below flatten all leading dims to rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from gulliver.comm.collectives import all_reduce
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from gulliver.layout.even import split_evenly
from gulliver.parallel.tensor.collectives import (
    Reduction,
    Wait,
    gather_sizes,
    reduce,
    reduce_split,
    ring_gather,
    split,
    start_gather,
    start_reduce,
)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return F.linear(x, weight.t() if transposed else weight, bias)


def input_gradient(
    grad: Tensor, weight: Tensor, transposed: bool, into: Tensor | None = None
) -> Tensor:
    """Returns ``grad @ weight``, ``[rows, inputs]``; accumulates into `into` if given."""
    matrix = weight.t() if transposed else weight
    if into is None:
        return grad @ matrix
    rows(into).addmm_(rows(grad), matrix)
    return into


def weight_gradient(grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
    return rows(x).t() @ rows(grad) if transposed else rows(grad).t() @ rows(x)


def bias_gradient(grad: Tensor) -> Tensor:
    return rows(grad).sum(0)


def rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class Sum:
    """Accumulates terms in float32 or wider."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, term: Tensor) -> None:
        if self._total is None:
            self._total = term.to(term.dtype if term.dtype.itemsize > 2 else torch.float32)
        else:
            self._total.add_(term)

    def value(self, dtype: torch.dtype) -> Tensor:
        assert self._total is not None
        return self._total.to(dtype)


# The input of column layers, communicated once for all layers that share it.


# [Note: one entry, many columns] Queries, keys and values are three products of one input. Its
# communication happens once for all of them, and overlaps with compute if possible:
#
# - *full*: all ranks have the input. Forward needs no communication; the columns' gradients of the
#   input are summed here, and then over the ranks in one all-reduce that overlaps with the last
#   weight gradient.
# - *sharded*: each rank has a piece of the sequence. In forward, the pieces are gathered until the
#   module's first product ("split_gather"), or circulate in a ring, each being multiplied while the
#   next one is in flight ("ring"). Only this rank's piece is kept for backward, which gathers it
#   again for the weight gradients, during the input gradient's product; the input gradient is
#   reduce-scattered during the last weight gradient's product.
#
# One all-reduce instead of three is exact because the sum over ranks and the sum over columns
# commute; only rounding differs from one process.
#
# [Note: gradients outside of autograd] The input's node in the graph is `_Enter`. The columns pass
# their gradients to the `Entry`, not to autograd, which would add up finished tensors and could not
# start to send the sum before the last column's weight gradient. `_Enter.backward`, which autograd
# runs after all of them, finishes the reduction. So a column whose output is unused, or not
# differentiated, does no harm.
#
# Until it is gathered, a sharded input is a `GatheringTensor`: it has the full shape, and any
# operation that reads more than the shape waits for the data first. Such an operation sees the full
# tensor and returns a full gradient, of which each rank keeps its shard.
@dataclass(frozen=True)
class SequenceCut:
    """The sharding of a sequence over ranks."""

    dim: int  # Dimension that is sharded
    lengths: tuple[int, ...]  # Length of each rank's piece
    ring: bool = False  # Whether pieces are communicated one by one instead of in one collective

    @property
    def whole(self) -> int:
        return sum(self.lengths)

    def pieces(self, x: Tensor) -> list[Tensor]:
        return list(x.split(list(self.lengths), self.dim))


def enter(x: Tensor, rank_group: RankGroup, cut: SequenceCut | None) -> Tensor:
    """Starts the communication of an input; pass the result to all of its column layers."""
    x = autocast(x)
    entry = Entry(rank_group, cut)
    token = _Enter.apply(x, entry)
    arrival = Arrival(entry, x.detach())
    if cut is None:
        vars(token)["_arrival"] = arrival
        return token
    arriving = token.as_subclass(GatheringTensor)
    vars(arriving).update(_arrival=arrival, _token=token, _piece=x)
    return arriving


def enter_whole(x: Tensor, rank_group: RankGroup) -> Tensor:
    # Stored on the tensor, because a column does not know which others read its input.
    before = vars(x).get("_entered")
    recorded = x.requires_grad and torch.is_grad_enabled()
    if before is not None:
        arrival = arrival_of(before)
        assert arrival is not None
        known = (
            arrival.entry.rank_group == rank_group and before.dtype == autocast(x.detach()).dtype
        )
        if known and before.requires_grad == recorded:
            return before
    vars(x)["_entered"] = entered = enter(x, rank_group, None)
    return entered


def autocast(x: Tensor) -> Tensor:
    """Casts an input as autocast would, so that messages have this dtype too."""
    if x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def arrival_of(x: Tensor) -> Arrival | None:
    return vars(x).get("_arrival")


class Arrival:
    """A gathered input in forward; freed when the called module returns."""

    def __init__(self, entry: Entry, own: Tensor) -> None:
        self.entry, self.own = entry, own
        self._data: Tensor | None = None
        self._wait: Wait | None = None
        self._ring: Iterator[tuple[int, Tensor]] | None = None
        rank_group, cut = entry.rank_group, entry.cut
        if cut is None:
            self._data = own
        elif cut.ring:
            self._ring = _begun(ring_gather(own, cut.dim, cut.lengths, rank_group))
        else:
            self._wait = start_gather(own, cut.dim, cut.lengths, rank_group)

    def data(self) -> Tensor:
        if self._wait is not None:
            self._data, self._wait = self._wait(), None
        if self._ring is not None:
            for _ in self.pieces():
                pass
        assert self._data is not None
        return self._data

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        ring, self._ring = self._ring, None
        assert ring is not None
        cut, own = self.entry.cut, self.own
        assert cut is not None
        shape = list(own.shape)
        shape[cut.dim] = cut.whole
        self._data = own.new_empty(shape)
        parts = cut.pieces(self._data)
        for place, piece in ring:
            parts[place].copy_(piece)
            yield place, piece

    def multiply(self, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """Multiplies the gathered input by a weight, one piece at a time as pieces arrive."""
        if self._ring is None:
            return product(self.data(), weight, bias, transposed)
        cut = self.entry.cut
        assert cut is not None
        parts = {p: product(piece, weight, bias, transposed) for p, piece in self.pieces()}
        return torch.cat([parts[place] for place in range(len(parts))], cut.dim)


class Entry:
    """Backward of one input, shared by its column layers."""

    # Each column calls `begin`, `add`, `weight_gradient` and `leave`, unless it does not need them.

    def __init__(self, rank_group: RankGroup, cut: SequenceCut | None) -> None:
        self.rank_group, self.cut = rank_group, cut
        self._columns = 0
        self._reset()

    def _reset(self) -> None:
        self._done = 0
        self._sum: Tensor | None = None
        self._reduced: Wait | None = None
        self._again: Tensor | None = None
        self._wait: Wait | None = None
        self._ring: Iterator[tuple[int, Tensor]] | None = None

    def join(self) -> None:
        self._columns += 1

    def begin(self, own: Tensor) -> None:
        """Starts re-gathering the input for backward, unless another column layer has."""
        # Keeping the gathered input from the forward would cost the memory that sharding the
        # sequence saves; gathering it again costs an all-gather that overlaps with the input
        # gradient's product.
        cut = self.cut
        if cut is None:
            self._again = own
        elif self._again is None and self._wait is None and self._ring is None:
            if cut.ring:
                self._ring = _begun(ring_gather(own, cut.dim, cut.lengths, self.rank_group))
            else:
                self._wait = start_gather(own, cut.dim, cut.lengths, self.rank_group)

    def add(self, grad: Tensor, weight: Tensor, transposed: bool) -> None:
        """Adds a column layer's input gradient; the last layer starts the reduction over ranks."""
        last = self._done + 1 == self._columns
        if last and self.cut is not None and self.cut.ring:
            self._add_in_pieces(grad, weight, transposed)
            return
        self._sum = input_gradient(grad, weight, transposed, self._sum)
        if last:
            self._reduced, self._sum = self._reduce(self._sum), None

    def _add_in_pieces(self, grad: Tensor, weight: Tensor, transposed: bool) -> None:
        # Other ranks' pieces first: each is sent while the next one is computed.
        cut, rank_group = self.cut, self.rank_group
        assert cut is not None
        grads = cut.pieces(grad)
        sums = cut.pieces(self._sum) if self._sum is not None else [None] * rank_group.size

        def piece(place: int) -> Tensor:
            part = input_gradient(grads[place], weight, transposed)
            before = sums[place]
            return part if before is None else part.add_(before)

        shape = (*grads[rank_group.rank].shape[:-1], weight.shape[0 if transposed else 1])
        reduction = Reduction(shape, cut.dim, cut.lengths, rank_group, grad)
        for place in reduction.order:
            reduction.send(place, piece(place))
        own, self._sum = piece(rank_group.rank), None
        self._reduced = lambda: reduction.finish(own)

    def weight_gradient(self, grad: Tensor, own: Tensor, transposed: bool) -> Tensor:
        if self._ring is None:
            if self._wait is not None:
                self._again, self._wait = self._wait(), None
            assert self._again is not None
            return weight_gradient(grad, self._again, transposed)
        cut, ring = self.cut, self._ring
        assert cut is not None
        shape = list(own.shape)
        shape[cut.dim] = cut.whole
        self._again, self._ring = own.new_empty(shape), None
        grads, parts, total = cut.pieces(grad), cut.pieces(self._again), Sum()
        for place, part in ring:
            parts[place].copy_(part)
            total.add(weight_gradient(grads[place], part, transposed))
        return total.value(grad.dtype)

    def leave(self) -> None:
        self._done += 1
        if self._done >= self._columns:
            self._again, self._done = None, 0

    def end(self) -> Tensor | None:
        found = self._reduced() if self._reduced is not None else None
        # The remaining reduction, if some columns had no gradient, so that none was the last.
        if self._sum is not None:
            rest = self._reduce(self._sum)()
            found = rest if found is None else found + rest
        self._reset()
        return found

    def _reduce(self, grad: Tensor) -> Wait:
        rank_group, cut = self.rank_group, self.cut
        if cut is not None:
            return start_reduce(grad, cut.dim, cut.lengths, rank_group)
        # Summed in place, because only this code reads it.
        grad = grad.contiguous()
        handle = all_reduce(
            grad,
            group=rank_group.process_group,
            async_op=True,
            any_order=True,
            wire=rank_group.wire,
        )

        def wait() -> Tensor:
            handle.wait()
            return grad

        return wait


def _begun(ring: Iterator[tuple[int, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    # A generator does not run until its first `next`; without this, the hop would start only after
    # the product that should overlap with it.
    first = next(ring)

    def pieces() -> Iterator[tuple[int, Tensor]]:
        yield first
        yield from ring

    return pieces()


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entry: Entry) -> Tensor:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        if entry.cut is None:
            # A view would refer to its base, which refers to the view through `enter_whole`;
            # neither would be freed.
            return x.detach()
        shape = list(x.shape)
        shape[entry.cut.dim] = entry.cut.whole
        # Only a shape: one element, expanded.
        return x.new_empty(1).expand(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = ctx.entry.end()
        if grads[0] is not None:  # in a recorded backward: see the note at `_Column`
            cut, rank_group = ctx.entry.cut, ctx.entry.rank_group
            if cut is None:
                more = reduce(grads[0], rank_group)
            else:
                more = reduce_split(grads[0], cut.dim, cut.lengths, rank_group)
            found = more if found is None else found + more
        return found, None


class _Look(Function):
    """Passes the gathered tensor to operations other than column layers."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, arrival: Arrival) -> Tensor:
        ctx.entry = arrival.entry
        data = arrival.data()
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cut, rank_group = ctx.entry.cut, ctx.entry.rank_group
        return split(grads[0], cut.dim, cut.lengths, rank_group), None


SHAPES = (
    Tensor.shape.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.dtype.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.device.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.ndim.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.requires_grad.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_cuda.__get__,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
)
"""Attributes that are available before a tensor is gathered."""


class GatheringTensor(Tensor):
    """A tensor whose gather is in flight; all operations but `SHAPES` wait for it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        look = token_of if func in SHAPES else _gathered_view
        given = {name: _plain(value, look) for name, value in (kwargs or {}).items()}
        return func(*(_plain(value, look) for value in args), **given)


def token_of(x: Tensor) -> Tensor:
    return vars(x).get("_token", x)


def source_of(x: Tensor) -> Tensor:
    """Returns the tensor passed to `enter`: this rank's shard, or the full tensor."""
    return vars(x).get("_piece", x)


def _gathered_view(x: Tensor) -> Tensor:
    arrival = arrival_of(x)
    assert arrival is not None
    return _Look.apply(vars(x)["_piece"], arrival)


def _plain(value: Any, look: Any) -> Any:
    if isinstance(value, GatheringTensor):
        return look(value)
    if isinstance(value, list | tuple) and any(isinstance(item, GatheringTensor) for item in value):
        return type(value)(_plain(item, look) for item in value)
    return value


# The sequence that the blocks of a stack share, sharded over the tensor ranks.
#
# Between blocks each rank has a piece of the hidden states along dim 1, so that norms, dropout and
# residuals are neither computed nor kept on every rank; within blocks, columns gather the sequence
# and rows reduce-scatter it (Korthikanti et al., 2022, arXiv 2205.05198).
#
# As pieces are uneven, a piece does not determine the full length, so the first block records it
# (`SharedSequence.lengths`) while blocks run. If a checkpoint within a block recomputes it, the
# length is not recorded, and the ranks exchange it.


UNCUT: tuple[int, ...] = ()
"""Shard lengths of a sequence that has fewer tokens than ranks and stays unsharded."""


class SharedSequence:
    """The sharding of the sequence between the blocks of a model."""

    def __init__(self, rank_group: RankGroup, ring: bool) -> None:
        self.rank_group, self.ring = rank_group, ring
        # Length of each rank's piece while a block runs; None if unknown.
        self.lengths: tuple[int, ...] | None = None
        # Number of running modules that have entered their input.
        self.inside = 0
        self._rows: tuple[int, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedSequence:
        # A process group cannot be copied; the other state does not outlive a call.
        return memo.setdefault(id(self), SharedSequence(self.rank_group, self.ring))

    def piece_lengths(self, length: int, training: bool) -> tuple[int, ...]:
        """Returns the lengths of a sequence's shards; `UNCUT` if the sequence is too short."""
        if length >= self.rank_group.size:
            return split_evenly(length, self.rank_group.size)
        if training:
            size = self.rank_group.size
            raise GulliverError(
                f"a sequence of {length} tokens cannot be sharded over {size} tensor ranks: use at "
                f"least {size} tokens, or disable sequence_parallelism_mode"
            )
        return UNCUT

    def gather_lengths(self, piece: Tensor) -> tuple[int, ...]:
        return gather_sizes(piece.shape[1], self.rank_group, piece.device)

    def cut_of(self, piece: Tensor) -> SequenceCut | None:
        lengths = self.lengths
        if lengths == UNCUT:
            return None
        dim = 1 if piece.dim() > 2 else 0
        own = piece.shape[dim]
        if lengths is None:
            lengths = gather_sizes(own, self.rank_group, piece.device)
        elif dim == 0:
            # Flattened rows of a batch, in another order than the full sequence.
            lengths = tuple(n * (own // lengths[self.rank_group.rank]) for n in lengths)
        self._rows = lengths
        return SequenceCut(dim, lengths, self.ring)

    def cut_for(self, whole: Tensor) -> SequenceCut | None:
        if self.lengths == UNCUT:
            return None
        if whole.dim() > 2:
            return SequenceCut(1, split_evenly(whole.shape[1], self.rank_group.size), self.ring)
        assert sum(self._rows) == len(whole), "rows leave a block as they entered"
        return SequenceCut(0, self._rows, self.ring)
