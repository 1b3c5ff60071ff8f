"""Sharded linear and embedding layers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from gulliver._compat import uncompiled
from gulliver.comm.collectives import all_reduce
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.errors import GulliverError
from gulliver.layout.even import Interval, split_evenly
from gulliver.parallel.tensor.collectives import (
    Reduction,
    copy,
    gather,
    gather_partial,
    reduce,
    ring_gather,
    split,
    start_reduce,
)
from gulliver.parallel.tensor.entry import (
    Arrival,
    Entry,
    SequenceCut,
    SharedSequence,
    Sum,
    arrival_of,
    autocast,
    bias_gradient,
    enter,
    enter_whole,
    input_gradient,
    product,
    source_of,
    token_of,
    weight_gradient,
)
from gulliver.precision import fp8


class OnLine(nn.Module):
    """A module with one rank's shard of a layer."""

    def __init__(self, rank_group: RankGroup = ALONE) -> None:
        super().__init__()
        # Rank group that the layer is sharded over.
        self.rank_group = rank_group

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A process group cannot be copied: a copy of the module shares it.
        memo[id(self.rank_group)] = self.rank_group
        memo[id(self)] = copied = type(self).__new__(type(self))
        vars(copied).update(deepcopy(vars(self), memo))
        return copied


# Linear layers with this rank's columns or rows.
#
# A *column* layer computes some of the outputs: all ranks have its full input, and each has a shard
# of its output. A *row* layer has some of the inputs: its input is the shard that a column layer
# computed, its output the sum over the ranks, to which the bias is added once.


# [Note: column, then row] Between the two each rank has its own features, so an element-wise
# activation, or attention by heads, needs no communication: a pair of layers costs one all-reduce
# in forward (of the row's output) and one in backward (of the column's input gradient). Source:
# Megatron-LM, Shoeybi et al., 2019 (arXiv 1909.08053). If the sequence between blocks is sharded
# over the same ranks, an all-gather and a reduce-scatter replace each of them, with the same bytes
# (Korthikanti et al., 2022, arXiv 2205.05198).
#
# Parameters are plain, hold the rank's shard, and keep the names of the layer they replace. Read
# `ColumnLinear`, `RowLinear`, then the two functions.
class _Sharded(OnLine):
    weight: nn.Parameter  # Shard ``[outputs, inputs]``, or ``[inputs, outputs]`` if `transposed`
    bias: nn.Parameter | None  # Bias, or None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        rank_group: RankGroup,
        transposed: bool,
    ) -> None:
        super().__init__(rank_group)
        self.weight = weight
        self.register_parameter("bias", bias)
        self.transposed = transposed

    @property
    def out_features(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[0 if self.transposed else 1]

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        rank, size = self.rank_group.rank, self.rank_group.size
        return f"{shape}, bias={self.bias is not None}, rank {rank} of {size}"


@fp8.takes_fp8
class ColumnLinear(_Sharded):
    """A linear layer with this rank's shard of the outputs."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        rank_group: RankGroup = ALONE,
        runs: tuple[Interval, ...] = (),
        total: int = 0,
        transposed: bool = False,
        gather_output: bool = False,
        shared: SharedSequence | None = None,
    ) -> None:
        super().__init__(weight, bias, rank_group, transposed)
        self.runs = runs or ((0, self.out_features),)
        self.total = total or self.out_features
        self.gather_output, self.shared = gather_output, shared

    @property
    def columns(self) -> Interval:
        (run,) = self.runs
        return run

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        state = fp8.state_of(self)
        if state is not None:
            x = _copied(x, self.rank_group)
            return self._gathered(fp8.linear(x, self.weight, self.bias, state, self.transposed))
        weight, bias = _autocast(x, self.weight, self.bias)
        if self.rank_group.size == 1:
            return product(x, weight, bias, self.transposed)
        arrival = arrival_of(x)
        if arrival is None:
            if self.shared is None or self.shared.inside:
                x = enter_whole(x, self.rank_group)
            else:
                x = enter(x, self.rank_group, self.shared.cut_of(x))
            arrival = arrival_of(x)
        found = token_of(x), weight, bias, source_of(x)
        y = _Column.apply(*found, arrival, self.transposed)
        return self._gathered(y)

    def _gathered(self, y: Tensor) -> Tensor:
        if not self.gather_output or self.rank_group.size == 1:
            return y
        lengths = split_evenly(self.total, self.rank_group.size)
        return gather(y, y.dim() - 1, lengths, self.rank_group)


@fp8.takes_fp8
class RowLinear(_Sharded):
    """A linear layer with this rank's shard of the inputs."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        rank_group: RankGroup = ALONE,
        transposed: bool = False,
        split_input: bool = False,
        total: int = 0,
        shared: SharedSequence | None = None,
        borders: tuple[int, ...] = (),
    ) -> None:
        super().__init__(weight, bias, rank_group, transposed)
        self.split_input, self.total, self.shared = split_input, total, shared
        self.borders = borders

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _autocast(x, self.weight, self.bias)
        x, state = autocast(x), fp8.state_of(self)
        if self.rank_group.size == 1 and state is None:
            return product(x, weight, bias, self.transposed)
        if self.split_input:
            x = split(
                x, x.dim() - 1, split_evenly(self.total, self.rank_group.size), self.rank_group
            )
        if state is not None:
            y = fp8.linear(x, self.weight, None, state, self.transposed)
            y = reduce(y, self.rank_group)
            return y if bias is None else y + bias
        cut = self.shared.cut_for(x) if self.shared else None
        return _Row.apply(x, weight, bias, self.rank_group, cut, self.transposed)


