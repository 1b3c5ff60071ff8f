"""Torch's ``embedding_bag`` on cache slots, with gradients as if it ran on the full table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import exchange
from gulliver.embedding.records import RecordStore
from gulliver.errors import GulliverError, once_differentiable


# [Note: order of sums] The order in which torch adds the gradients of a repeated row depends on the
# indices of all rows: its sort is not stable, and sparse tensors are merged by index. Sorting by
# slot instead would change the order, and so the last bits. So autograd sees a tensor of all rows
# (`RowGradient.whole`, which uses no memory) and accumulates row gradients. The optimizer's
# parameter, the slots, gets the same gradient with rows replaced by slots.
@dataclass(frozen=True)
class Lookup:
    """Slots grouped into bags, and the reduction of the bags."""

    # Slot of each id, flat.
    slots: Tensor
    # Start of each bag.
    offsets: Tensor
    # Slot of the padding row; None for none.
    padding: int | None
    # ``sum``, ``mean`` or ``max``.
    mode: str
    # Maximum norm of a row; None for no limit.
    max_norm: float | None
    # p of the p-norm.
    norm_type: float

    def bags(self, weight: Tensor, weights: Tensor | None) -> Tensor:
        """Reduces the bags; ``max`` uses `largest`, because torch has no sparse gradient for it."""
        return F.embedding_bag(
            self.slots,
            weight,
            self.offsets,
            max_norm=self.max_norm,
            norm_type=self.norm_type,
            mode=self.mode,
            sparse=self.mode != "max",
            per_sample_weights=weights,
            padding_idx=self.padding,
        )

    def largest(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reduces bags by maximum over a copy of the used rows."""
        if self.max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(weight.detach(), self.slots, self.max_norm, self.norm_type)
        used, inverse = torch.unique(self.slots, return_inverse=True)
        # torch rejects a table without rows, so add an unused one.
        rows = torch.cat([weight.detach()[used], weight.new_zeros(1, weight.shape[1])])
        rows.requires_grad_()
        # Padding is the last slot, so it is also the last of the used slots.
        padded = self.padding is not None and bool((used[-1:] == self.padding).any())
        last = len(used) - 1 if padded else None
        output = F.embedding_bag(inverse, rows, self.offsets, mode="max", padding_idx=last)
        return used[:-1] if padded else used, rows, output


class _Bags(torch.autograd.Function):
    """Embedding bags whose gradient is indexed by row."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, weights: Tensor | None, lookup: Lookup, store: RecordStore
    ) -> Tensor:
        ctx.shape, ctx.store, ctx.inputs = whole.shape, store, []
        with torch.enable_grad():
            if lookup.mode == "max":
                ctx.used, rows, output = lookup.largest(store.weight)
                ctx.inputs = [rows]
            else:
                ctx.used = None
                ctx.inputs = [store.weight.detach().requires_grad_()]
                if weights is not None:
                    ctx.inputs.append(weights.detach().requires_grad_(weights.requires_grad))
                output = lookup.bags(*ctx.inputs, *([None] if weights is None else []))
        ctx.output = output
        return output.detach()

    @staticmethod
    @once_differentiable("a cached embedding table")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        inputs = [tensor for tensor in ctx.inputs if tensor.requires_grad]
        found, *rest = torch.autograd.grad(ctx.output, inputs, gradient, retain_graph=True)
        if ctx.used is None:
            slots, values = found._indices()[0], found._values()
        else:
            slots, values = ctx.used, found[: len(ctx.used)]
        ctx.store.last_slots = slots
        rows = ctx.store.rows_in(slots)[None]
        sparse = torch.sparse_coo_tensor(rows, values, ctx.shape, check_invariants=False)
        return sparse, rest[0] if rest else None, None, None


class RowGradient:
    """The sparse gradient of all rows, and its counterpart for the slots."""

    def __init__(self, store: RecordStore) -> None:
        self._store, self.applied = store, cast("Tensor | None", None)
        weight = store.weight
        one = torch.zeros((), dtype=weight.dtype, device=weight.device)
        # Placeholder for all rows, (rows, dim); its gradient is sparse.
        self.whole = one.expand(store.rows, weight.shape[1]).requires_grad_()
        self.whole.register_hook(self._before)
        self.whole.register_post_accumulate_grad_hook(self._after)

    def bags(self, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """Reduces bags, accumulating their gradient in `whole`."""
        return cast(Tensor, _Bags.apply(self.whole, weights, lookup, self._store))

    def _before(self, gradient: Tensor) -> None:
        held = self._store.weight.grad
        if held is not None and held is self.applied and held._nnz():
            raise GulliverError(
                "the table still has the gradient of the last step, whose slots now hold other "
                "rows; call optimizer.zero_grad() before backward"
            )
        # When the user clears the gradient of the parameter, this one is cleared too.
        if held is None or not held._nnz():
            self.whole.grad = None

    def _after(self, whole: Tensor) -> None:
        store, gradient = self._store, whole.grad
        assert gradient is not None, "a gradient was just accumulated"
        slots = store.last_slots
        fresh = store.weight.grad is None or not store.weight.grad._nnz()
        if not fresh or len(slots) != gradient._nnz():
            slots = store.slots_in_use(gradient._indices()[0])
        store.weight.grad = torch.sparse_coo_tensor(
            slots[None], gradient._values(), store.weight.shape, check_invariants=False
        )


# Communication between ranks that share tables, forward and backward.


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
    """Reduces bags over copies of the used rows, with the same gradients as for the table."""

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
