"""Weights as int8 rows and int4 groups, and conversions.

A weight is a matrix ``[outputs, inputs]``. In int8, a scale per row maps its largest magnitude to
127. In int4, a scale per group of 128 inputs maps the value of largest magnitude to -8, and a byte
holds two values (see `packed_int4`). Source: LLM.int8(), Dettmers et al., 2022 (arXiv
2208.07339); the groups are those of llama.cpp's Q4_0, with 128 inputs instead of 32.

Rows are independent, so a shard of rows has the same values as the full weight. A shard of inputs
does too if given the full weight's largest magnitudes (`largest=`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gulliver.errors import GulliverError

GROUP = 128
"""Inputs that share a scale in int4."""
CHUNK = 1 << 20
"""Elements converted at a time, which avoids a float32 copy of the weight."""


def _chunks(outputs: int, inputs: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(1, inputs))
    yield from (slice(start, start + step) for start in range(0, outputs, step))


def largest_of(weight: Tensor, path: str) -> Tensor:
    largest = weight.new_zeros(len(weight), dtype=torch.float32)
    if weight.numel():
        for rows in _chunks(*weight.shape):
            largest[rows] = weight[rows].float().abs().amax(1)
    if not weight.is_meta and not bool(largest.isfinite().all()):
        raise GulliverError(
            f"{path}.weight has values that are not finite; check the weights, or exclude the layer"
        )
    return largest


def check_int4(largest: Tensor, inputs: int, path: str) -> None:
    """Raises an error for weights whose int4 products would overflow."""
    # Kernels sum the groups of a row before they apply the scale of its activations: up to 127
    # times the weights' magnitude for each input.
    most = torch.finfo(torch.float32).max / 127 / max(1, inputs)
    if not largest.is_meta and largest.numel() and float(largest.max()) > most:
        raise GulliverError(
            f"{path}.weight has magnitudes up to {float(largest.max()):.2g}, but int4 sums over "
            f"{inputs} inputs overflow above {most:.2g}; use mode='int8', or exclude the layer"
        )


@torch.no_grad()
def to_int8(weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    inverse = torch.where(largest > 1e-36, 127.0 / largest, 0.0)[:, None]
    for rows in _chunks(*weight.shape):
        values[rows] = (weight[rows].float() * inverse[rows]).round_().clamp_(-127, 127)
    return values, largest / 127.0


@torch.no_grad()
def to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    outputs, inputs = weight.shape
    packed = torch.empty(outputs, inputs // 2, dtype=torch.int8, device=weight.device)
    scales = weight.new_empty(outputs, inputs // GROUP, dtype=torch.float32)
    for rows in _chunks(outputs, inputs):
        groups = weight[rows].float().unflatten(1, (-1, GROUP))
        scale = scale_int4(groups)[:, :, None]
        inverse = torch.where(scale.abs() > 1e-36, 1.0 / scale, 0.0)
        scales[rows] = scale.squeeze(2)
        packed[rows] = packed_int4((groups * inverse).round_().clamp_(-8, 7))
    return packed, scales


def scale_int4(groups: Tensor) -> Tensor:
    """Returns scales for groups ``[..., inputs]``; the value of largest magnitude becomes -8."""
    largest = groups.abs().argmax(-1, keepdim=True)
    return groups.gather(-1, largest).squeeze(-1) / -8.0


def packed_int4(values: Tensor) -> Tensor:
    """Packs ``[rows, groups, GROUP]`` of -8 to 7: byte i has values i (low) and i + 64 (high)."""
    low, high = (values + 8).to(torch.uint8).chunk(2, dim=2)
    return (low | (high << 4)).view(torch.int8).flatten(1)


def from_int8(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.float() * scales[:, None]).to(dtype)


def from_int4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    groups = packed.view(torch.uint8).unflatten(1, (-1, GROUP // 2))
    values = torch.cat([groups & 15, groups >> 4], dim=2).float() - 8.0
    return (values * scales[:, :, None]).flatten(1).to(dtype)


# GPTQ: rounds weights to minimize the error of a layer's outputs on calibration inputs.
#
# Columns of a weight are rounded one at a time. The columns after it compensate for its rounding
# error, as far as their inputs are correlated with its own: a least squares solution, which follows
# from the Cholesky factor of the inverse of ``x^T x``.
#
# Results have the formats above, and use the same kernels. In int4, a group's scale is computed
# from its weights when the group is reached. Columns whose inputs are always 0 are rounded to
# nearest.
#
# Source: Frantar et al., GPTQ, 2022 (arXiv 2210.17323), without reordering.


DAMPING = 0.01
"""Fraction of the mean diagonal that is added to the diagonal, for a stable inverse."""


@torch.no_grad()
def round_calibrated(
    weight: Tensor, products: Tensor, mode: str, damping: float = DAMPING
) -> tuple[Tensor, Tensor]:
    """Rounds a weight with GPTQ, given the sum of outer products of calibration inputs."""
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
