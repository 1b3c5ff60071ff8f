"""What travels between ranks that share tables, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gulliver.comm import RankGroup, exchange
from gulliver.embedding._lookup import Lookup
from gulliver.errors import once_differentiable


class BagExchange(torch.autograd.Function):
    """An all-to-all of flat tensors; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        group: RankGroup,
        counts: list[int],
        scale: float,
        *outgoing: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.scale = group, scale
        ctx.counts = [tensor.numel() for tensor in outgoing]
        arrived = exchange(group, [tensor.detach() for tensor in outgoing], counts)
        return tuple(
            tensor.clone() if tensor is outgoing[group.rank] else tensor for tensor in arrived
        )

    @staticmethod
    @once_differentiable("a sharded embedding table")
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        flat = [gradient.contiguous() for gradient in gradients]
        arrived = exchange(ctx.group, flat, ctx.counts)
        scaled = [gradient * ctx.scale for gradient in arrived]
        return None, None, None, None, *scaled


class Pool(torch.autograd.Function):
    """Bags of rows of which each is used once, with the gradient that a table's row would have."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, lookup: Lookup) -> Tensor:
        with torch.enable_grad():
            ctx.rows = rows.detach().requires_grad_()
            ctx.output = lookup.bags(ctx.rows, None)
        return ctx.output.detach()

    @staticmethod
    @once_differentiable("a sharded embedding table")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (found,) = torch.autograd.grad(ctx.output, ctx.rows, gradient, retain_graph=True)
        return found.to_dense() if found.is_sparse else found, None
