"""Losses of logits that are cut over the vocabulary, the sequence or both, and gathered outputs.

The loss and gathered tensors leave the sharded part of a model with ``gradient="alike"``: every
rank of a sequence shows them and counts them. Why that is right together with the optimizer's mean
over these ranks is explained at [Note: gradients] of sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.comm import RankGroup, all_reduce
from gulliver.errors import GulliverError
from gulliver.parallel.sequence import SequenceGroups, Tail, show, unshard, unshard_tail

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Counting:
    """The denominator of a loss of tokens."""

    # Label of tokens that do not count.
    ignore_index: int = -100
    # What the sum is divided by; None for the tokens that count, of all ranks.
    items: Tensor | int | None = None


def token_losses(
    logits: Tensor,
    labels: Tensor,
    tensor: RankGroup,
    columns: tuple[int, int] | None,
    ignore_index: int = -100,
) -> Tensor:
    """The cross-entropy of each token."""
    if columns is not None:
        from gulliver.parallel.tensor import cross_entropy

        return cross_entropy(logits, labels, tensor, columns, ignore_index)
    wide = logits.float() if logits.dtype in HALVES else logits
    flat = F.cross_entropy(
        wide.flatten(0, 1), labels.flatten(), ignore_index=ignore_index, reduction="none"
    )
    return flat.view(labels.shape)


def mean_over_ranks(
    losses: Tensor, labels: Tensor, groups: SequenceGroups, counting: Counting
) -> Tensor:
    """The mean over all tokens that count, of which each rank has its own."""
    total = losses.sum()
    count = (labels != counting.ignore_index).sum()
    if counting.items is not None:
        count = torch.as_tensor(counting.items, device=losses.device)
    # In float64, so that the number shown is one process's to the last digit of its own dtype.
    sums = torch.stack([total.detach().double(), count.double()])
    if groups.plan.degree > 1:
        own = sums[1].clone()
        all_reduce(sums, group=groups.all.process_group)
        if counting.items is not None:
            sums[1] = own
    whole = (sums[0] / sums[1]).to(losses.dtype)
    # A batch in which nothing counts shows nan, as torch does; its gradients must not be nan, or a
    # step would spread them to all parameters.
    share = total / sums[1].clamp(min=1).to(losses.dtype)
    return show(share, whole, alike=groups.plan.degree)


def leave(x: Tensor, groups: SequenceGroups, length: int) -> Tensor:
    """The whole of a tensor of which each rank has its tokens, ``[batch, tokens, ...]``."""
    if groups.plan.degree == 1:
        return x
    return unshard(x, groups, 1, length, gradient="alike")


def leave_tail(x: Tensor, groups: SequenceGroups, tail: Tail) -> Tensor:
    """The same of the last tokens only."""
    if groups.plan.degree == 1:
        return x
    return unshard_tail(x, groups, tail, gradient="alike")


class NotGatheredError(GulliverError, AttributeError):
    """Something was asked of logits that are not there."""


class NotGathered:
    """Stands for logits that were used for the loss and not brought together."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotGatheredError(
            "logits are not brought together in training with labels, because each rank has its "
            "part only: call gulliver.booster.keep_logits(model) to have them beside the loss, or "
            "leave labels out of the model's call, or model.eval() to look at them"
        )

    def __getattr__(self, name: str) -> Any:
        return self._refuse()

    __getitem__ = __iter__ = __len__ = __add__ = __sub__ = __mul__ = __matmul__ = _refuse
    __array__ = __float__ = __bool__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls()._refuse()

    def __repr__(self) -> str:
        return "NotGathered()"

    def __reduce__(self) -> Any:
        return NotGathered, ()

    def __deepcopy__(self, memo: Any) -> NotGathered:
        return self
