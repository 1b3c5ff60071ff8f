"""A linear layer in FP8: three products, of quantised factors, summed in high precision.

| product | factors | tensor-wise | row-wise: scales along |
|---|---|---|---|
| ``y = x W^T`` | e4m3, e4m3 | one scale each | tokens of x, outputs of W |
| ``dX = g W`` | e5m2, e4m3 | the same W | tokens of g, inputs of W |
| ``dW = g^T x`` | e5m2, e4m3 | the same g, the same x | outputs of g, inputs of x |

A scale may differ along the dims that a product keeps, never along the one that it sums over, so
row-wise scaling quantises each tensor twice, once for each product that it is in. Tensor-wise
scaling quantises it once, and then the FP8 input alone is saved for the weights' gradient: a byte
for each element in place of two or four.

On hardware the sums are those of the tensor cores: forward with their fast accumulation, backward
without it. `emulated` is the same arithmetic in float32, or in float64 for float64 inputs: FP8
numbers are exact in both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gulliver._compat import scaled_matmul
from gulliver.errors import once_differentiable
from gulliver.precision.fp8._cast import Scaled
from gulliver.precision.fp8._state import LayerState, plain_cast

MULTIPLE = 16
"""FP8 units take sums and outputs whose lengths are multiples of this."""


# [Note: one input, several layers] Queries, keys and values are products of one tensor. Its FP8
# copy is noted on that very tensor, so that it is made, and saved, once for all of them. Only
# results of operations that autograd records are noted: leaves, such as batches and parameters,
# stay alive from step to step and may be written without a new version (NumPy, ``.data``, fused
# optimizers).
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, transposed: bool = False
) -> Tensor:
    """Returns ``x @ weight.T + bias`` with an FP8 product: ``[..., outputs]``."""
    traced = torch.compiler.is_compiling()
    if traced and state.eager_only:
        y = _uncompiled(x, weight, state, transposed, False)
    else:
        y = _product(x, weight, state, transposed, traced)
    return y if bias is None else y + bias.to(y.dtype)


def _product(
    x: Tensor, weight: Tensor, state: LayerState, transposed: bool, traced: bool
) -> Tensor:
    given, device = x, x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    matrix = weight.t() if transposed else weight
    rows, dim = x.reshape(-1, x.shape[-1]), 1 if state.rowwise else None
    if traced:
        # Casts stand in the graph, where they are fused, and those alike become one.
        inputs = plain_cast("input", rows.detach(), dim)
        weights = plain_cast("weight", matrix.detach(), dim)
    else:
        state.begin(weight)
        inputs, weights = (
            _input(given, rows, state, dim),
            state.cast("weight", matrix.detach(), dim),
        )
    same = not state.rowwise and (traced or state.keep_weights)
    how = state.recipe.emulate, state.rowwise, same
    y = _Linear.apply(rows, matrix, *inputs, *weights, None if traced else state, *how)
    return y.view(*x.shape[:-1], y.shape[-1])


_uncompiled: Any = torch.compiler.disable(_product)


def _input(given: Tensor, rows: Tensor, state: LayerState, dim: int | None) -> Scaled:
    """Returns the input in FP8, as another layer may have left it on the tensor."""
    if state.eager_only or given.grad_fn is None or not torch.is_grad_enabled():
        return state.cast("input", rows.detach(), dim)
    known, key = vars(given).get("_fp8"), (given._version, rows.dtype, dim)
    if known is None or known[0] != key:
        known = key, state.cast("input", rows.detach(), dim)
        vars(given)["_fp8"] = known
    return known[1]


class _Linear(Function):
    """The products of a layer; its factors come quantised, and are saved so where they suffice."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        x_values: Tensor,
        x_inverse: Tensor,
        weight_values: Tensor,
        weight_inverse: Tensor,
        state: LayerState | None,
        emulate: bool,
        rowwise: bool,
        same_weights: bool,
    ) -> Tensor:
        ctx.how, ctx.dtype = (state, emulate, rowwise, same_weights), weight.dtype
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        first: list[Tensor | None] = [None, None]
        if needs_weight:
            first = [x, None] if rowwise else [x_values, x_inverse]
        second: list[Tensor | None] = [None, None]
        if needs_x:
            second = [weight_values, weight_inverse] if same_weights else [weight, None]
        ctx.save_for_backward(*first, *second)
        factor = Scaled(weight_values, weight_inverse).t()
        return matmul(Scaled(x_values, x_inverse), factor, x.dtype, emulate, fast=True)

    @staticmethod
    @once_differentiable("use_fp8")
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad, (state, emulate, rowwise, same_weights) = grads[0], ctx.how
        x, x_inverse, weight, weight_inverse = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        cast = plain_cast if state is None else state.cast
        of_x = of_weight = once = None
        if needs_x:
            once = cast("gradient", grad, 1 if rowwise else None)
            if same_weights:
                factor = Scaled(weight, weight_inverse)
            else:
                factor = cast("weight", weight.detach(), 0 if rowwise else None)
            of_x = matmul(once, factor, grad.dtype, emulate)
        if needs_weight:
            if rowwise:
                once, inputs = cast("gradient", grad, 0), cast("input", x, 0)
            else:
                once = cast("gradient", grad, None) if once is None else once
                inputs = Scaled(x, x_inverse)
            of_weight = matmul(once.t(), inputs, ctx.dtype, emulate)
        return of_x, of_weight, *[None] * 8


def matmul(a: Scaled, b: Scaled, dtype: torch.dtype, emulate: bool, fast: bool = False) -> Tensor:
    """Returns the product of two FP8 matrices, summed in high precision."""
    if emulate:
        return emulated(a, b, dtype)
    if 0 in (*a.values.shape, *b.values.shape):
        return a.inverse.new_zeros(a.values.shape[0], b.values.shape[1], dtype=dtype)
    a, b = _padded(a), _padded(b.t()).t()
    # Units read both along the dim that is summed. Scales of rows come with bf16 results only.
    single = a.inverse.numel() == b.inverse.numel() == 1 and dtype is not torch.float64
    out = dtype if single else torch.bfloat16
    left, right = a.values.contiguous(), b.values.t().contiguous().t()
    scales = a.inverse.contiguous(), b.inverse.contiguous()
    return scaled_matmul(left, right, *scales, out, fast).to(dtype)


def emulated(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Emulates FP8 units, except for the order in which terms are added."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    with torch.autocast(a.values.device.type, enabled=False):
        # One factor after the other: their product may be less than float32 has.
        product = a.values.to(wide) @ b.values.to(wide)
    return (product * a.inverse.to(wide) * b.inverse.to(wide)).to(dtype)


def _padded(a: Scaled) -> Scaled:
    """Pads the summed dim with zeros to the multiple that the units need."""
    missing = -a.values.shape[1] % MULTIPLE
    if not missing:
        return a
    rows = a.values.contiguous().view(torch.uint8)
    zeros = rows.new_zeros(rows.shape[0], missing)
    return Scaled(torch.cat([rows, zeros], 1).view(a.values.dtype), a.inverse)
