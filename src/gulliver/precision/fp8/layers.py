"""Scaled casts to FP8, and linear layers that use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd import Function

from gulliver._compat import scaled_matmul, uncompiled
from gulliver.errors import check_known, once_differentiable

FORWARD = torch.float8_e4m3fn
"""Format of inputs and weights."""
GRADIENT = torch.float8_e5m2
"""Format of output gradients, which need a wider range."""
LARGEST_SCALE = 2.0**126
"""Largest scale whose inverse is a normal float32."""
EXPONENT = 0x7F800000


# [Note: scales are powers of two] A scale maps the largest magnitude of a tensor (tensor-wise), of
# each of its rows or of each of its columns (row-wise) to the upper half of the format's range. Its
# exact position in that half only matters for underflow, so the scale is rounded down to a power of
# two. Multiplying and dividing by it is then exact; a magnitude that differs in its last bit
# between two ranks, or between a forward and its recomputation, gives the same scale; and a product
# is the same whether it is scaled before or after summation, so emulation and hardware agree.
#
# [Note: non-finite elements] Scales are always finite: 0 and the tiniest magnitudes get the largest
# scale, infinities and NaN get 1. An infinity must not become a large number (torch's casts
# saturate), so a tensor or row with a non-finite element becomes NaN as a whole, much as it would
# in a high-precision product; the caller can count it by its magnitude.
#
# Source: Micikevicius et al., FP8 formats for deep learning, 2022 (arXiv 2209.05433): e4m3 has 3
# bits of mantissa and ends at 448, e5m2 has 2 and ends at 57344.
class Scaled(NamedTuple):
    """A matrix in FP8 with its scales."""

    values: Tensor
    inverse: Tensor  # Factors that turn them back, float32: one, or one for each row or column

    def t(self) -> Scaled:
        return Scaled(self.values.t(), self.inverse.t())

    def decoded(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) * self.inverse.to(dtype)


def magnitude(x: Tensor, dim: int | None = None) -> Tensor:
    """Returns the largest magnitude in float32; infinite if any element is not finite."""
    if not x.numel():
        shape = () if dim is None else tuple(1 if d == dim else n for d, n in enumerate(x.shape))
        return x.new_zeros(shape, dtype=torch.float32)
    found = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return found.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the power of two that scales a magnitude to the upper half of a format's range."""
    exact = (torch.finfo(dtype).max / largest).clamp(max=LARGEST_SCALE)
    power = (exact.view(torch.int32) & EXPONENT).view(torch.float32)
    return torch.where(largest.isfinite(), power, 1.0)


def encode(x: Tensor, largest: Tensor, dtype: torch.dtype) -> Scaled:
    """Casts a matrix to FP8, given its largest magnitudes."""
    scale = scale_of(largest, dtype)
    factor = torch.where(largest.isfinite(), scale, torch.nan)
    wide = x.float() if x.dtype is torch.float16 else x  # its exponents end too early
    return Scaled((wide * factor.to(wide.dtype)).to(dtype), 1.0 / scale)


# State of one FP8 layer: scaling recipe, and how many casts were not finite.


Scaling = Literal["tensorwise", "rowwise"]
SCALINGS: tuple[str, ...] = get_args(Scaling)
Role = Literal["input", "weight", "gradient"]
COPIES = {"tensorwise": 1, "rowwise": 0}
"""Number of FP8 weights kept for backward; row-wise scaling needs different scales there."""
Agree = Callable[[Tensor], Any]
"""Reduces magnitudes to their maximum over ranks, in place."""
DIMS: dict[Role, tuple[str, str]] = {
    "input": ("tokens", "inputs"),
    "weight": ("outputs", "inputs"),
    "gradient": ("tokens", "outputs"),
}


