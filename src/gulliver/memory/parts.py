"""Parts of sharded tensors: regions (slices along a dim) and ranges of elements."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class Region:
    """Slices of a tensor along one dim, concatenated into one tensor."""

    # A fused projection of queries, keys and values has three runs; a plain shard has one.

    shape: tuple[int, ...]
    dim: int
    runs: tuple[tuple[int, int], ...]
    copies: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.dim < len(self.shape), "a region has a dim of the full tensor"
        ends = [0, *(end for run in self.runs for end in run), self.shape[self.dim]]
        assert ends == sorted(ends), "runs ascend inside the full tensor"

    @property
    def local_shape(self) -> tuple[int, ...]:
        size = sum(stop - start for start, stop in self.runs)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)


def set_region(parameter: Tensor, region: Region) -> None:
    if tuple(parameter.shape) != region.local_shape:
        raise GulliverError(
            f"a parameter of {tuple(parameter.shape)} cannot hold a region of {region.local_shape}"
        )
    vars(parameter)["_region"] = region


def region_of(parameter: Tensor) -> Region | None:
    """Returns a parameter's region of the full tensor; None if the parameter is complete."""
    return vars(parameter).get("_region")


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    region = region_of(parameter)
    return tuple(parameter.shape) if region is None else region.shape


def set_state_shape(parameter: Tensor, shape: tuple[int, ...]) -> None:
    vars(parameter)["_state_shape"] = shape


def state_shape(parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of a parameter's optimizer state in files; by default the parameter's."""
    return vars(parameter).get("_state_shape", tuple(parameter.shape))


@dataclass(frozen=True, eq=False)
class Part:
    """Elements ``start:stop`` of a flattened tensor, or of a region of it."""

    value: Tensor
    shape: tuple[int, ...]
    start: int = 0
    owner: Tensor | None = None
    region: Region | None = None

    def __post_init__(self) -> None:
        size = math.prod(self.shape) if self.region is None else self.region.numel
        assert self.region is None or self.region.shape == tuple(self.shape)
        assert self.value.is_contiguous(), "a part is contiguous"
        assert self.start >= 0, "a part is inside its tensor"
        assert self.stop <= size, "a part is inside its tensor"

    @property
    def stop(self) -> int:
        return self.start + self.value.numel()

    @property
    def is_whole(self) -> bool:
        return self.value.numel() == math.prod(self.shape)


def part_of(tensor: Tensor) -> Part:
    region = region_of(tensor)
    if not tensor.is_contiguous():
        raise GulliverError(f"a slice of {tuple(tensor.shape)} is not contiguous; clone it first")
    return Part(tensor.detach(), whole_shape(tensor), 0, tensor, region)
