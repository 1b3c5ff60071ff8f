"""Weights as int8 rows and int4 groups, and back.

A weight is a matrix ``[outputs, inputs]``. In int8 each row has a scale: its largest magnitude is
127. In int4 each 128 inputs of a row have one: the value of largest magnitude is -8, and two values
lie in a byte (`packed_int4` says which). Source: LLM.int8(), Dettmers et al., 2022 (arXiv
2208.07339); the groups are those of llama.cpp's Q4_0, of 128 instead of 32.

Rows are independent of each other, and a shard of rows has the values of the whole's. A shard of
inputs has them where it is given the whole's largest magnitudes (`largest=`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gulliver.errors import GulliverError

GROUP = 128
"""Inputs that share a scale in int4."""
CHUNK = 1 << 20
"""Elements that are converted at once, so that no float32 copy of a weight is made."""


def _chunks(outputs: int, inputs: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(1, inputs))
    yield from (slice(start, start + step) for start in range(0, outputs, step))


def largest_of(weight: Tensor, path: str) -> Tensor:
    """Returns the largest magnitude of each row, in float32."""
    largest = weight.new_zeros(len(weight), dtype=torch.float32)
    if weight.numel():
        for rows in _chunks(*weight.shape):
            largest[rows] = weight[rows].float().abs().amax(1)
    if not weight.is_meta and not bool(largest.isfinite().all()):
        raise GulliverError(
            f"{path}.weight has values that are not finite: a quantised row would be lost; "
            "load sound weights, or exclude the layer"
        )
    return largest


def check_int4(largest: Tensor, inputs: int, path: str) -> None:
    """Refuses weights whose products in int4 would overflow on the way to a sum."""
    # Kernels add the groups of a row up before the row's activations are scaled back: up to 127
    # times the weights' magnitude for each input.
    most = torch.finfo(torch.float32).max / 127 / max(1, inputs)
    if not largest.is_meta and largest.numel() and float(largest.max()) > most:
        raise GulliverError(
            f"{path}.weight has magnitudes of {float(largest.max()):.2g}, and int4 sums of "
            f"{inputs} inputs overflow from {most:.2g} on: take mode='int8', or exclude the layer"
        )


@torch.no_grad()
def to_int8(weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight to int8."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    inverse = torch.where(largest > 1e-36, 127.0 / largest, 0.0)[:, None]
    for rows in _chunks(*weight.shape):
        values[rows] = (weight[rows].float() * inverse[rows]).round_().clamp_(-127, 127)
    return values, largest / 127.0


@torch.no_grad()
def to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight to int4."""
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
    """Returns the scales of groups ``[..., inputs]``: the value of largest magnitude becomes -8."""
    largest = groups.abs().argmax(-1, keepdim=True)
    return groups.gather(-1, largest).squeeze(-1) / -8.0


def packed_int4(values: Tensor) -> Tensor:
    """Packs ``[rows, groups, GROUP]`` of -8 to 7: byte i has values i (low) and i + 64 (high)."""
    low, high = (values + 8).to(torch.uint8).chunk(2, dim=2)
    return (low | (high << 4)).view(torch.int8).flatten(1)


def from_int8(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrix that int8 values and their scales stand for."""
    return (values.float() * scales[:, None]).to(dtype)


def from_int4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the matrix that int4 bytes and their scales stand for."""
    groups = packed.view(torch.uint8).unflatten(1, (-1, GROUP // 2))
    values = torch.cat([groups & 15, groups >> 4], dim=2).float() - 8.0
    return (values * scales[:, :, None]).flatten(1).to(dtype)