# [Note: weights are cast in every forward] No FP8 copy of a weight outlives its graph, because
# changes cannot be detected reliably: fused optimizers, ``p.data`` and native kernels write without
# incrementing the version, and addresses are reused.
#
# [Note: dims that ranks share] Where a dim is sharded over ranks, a magnitude over that dim is the
# largest of all ranks, so that each rank quantizes its shard as one process would. `SharedDims`
# holds these reductions: products of such shards, summed over ranks, have the same terms as in one
# process.
@dataclass(frozen=True)
class Recipe:
    """FP8 scaling of linear layers."""

    # ``tensorwise``: one scale per tensor; ``rowwise``: one per row or column that a product sums
    # over.
    scaling: str = "tensorwise"
    emulate: bool = False  # Compute the same numerics without FP8 units: slower than without FP8

    def __post_init__(self) -> None:
        check_known("FP8 scaling", self.scaling, SCALINGS)

    def __str__(self) -> str:
        return f"{self.scaling}{', emulated' if self.emulate else ''}"


@dataclass(frozen=True)
class SharedDims:
    """Max-reductions over the ranks that shard a dim of a layer; None for unsharded dims."""

    tokens: Agree | None = None
    inputs: Agree | None = None
    outputs: Agree | None = None

    def over(self, role: Role, dim: int | None) -> list[Agree]:
        """Returns the reductions needed for magnitudes over one or both dims of a tensor."""
        names = DIMS[role] if dim is None else DIMS[role][dim : dim + 1]
        found = (getattr(self, name) for name in names)
        return [agree for agree in found if agree is not None]

    @property
    def any(self) -> bool:
        return any((self.tokens, self.inputs, self.outputs))


NOT_SHARED = SharedDims()


class LayerState:
    """State that an FP8 layer keeps between calls."""

    def __init__(
        self, recipe: Recipe, keep_weights: bool = True, shared: SharedDims = NOT_SHARED
    ) -> None:
        self.recipe, self.keep_weights, self.shared = recipe, keep_weights, shared
        self._events: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerState:
        # Process groups cannot be copied, and a copy of the model has weights of its own.
        return LayerState(self.recipe, self.keep_weights, self.shared)

    def __reduce__(self) -> Any:
        return LayerState, (self.recipe, self.keep_weights)

    @property
    def rowwise(self) -> bool:
        return self.recipe.scaling == "rowwise"

    def cast(self, role: Role, x: Tensor, dim: int | None) -> Scaled:
        """Casts a matrix to FP8, with the same scales on all ranks."""
        dtype, largest = GRADIENT if role == "gradient" else FORWARD, magnitude(x, dim)
        for agree in self.shared.over(role, dim):
            agree(largest)
        self._count(f"{role}s not finite", ~largest.isfinite())
        return encode(x, largest, dtype)

    def _count(self, what: str, happened: Tensor) -> None:
        # Added on the device: reading the number would wait for the device.
        seen = happened.any().long()
        before = self._events.get(what)
        self._events[what] = seen if before is None else before + seen

    def events(self) -> dict[str, int]:
        """Returns the number of casts with non-finite elements, by kind."""
        return {what: int(count) for what, count in self._events.items() if int(count)}


def plain_cast(role: Role, x: Tensor, dim: int | None) -> Scaled:
    """Casts a matrix to FP8 without recording anything, for compiled graphs."""
    return encode(x, magnitude(x, dim), GRADIENT if role == "gradient" else FORWARD)


# A linear layer in FP8: three products of quantized factors, summed in high precision.
#
# | product | factors | tensor-wise | row-wise: scales along |
# |---|---|---|---|
# | ``y = x W^T`` | e4m3, e4m3 | one scale each | tokens of x, outputs of W |
# | ``dX = g W`` | e5m2, e4m3 | the same W | tokens of g, inputs of W |
# | ``dW = g^T x`` | e5m2, e4m3 | the same g, the same x | outputs of g, inputs of x |
#
# A scale may differ along the dims that a product keeps, never along the one that it sums over, so
# row-wise scaling quantizes each tensor twice, once per product. Tensor-wise scaling quantizes it
# once, and only the FP8 input is saved for the weight gradient: one byte per element instead of two
# or four.
#
# On hardware the sums are those of the tensor cores: forward with their fast accumulation,
# backward without it. `emulated` is the same arithmetic in float32, or in float64 for float64
# inputs: FP8 numbers are exact in both.