def _copied(x: Tensor, rank_group: RankGroup) -> Tensor:
    # FP8 layers pass gradients to autograd, which sums those of all columns before they are sent;
    # unlike with an `Entry`, the reduction does not overlap with the last weight gradient.
    if rank_group.size == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    known = vars(x).get("_copied")
    if known is None or known[0] != rank_group:
        vars(x)["_copied"] = known = rank_group, copy(x, rank_group)
    return known[1]


def _autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if not torch.is_autocast_enabled(x.device.type):
        return weight, bias
    return autocast(weight), None if bias is None else autocast(bias)


class _Column(Function):
    # [Note: what is kept] This rank's piece and the weight are saved, never the gathered input.
    #
    # [Note: recorded backward] With ``create_graph`` gradients are differentiated again. So they
    # are passed to autograd, and computed from autograd's input with differentiable collectives,
    # without overlap.

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        source: Tensor,
        arrival: Arrival,
        transposed: bool,
    ) -> Tensor:
        ctx.entry, ctx.transposed = arrival.entry, transposed
        if any(ctx.needs_input_grad[:3]):
            ctx.entry.join()
        # Without a weight gradient the input is not needed; a bias gradient needs neither.
        kept = source if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, weight if ctx.needs_input_grad[0] else None)
        return arrival.multiply(weight, bias, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        own, weight = ctx.saved_tensors
        entry: Entry = ctx.entry
        grad, of_weight = grads[0].contiguous(), None
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_bias = bias_gradient(grad) if needs_bias else None
        if torch.is_grad_enabled():
            entry.leave()
            of_x = input_gradient(grad, weight, ctx.transposed) if needs_x else None
            if needs_weight:
                of_weight = weight_gradient(grad, _gathered(own, entry), ctx.transposed)
            return of_x, of_weight, of_bias, None, None, None
        # In this order, the gather overlaps with the input gradient, whose reduction overlaps with
        # the weight gradient.
        if needs_weight:
            entry.begin(own)
        if needs_x:
            entry.add(grad, weight, ctx.transposed)
        if needs_weight:
            of_weight = entry.weight_gradient(grad, own, ctx.transposed)
        entry.leave()
        return None, of_weight, of_bias, None, None, None


def _gathered(source: Tensor, entry: Entry) -> Tensor:
    cut = entry.cut
    return source if cut is None else gather_partial(source, cut.dim, cut.lengths, entry.rank_group)


class _Row(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rank_group: RankGroup,
        cut: SequenceCut | None,
        transposed: bool,
    ) -> Tensor:
        ctx.how = rank_group, cut, transposed
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        if cut is not None and cut.ring:
            y = _reduced_in_pieces(x, weight, rank_group, cut, transposed)
        else:
            y = product(x, weight, None, transposed).contiguous()
            if cut is None:
                all_reduce(y, group=rank_group.process_group, any_order=True, wire=rank_group.wire)
            else:
                y = start_reduce(y, cut.dim, cut.lengths, rank_group)()
        # After the sum; otherwise the bias would be added once per rank.
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        rank_group, cut, transposed = ctx.how
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grads[0].contiguous()
        of_bias = bias_gradient(grad) if needs_bias else None
        again = torch.is_grad_enabled()  # see the note at `_Column`
        if not again and cut is not None and cut.ring and (needs_x or needs_weight):
            found = _gradients_in_pieces(grad, x, weight, rank_group, cut, transposed)
            return *found, of_bias, None, None, None
        if cut is not None and (needs_x or needs_weight):
            grad = gather_partial(grad, cut.dim, cut.lengths, rank_group)
        elif again:
            grad = copy(grad, rank_group)
        of_x = input_gradient(grad, weight, transposed) if needs_x else None
        of_weight = weight_gradient(grad, x, transposed) if needs_weight else None
        return of_x, of_weight, of_bias, None, None, None


def _reduced_in_pieces(
    x: Tensor, weight: Tensor, rank_group: RankGroup, cut: SequenceCut, transposed: bool
) -> Tensor:
    """Computes the output piece by piece, sending pieces while others are computed."""
    pieces = cut.pieces(x)
    shape = (*pieces[rank_group.rank].shape[:-1], weight.shape[1 if transposed else 0])
    reduction = Reduction(shape, cut.dim, cut.lengths, rank_group, x)
    for place in reduction.order:
        reduction.send(place, product(pieces[place], weight, None, transposed))
    return reduction.finish(product(pieces[rank_group.rank], weight, None, transposed))


def _gradients_in_pieces(
    grad: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    rank_group: RankGroup,
    cut: SequenceCut,
    transposed: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Computes the gradients of input and weight from gathered pieces of the output gradient."""
    parts: dict[int, Tensor] = {}
    inputs = cut.pieces(x) if x is not None else []
    total = Sum()
    for place, piece in ring_gather(grad, cut.dim, cut.lengths, rank_group):
        if weight is not None:
            parts[place] = input_gradient(piece, weight, transposed)
        if inputs:
            total.add(weight_gradient(piece, inputs[place], transposed))
    of_x = torch.cat([parts[p] for p in range(rank_group.size)], cut.dim) if parts else None
    return of_x, total.value(grad.dtype) if inputs else None


# Embeddings sharded by rows (vocabulary-parallel) or by columns.


class UnknownTokenError(GulliverError, IndexError):
    """A token id is outside of the vocabulary."""


class _Embedding(OnLine):
    weight: nn.Parameter
    max_norm: None = None
    norm_type = 2.0
    scale_grad_by_freq = False
    sparse = False

    def __init__(self, weight: nn.Parameter, rank_group: RankGroup) -> None:
        super().__init__(rank_group)
        self.weight = weight

    @property
    def num_embeddings(self) -> int:
        return self.weight.shape[0]

    @property
    def embedding_dim(self) -> int:
        return self.weight.shape[1]


class VocabularyEmbedding(_Embedding):
    """An embedding with this rank's rows; the ranks' lookups are summed."""

    # Each id is in one rank's rows, and the others contribute zeros, so the sum is exact.

    def __init__(
        self,
        weight: nn.Parameter,
        rank_group: RankGroup = ALONE,
        rows: Interval | None = None,
        total: int = 0,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(weight, rank_group)
        self.rows = rows or (0, weight.shape[0])
        self.total, self.padding_idx = total or weight.shape[0], padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        (start, stop), padding = self.rows, self.padding_idx
        if padding is not None:
            padding = padding - start if start <= padding < stop else None
        here = (ids >= start) & (ids < stop)
        nowhere = (ids < 0) | (ids >= self.total)
        if ids.device.type == "cpu" and bool(nowhere.any()):
            raise UnknownTokenError(
                f"token {int(ids[nowhere][0])} is not in the vocabulary of {self.total} tokens"
            )
        # On a GPU a check would synchronize, so an id that no rank has stays out of range for the
        # kernel's own assertion.
        own = (ids - start).masked_fill(~here, 0).masked_fill(nowhere, self.total)
        vectors = F.embedding(own, self.weight, padding)
        return reduce(vectors.masked_fill(~here.unsqueeze(-1), 0), self.rank_group)


class ColumnEmbedding(_Embedding):
    """An embedding with this rank's columns of all rows."""

    def __init__(
        self,
        weight: nn.Parameter,
        rank_group: RankGroup = ALONE,
        columns: Interval | None = None,
        total: int = 0,
        padding_idx: int | None = None,
        gather_output: bool = False,
    ) -> None:
        super().__init__(weight, rank_group)
        self.columns = columns or (0, weight.shape[1])
        self.total, self.padding_idx = total or weight.shape[1], padding_idx
        self.gather_output = gather_output

    def forward(self, ids: Tensor) -> Tensor:
        """Maps ids ``[...]`` to vectors ``[..., columns]``; gathers the columns if configured."""
        vectors = F.embedding(ids, self.weight, self.padding_idx)
        if not self.gather_output:
            return vectors
        lengths = split_evenly(self.total, self.rank_group.size)
        return gather(vectors, vectors.dim() - 1, lengths, self.rank_group)
