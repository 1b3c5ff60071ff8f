"""Weights as int8 rows and int4 groups, and conversions.

A weight is a matrix ``[outputs, inputs]``. In int8, a scale per row maps its largest magnitude to
127. In int4, a value v of 0 to 15 represents ``v * scale + minimum``, with a scale and a minimum in
float16 per group of 32 inputs: 5 bits per weight, the layout of llama.cpp's Q4_1. A byte holds two
values (see `packed_int4`). Source: LLM.int8(), Dettmers et al., 2022 (arXiv 2208.07339).

Rows are independent, so a shard of rows has the same values as the full weight. A shard of inputs
does too if given the full weight's largest magnitudes (`largest=`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from gulliver.errors import GulliverError

GROUP = 32
"""Inputs that share a scale and a minimum in int4."""
SENSITIVE = ("lm_head", "k_proj", "v_proj", "qkv_proj")
"""Last parts of the paths of layers that mode int4 keeps in int8."""
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


def check_int4(largest: Tensor, path: str) -> None:
    most = torch.finfo(torch.float16).max
    if not largest.is_meta and largest.numel() and float(largest.max()) > most:
        raise GulliverError(
            f"{path}.weight has magnitudes up to {float(largest.max()):.2g}, but int4 stores at "
            f"most {most:.0f}; use mode='int8', or exclude the layer"
        )


def sensitive_paths(paths: Iterable[str]) -> set[str]:
    """Returns the layers that mode int4 keeps in int8, given all linear layers in order."""
    # Errors of these weights cost most, as in llama.cpp's mixtures of formats: keys, values and the
    # output layer, and the down projections (some of whose inputs are huge) of the first and last
    # eighth of the blocks and of every third block between.
    names = [(path, path.rpartition(".")[2]) for path in paths]
    down = [path for path, name in names if name == "down_proj"]
    edge = len(down) // 8
    wide = [n < edge or n >= len(down) - edge or (n - edge) % 3 == 2 for n in range(len(down))]
    found = {path for path, name in names if name in SENSITIVE}
    return found | {path for path, keep in zip(down, wide, strict=True) if keep}


@torch.no_grad()
def to_int8(weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    inverse = torch.where(largest > 1e-36, 127.0 / largest, 0.0)[:, None]
    for rows in _chunks(*weight.shape):
        values[rows] = (weight[rows].float() * inverse[rows]).round_().clamp_(-127, 127)
    return values, largest / 127.0


@torch.no_grad()
def to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns packed values, and pairs of scale and minimum ``[outputs, groups, 2]``."""
    outputs, inputs = weight.shape
    packed = torch.empty(outputs, inputs // 2, dtype=torch.int8, device=weight.device)
    pairs = weight.new_empty(outputs, inputs // GROUP, 2, dtype=torch.float16)
    for rows in _chunks(outputs, inputs):
        groups = weight[rows].float().unflatten(1, (-1, GROUP))
        pairs[rows] = pairs_int4(groups)
        packed[rows] = packed_int4(_codes(groups, pairs[rows].float()))
    return packed, pairs


def _codes(groups: Tensor, pairs: Tensor) -> Tensor:
    scale, least = pairs[..., :1], pairs[..., 1:]
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    return ((groups - least) * inverse).round_().clamp_(0, 15)


def pairs_int4(groups: Tensor, importance: Tensor | None = None) -> Tensor:
    """Returns scale and minimum in float16 for groups ``[..., GROUP]``: a least-squares fit."""
    # Weights are rounded with the range from minimum to maximum, then scale and minimum are fitted
    # to the rounded values; large weights count more, as in llama.cpp's K formats, and those of
    # important columns.
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    codes = _codes(groups, torch.cat([(high - low) / 15, low], -1))
    share = groups.abs() + groups.square().mean(-1, keepdim=True).sqrt_()
    share *= 1.0 if importance is None else importance
    share /= share.sum(-1, keepdim=True).clamp_(min=1e-30)
    mean = (share * codes).sum(-1, keepdim=True)
    centre = (share * groups).sum(-1, keepdim=True)
    codes -= mean
    share *= codes
    scale = (share * groups).sum(-1, keepdim=True) / (share * codes).sum(-1, keepdim=True).clamp_(
        min=1e-30
    )
    return torch.cat([scale, centre - mean * scale], -1).half()


def packed_int4(values: Tensor) -> Tensor:
    """Packs ``[rows, groups, GROUP]`` of 0 to 15: byte i has values i (low) and i + 16 (high)."""
    low, high = values.to(torch.uint8).chunk(2, dim=2)
    return (low | (high << 4)).view(torch.int8).flatten(1)


def from_int8(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (values.float() * scales[:, None]).to(dtype)


def from_int4(packed: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    groups = packed.view(torch.uint8).unflatten(1, (-1, GROUP // 2))
    values, known = torch.cat([groups & 15, groups >> 4], dim=2), pairs.float()
    return (values * known[..., :1] + known[..., 1:]).flatten(1).to(dtype)


# GPTQ: rounds weights to minimize the error of a layer's outputs on calibration inputs.
#
# Columns of a weight are rounded one at a time. The columns after it compensate for its rounding
# error, as far as their inputs are correlated with its own: a least squares solution, which follows
# from the Cholesky factor of the inverse of ``x^T x``.
#
# Results have the formats above, and use the same kernels. Columns with large inputs are rounded
# first, while most others can still compensate; in int4, groups are ordered, and columns in a
# group. A group's scale and minimum are fitted to its weights when it is reached, each with the
# importance that GPTQ gives its error: the part of its input that later columns do not explain.
# When all values are known, all scales and minimums of a row are fitted to its outputs.
# Columns whose inputs are always 0 are rounded to nearest.
#
# Source: Frantar et al., GPTQ, 2022 (arXiv 2210.17323).


BLOCK = 128
"""Columns after which the others are updated, in one product."""
FITTED = 2**24
"""Elements of the largest temporary tensor while scales and minimums are fitted."""
DAMPING = 0.01
"""Fraction of the mean diagonal that is added to the diagonal, for a stable inverse."""


@torch.no_grad()
def round_calibrated(
    weight: Tensor, products: Tensor, mode: str, damping: float = DAMPING
) -> tuple[Tensor, Tensor]:
    """Rounds a weight with GPTQ, given the sum of outer products of calibration inputs."""
    four = mode == "int4"
    order = _order(products.diagonal(), GROUP if four else 1)
    products = _damped(products, damping)
    factor = _factor(products[order][:, order])
    importance = factor.diagonal().pow(-2).float()
    left = torch.empty(weight.shape, dtype=torch.float64, device=weight.device)
    left.copy_(weight[:, order])
    codes = torch.empty_like(left)  # row by row, as kernels read it, whatever the weight is
    outputs, inputs = left.shape
    scales = weight.detach().float().abs().amax(1) / 127.0
    if four:
        scales = scales.new_empty(outputs, inputs // GROUP, 2, dtype=torch.float16)
    low, high = (0, 15) if four else (-127, 127)
    step, least = scales.double(), 0.0
    for start in range(0, inputs, BLOCK):
        stop = min(start + BLOCK, inputs)
        errors = torch.empty_like(left[:, start:stop])
        for column in range(start, stop):
            if four and column % GROUP == 0:
                group, place = slice(column, column + GROUP), order[column] // GROUP
                scales[:, place] = pairs_int4(left[:, group].float(), importance[group])
                step, least = scales[:, place].double().unbind(1)
            own = left[:, column]
            inverse = torch.where(step.abs() > 1e-36, 1.0 / step, 0.0)
            codes[:, column] = ((own - least) * inverse).round().clamp(low, high)
            error = (own - codes[:, column] * step - least) / factor[column, column]
            left[:, column:stop] -= error[:, None] * factor[column, column:stop]
            errors[:, column - start] = error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
    codes = torch.empty_like(codes).index_copy_(1, order, codes)
    if four:
        values = codes.unflatten(1, (-1, GROUP))
        rows = max(1, FITTED // (inputs * inputs // GROUP))
        parts = zip(weight.split(rows), values.split(rows), scales.split(rows), strict=True)
        scales = torch.cat([_fitted(w.double(), v, s, products) for w, v, s in parts])
        return packed_int4(values), scales
    return codes.to(torch.int8), scales


def _order(squares: Tensor, group: int) -> Tensor:
    """Orders columns by the squares of their inputs, largest first: groups, and columns in each."""
    squares = squares.double().unflatten(0, (-1, group))
    groups = squares.sum(1).argsort(descending=True, stable=True)
    within = squares.argsort(dim=1, descending=True, stable=True)
    return (groups[:, None] * group + within[groups]).flatten()


def _damped(products: Tensor, damping: float) -> Tensor:
    diagonal = products.diagonal().double()
    return products + torch.diag(torch.where(diagonal == 0, 1.0, damping * diagonal.mean()))


def _factor(products: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the inverse."""
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(products))
    return torch.linalg.cholesky(inverse, upper=True)


def _fitted(weight: Tensor, values: Tensor, pairs: Tensor, products: Tensor) -> Tensor:
    """Fits scales and minimums of rows of int4 values by least squares of their outputs."""
    groups, before = len(products) // GROUP, pairs.double()

    def squared(errors: Tensor) -> Tensor:
        return ((errors @ products) * errors).sum(1)

    def grouped(x: Tensor) -> Tensor:
        return x.unflatten(-1, (groups, GROUP))

    # Normal equations of all scales and minimums of a row, for the change of both.
    errors = weight - (values * before[..., :1] + before[..., 1:]).flatten(1)
    slopes = grouped(errors @ products)
    blocks = products.unflatten(0, (groups, GROUP))
    sums = grouped(values.transpose(0, 1) @ blocks)
    scales, mixed = (sums * values).sum(-1).transpose(0, 1), sums.sum(-1).transpose(0, 1)
    minimums = grouped(blocks.sum(1)).sum(-1).expand_as(mixed)
    normal = torch.cat([torch.cat([scales, mixed], 2), torch.cat([mixed.mT, minimums], 2)], 1)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal += 1e-6 * diagonal.mean(1, keepdim=True)
    right = torch.cat([(values * slopes).sum(-1), slopes.sum(-1)], 1)
    change = torch.linalg.solve(normal, right).unflatten(1, (2, groups)).mT
    after = (before + change).half()
    change = after.double() - before
    left = errors - (values * change[..., :1] + change[..., 1:]).flatten(1)
    return torch.where((squared(left) < squared(errors))[:, None, None], after, pairs)
