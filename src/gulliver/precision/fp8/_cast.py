"""Scaled casts: a tensor in FP8, and the factor that turns it back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FORWARD = torch.float8_e4m3fn
"""Format of inputs and weights."""
GRADIENT = torch.float8_e5m2
"""Format of gradients of outputs, whose range is wider."""
LARGEST_SCALE = 2.0**126
"""The inverse is the least normal number of float32."""
EXPONENT = 0x7F800000
"""Bits of the exponent of a float32."""


# [Note: scales are powers of two] A scale maps the largest magnitude of a tensor (tensor-wise), of
# each of its rows or of each of its columns (row-wise) to the upper half of the format's range.
# Which number of that half it becomes does not matter to a floating-point format but for what
# underflows, so the scale is rounded down to a power of two: multiplying by it, and dividing, is
# exact; a magnitude that differs in its last bit between two ranks, or between a forward and its
# recomputation, gives the same scale; and a product comes out the same whether it is scaled before
# or after it is summed, which makes emulation and hardware agree.
#
# [Note: what is no number] A scale is finite whatever the input: 0 and the tiniest magnitudes get
# the largest one, infinities and NaN get 1. What was infinite must not come back as a large number
# (casts of torch saturate), so a tensor, or row, with such an element becomes NaN as a whole, as it
# nearly does in a product of high precision; the caller can count it by its magnitude.
#
# Source: Micikevicius et al., FP8 formats for deep learning, 2022 (arXiv 2209.05433): e4m3 has 3
# bits of mantissa and ends at 448, e5m2 has 2 and ends at 57344.
class Scaled(NamedTuple):
    """A matrix in FP8."""

    values: Tensor
    inverse: Tensor  # Factors that turn them back, float32: one, or one for each row or column

    def t(self) -> Scaled:
        """Returns the transpose."""
        return Scaled(self.values.t(), self.inverse.t())

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Returns the elements as numbers of a wider dtype."""
        return self.values.to(dtype) * self.inverse.to(dtype)


def magnitude(x: Tensor, dim: int | None = None) -> Tensor:
    """Returns the largest magnitude in float32; infinite where an element is infinite or NaN."""
    if not x.numel():
        shape = () if dim is None else tuple(1 if d == dim else n for d, n in enumerate(x.shape))
        return x.new_zeros(shape, dtype=torch.float32)
    found = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    return found.float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the power of two that maps a magnitude into the upper half of a format's range."""
    exact = (torch.finfo(dtype).max / largest).clamp(max=LARGEST_SCALE)
    power = (exact.view(torch.int32) & EXPONENT).view(torch.float32)
    return torch.where(largest.isfinite(), power, 1.0)


def encode(x: Tensor, largest: Tensor, dtype: torch.dtype, limit: Tensor | None = None) -> Scaled:
    """Returns a matrix in FP8."""
    scale = scale_of(largest if limit is None else limit, dtype)
    factor = torch.where(largest.isfinite(), scale, torch.nan)
    wide = x.float() if x.dtype is torch.float16 else x  # its exponents end too early
    wide = wide * factor.to(wide.dtype)
    if limit is not None:
        most = torch.finfo(dtype).max
        wide = wide.clamp(-most, most)
    return Scaled(wide.to(dtype), 1.0 / scale)
