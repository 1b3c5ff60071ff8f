"""The types of `gulliver.data`: buckets, clips, data sets, and batches of clips of one bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape that the clips of a batch share: frames, and height and width in pixels."""

    frames: int
    height: int
    width: int

    @property
    def aspect_ratio(self) -> str:
        """Width to height in lowest terms, such as ``5:3``."""
        common = math.gcd(self.width, self.height)
        return f"{self.width // common}:{self.height // common}"

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


@dataclass(frozen=True)
class Clip:
    """A clip [3, T, H, W] in [-1, 1], its caption, frame rate (1/s) and index in the data set."""

    video: Tensor
    caption: str
    fps: float
    index: int


@dataclass(frozen=True)
class BrokenClip:
    """A sample that could not be read when its turn came, and why."""

    index: int
    reason: str


@runtime_checkable
class ClipDataset(Protocol):
    """The interface of a data set of clips."""

    def __len__(self) -> int: ...

    def bucket_of(self, index: int) -> Bucket | None:
        """The bucket of a sample, or None where it fits none."""
        ...

    def __getitem__(self, index: int) -> Clip | BrokenClip: ...


class ClipBatch(NamedTuple):
    """Clips of one bucket: videos [B, 3, T, H, W], or None where no sample was left."""

    # `kept` holds the positions, among the indices asked for, of the samples that could be read.

    videos: Tensor | None
    captions: list[str]
    fps: Tensor
    kept: list[int]
    broken: list[BrokenClip]


@runtime_checkable
class WindowedDataset(ClipDataset, Protocol):
    """A data set whose clips are longer than a sample: a seed says which frames it takes."""

    def read(self, index: int, seed: int) -> Clip | BrokenClip: ...


@runtime_checkable
class DealtDataset(WindowedDataset, Protocol):
    """A data set whose samples go to another bucket in each epoch."""

    def deal(self, epoch: int) -> Sequence[Bucket | None]:
        """The bucket of every sample in an epoch, or None where it is left out."""
        ...

    def read(self, index: int, seed: int, bucket: Bucket | None = None) -> Clip | BrokenClip: ...


def collate(
    dataset: ClipDataset,
    indices: list[int],
    seeds: Sequence[int] | None = None,
    bucket: Bucket | None = None,
) -> ClipBatch:
    """Reads samples of one bucket as a batch; broken ones are left out and named."""
    clips: list[Clip] = []
    kept: list[int] = []
    broken: list[BrokenClip] = []
    for position, index in enumerate(indices):
        sample = _read(dataset, index, None if seeds is None else seeds[position], bucket)
        if isinstance(sample, BrokenClip):
            broken.append(sample)
        else:
            clips.append(sample)
            kept.append(position)
    videos = torch.stack([clip.video for clip in clips]) if clips else None
    fps = torch.tensor([clip.fps for clip in clips])
    return ClipBatch(videos, [clip.caption for clip in clips], fps, kept, broken)


def _read(
    dataset: ClipDataset, index: int, seed: int | None, bucket: Bucket | None
) -> Clip | BrokenClip:
    if isinstance(dataset, DealtDataset) and bucket is not None:
        return dataset.read(index, seed or 0, bucket)
    if seed is not None and isinstance(dataset, WindowedDataset):
        return dataset.read(index, seed)
    return dataset[index]