MULTIPLE = 16
"""FP8 units need dims that are multiples of this."""


# [Note: one input, several layers] Queries, keys and values are products of one tensor. Its FP8
# copy is stored on the tensor, so that it is made and saved once for all of them. This applies only
# to results of operations that autograd records: leaves, such as batches and parameters, stay alive
# from step to step and may be written without a new version (NumPy, ``.data``, fused optimizers).
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: LayerState, transposed: bool = False
) -> Tensor:
    """Computes ``x @ weight.T + bias`` with an FP8 matmul: ``[..., outputs]``."""
    traced = torch.compiler.is_compiling()
    if traced and state.shared.any:  # what is sent cannot be traced
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
        # Casts are part of the graph, where they are fused, and equal ones are merged.
        inputs = plain_cast("input", rows.detach(), dim)
        weights = plain_cast("weight", matrix.detach(), dim)
    else:
        inputs = _input(given, rows, state, dim)
        weights = state.cast("weight", matrix.detach(), dim)
    same = not state.rowwise and (traced or state.keep_weights)
    how = state.recipe.emulate, state.rowwise, same
    y = _Linear.apply(rows, matrix, *inputs, *weights, None if traced else state, *how)
    return y.view(*x.shape[:-1], y.shape[-1])


_uncompiled: Any = uncompiled(_product)


def _input(given: Tensor, rows: Tensor, state: LayerState, dim: int | None) -> Scaled:
    """Casts the input to FP8, or reuses the cast of another layer."""
    if state.shared.any or given.grad_fn is None or not torch.is_grad_enabled():
        return state.cast("input", rows.detach(), dim)
    known, key = vars(given).get("_fp8"), (given._version, rows.dtype, dim)
    if known is None or known[0] != key:
        known = key, state.cast("input", rows.detach(), dim)
        vars(given)["_fp8"] = known
    return known[1]


class _Linear(Function):
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
    """Multiplies two FP8 matrices, with high-precision accumulation."""
    if emulate:
        return emulated(a, b, dtype)
    if 0 in (*a.values.shape, *b.values.shape):
        return a.inverse.new_zeros(a.values.shape[0], b.values.shape[1], dtype=dtype)
    a, b = _padded(a), _padded(b.t()).t()
    # FP8 units read both along the contracted dim. Row-wise scales require bf16 results.
    single = a.inverse.numel() == b.inverse.numel() == 1 and dtype is not torch.float64
    out = dtype if single else torch.bfloat16
    left, right = a.values.contiguous(), b.values.t().contiguous().t()
    scales = a.inverse.contiguous(), b.inverse.contiguous()
    return scaled_matmul(left, right, *scales, out, fast).to(dtype)


def emulated(a: Scaled, b: Scaled, dtype: torch.dtype) -> Tensor:
    """Emulates the matmul of FP8 units; only the order of additions differs."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    with torch.autocast(a.values.device.type, enabled=False):
        # Multiply by each inverse in turn: the product of both may underflow in float32.
        product = a.values.to(wide) @ b.values.to(wide)
    return (product * a.inverse.to(wide) * b.inverse.to(wide)).to(dtype)


def _padded(a: Scaled) -> Scaled:
    """Pads the contracted dim with zeros to a multiple of `MULTIPLE`."""
    missing = -a.values.shape[1] % MULTIPLE
    if not missing:
        return a
    rows = a.values.contiguous().view(torch.uint8)
    zeros = rows.new_zeros(rows.shape[0], missing)
    return Scaled(torch.cat([rows, zeros], 1).view(a.values.dtype), a.inverse)
