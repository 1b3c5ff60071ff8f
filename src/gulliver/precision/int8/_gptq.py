"""Rounds weights so that a layer's outputs err least on inputs that were seen: GPTQ.

Columns of a weight are rounded one after the other. What a column's rounding changes in the outputs
is made good by the columns after it, as far as their inputs went along with its own: the least
squares solution, of which the Cholesky factor of the inverse of ``x^T x`` has all that is needed.

The numbers are kept in the formats of `_formats.py`, and run on the same kernels. In int4 a group's
scale is that of its weights as they are when their turn comes. Columns whose input never was
anything but 0 are rounded to the nearest.

Source: Frantar et al., GPTQ, 2022 (arXiv 2210.17323), without reordering.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gulliver.precision.int8._formats import GROUP, packed_int4, scale_int4

DAMPING = 0.01
"""Share of the mean of the diagonal that is added to it, so that it can be inverted."""


@torch.no_grad()
def round_calibrated(
    weight: Tensor, products: Tensor, mode: str, damping: float = DAMPING
) -> tuple[Tensor, Tensor]:
    """Rounds a weight for the inputs that a layer has seen."""
    factor = _factor(products, damping)
    left = torch.empty(weight.shape, dtype=torch.float64, device=weight.device).copy_(weight)
    codes = torch.empty_like(left)  # row by row, as kernels read it, whatever the weight is
    outputs, inputs = left.shape
    largest = weight.detach().float().abs().amax(1)
    four = mode == "int4"
    scales = largest.new_empty(outputs, inputs // GROUP) if four else largest / 127.0
    low, high = (-8, 7) if four else (-127, 127)
    for start in range(0, inputs, GROUP):
        stop = min(start + GROUP, inputs)
        if four:
            scales[:, start // GROUP] = scale_int4(left[:, start:stop].float())
        step = (scales[:, start // GROUP] if four else scales).double()
        inverse = torch.where(step.abs() > 1e-36, 1.0 / step, 0.0)
        errors = torch.empty_like(left[:, start:stop])
        for column in range(start, stop):
            own = left[:, column]
            codes[:, column] = (own * inverse).round().clamp(low, high)
            error = (own - codes[:, column] * step) / factor[column, column]
            left[:, column:stop] -= error[:, None] * factor[column, column:stop]
            errors[:, column - start] = error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    if four:
        return packed_int4(codes.float().unflatten(1, (-1, GROUP))), scales
    return codes.to(torch.int8), scales


def _factor(products: Tensor, damping: float) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped products."""
    damped = products.double()
    diagonal = damped.diagonal()
    more = damping * diagonal.mean()
    unseen = diagonal == 0
    damped = damped + torch.diag(torch.where(unseen, 1.0, more))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)
