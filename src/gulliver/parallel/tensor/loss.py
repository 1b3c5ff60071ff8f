"""Vocabulary-parallel cross-entropy: each rank has some columns of the logits.

For a token, let ``m`` be the largest logit and ``s`` the sum of ``exp(logit - m)``, both over all
ranks. Its loss is ``m + log(s) - target``. Source: Megatron-LM, Shoeybi et al., 2019, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gulliver.comm.collectives import all_reduce
from gulliver.comm.groups import RankGroup
from gulliver.errors import GulliverError
from gulliver.parallel.tensor.collectives import copy, reduce


# [Note: two reductions] Two small all-reduces carry ``m``, then ``s`` and the target's logit. They
# cannot be combined: the terms of ``s`` are relative to ``m``, because ``exp`` would overflow
# otherwise, so ``m`` is needed first, and a maximum and a sum are different reductions. Logits are
# not sent (only four numbers per token), and the gradient, ``softmax - one-hot``, needs no
# communication, because each rank has ``m + log(s)`` and its own columns.
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    rank_group: RankGroup,
    vocabulary: tuple[int, int],
    ignore_index: int = -100,
) -> Tensor:
    """Returns the loss of each token, the same on all ranks.

    Args:
        logits: this rank's columns, ``[..., stop - start]``.
        labels: token ids in the full vocabulary, ``[...]``, the same on all ranks.
        rank_group: ranks that the vocabulary is sharded over.
        vocabulary: interval ``(start, stop)`` of this rank's columns.
        ignore_index: label whose loss and gradient are 0.

    Returns:
        Losses ``[...]`` in float32 (float64 for float64).

    Raises:
        GulliverError: shapes do not match, or a label is not in the vocabulary. Labels are only
            checked on the CPU; on a GPU, the token's loss is NaN.
    """
    start, stop = vocabulary
    if logits.shape != (*labels.shape, stop - start):
        raise GulliverError(
            f"logits of shape {tuple(logits.shape)} do not match labels {tuple(labels.shape)} and "
            f"columns {start} to {stop}: expected {(*labels.shape, stop - start)}"
        )
    return _CrossEntropy.apply(logits, labels, rank_group, start, ignore_index)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        rank_group: RankGroup,
        start: int,
        ignore_index: int,
    ) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        precise = logits.to(wide)
        # A rank may have no column at all.
        low = torch.finfo(wide).min
        largest = precise.amax(-1) if precise.shape[-1] else precise.new_full(labels.shape, low)
        _everywhere(largest, "max", rank_group)
        total = (precise - largest.unsqueeze(-1)).exp().sum(-1)
        here, column = _own(labels, start, logits.shape[-1])
        if precise.shape[-1]:
            target = precise.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
        else:
            target = torch.zeros_like(total)
        sums = torch.stack([total, target, here.to(wide)])
        _everywhere(sums, "sum", rank_group)
        total, target, found = sums.unbind()
        log_total = largest + total.log()
        ignored = labels == ignore_index
        # The sums are equal on all ranks, so all of them raise.
        lost = (found == 0) & ~ignored if labels.device.type == "cpu" else None
        if lost is not None and bool(lost.any()):
            raise GulliverError(f"label {int(labels[lost][0])} is not in the vocabulary")
        loss = (log_total - target).masked_fill(found == 0, torch.nan).masked_fill(ignored, 0)
        ctx.save_for_backward(logits, labels, log_total)
        ctx.start, ctx.ignored, ctx.rank_group = start, ignore_index, rank_group
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, labels, log_total = ctx.saved_tensors
        precise, again = logits.to(log_total.dtype), torch.is_grad_enabled()
        grad = grads[0].masked_fill(labels == ctx.ignored, 0).unsqueeze(-1)
        if again:  # differentiable, with the sum over all columns, which each rank uses
            grad = copy(grad, ctx.rank_group)
            share = (precise - log_total.unsqueeze(-1)).exp().sum(-1)
            total = copy(reduce(share, ctx.rank_group), ctx.rank_group)
            log_total = log_total + total.log()
        found = (precise - log_total.unsqueeze(-1)).exp_()
        here, column = _own(labels, ctx.start, logits.shape[-1])
        if logits.shape[-1]:
            term = -here.to(found.dtype).unsqueeze(-1)
            add = found.scatter_add if again else found.scatter_add_
            found = add(-1, column.unsqueeze(-1), term)
        return (found * grad if again else found.mul_(grad)).to(logits.dtype), *[None] * 4


def _own(labels: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns whether each label is in this rank's columns, and its column or 0."""
    column = labels - start
    here = (column >= 0) & (column < count)
    return here, column.masked_fill(~here, 0)


def _everywhere(tensor: Tensor, op: Any, rank_group: RankGroup) -> None:
    if rank_group.size > 1:
        all_reduce(tensor, op, group=rank_group.process_group)
