"""Decodes video and image files with PyAV, and rotates frames upright.

Start reading at `upright_frames`. Phones store the sensor's image with its orientation, in a
video's display matrix or an image's EXIF data. Decoders return the stored image.
"""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from gulliver.errors import GulliverError, missing_extra

STILL_FPS = 120.0  # frame rate that marks a still in Open-Sora's models
ORIENTATION = 0x0112  # EXIF tag of an image's orientation


class Turn(NamedTuple):
    """A rotation or flip: stored pixel (x, y) is shown at (a x + c y, b x + d y), up to a shift."""

    a: int
    b: int
    c: int
    d: int

    @property
    def swaps(self) -> bool:
        return abs(self.b) + abs(self.c) > abs(self.a) + abs(self.d)

    @property
    def is_upright(self) -> bool:
        return not self.swaps and self.a >= 0 and self.d >= 0

    def applied(self, picture: np.ndarray) -> np.ndarray:
        """Rotates or flips a stored image [H, W, 3] for display; returns a view."""
        across, down = (self.c, self.b) if self.swaps else (self.a, self.d)
        if self.swaps:
            picture = picture.swapaxes(0, 1)
        return picture[:: -1 if down < 0 else 1, :: -1 if across < 0 else 1]


UPRIGHT = Turn(1, 0, 0, 1)
EXIF_TURNS = {
    2: Turn(-1, 0, 0, 1),
    3: Turn(-1, 0, 0, -1),
    4: Turn(1, 0, 0, -1),
    5: Turn(0, 1, 1, 0),
    6: Turn(0, 1, -1, 0),
    7: Turn(0, -1, -1, 0),
    8: Turn(0, -1, 1, 0),
}
"""Rotations and flips by EXIF orientation; 1 is upright."""


@dataclass(frozen=True)
class Frame:
    """A decoded frame and its file's frame rate (1/s; 0 if unknown); converted to RGB on demand."""

    decoded: Any
    turn: Turn
    rate: float

    @property
    def height(self) -> int:
        return self.decoded.width if self.turn.swaps else self.decoded.height

    @property
    def width(self) -> int:
        return self.decoded.height if self.turn.swaps else self.decoded.width

    def pixels(self) -> np.ndarray:
        """Converts to upright RGB, uint8 [H, W, 3]."""
        return self.turn.applied(self.decoded.to_ndarray(format="rgb24"))


@contextmanager
def open_video(path: Path) -> Iterator[tuple[Any, Any]]:
    """Opens a file; yields its container and first video stream."""
    av = _av()
    if not path.is_file():
        raise GulliverError("does not exist")
    if path.stat().st_size == 0:
        raise GulliverError("is empty")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise GulliverError("contains no video")
            yield container, container.streams.video[0]
    except GulliverError:
        raise
    except (av.FFmpegError, OSError, ValueError, IndexError) as error:
        # Without the number and the path, which FFmpeg adds to its error messages.
        reason = getattr(error, "strerror", None) or error
        raise GulliverError(f"cannot be decoded: {reason}") from error


def upright_frames(path: Path) -> Iterator[Frame]:
    with open_video(path) as (container, stream):
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        turn = None
        for frame in container.decode(stream):
            if turn is None:
                turn = _turn_of(path, container.format.name, frame)
            yield Frame(frame, turn, rate)


def rate_shown(stated: float, frames: int, span: float) -> float:
    """Frames per second: the stated rate, or the measured rate if they disagree."""
    shown = (frames - 1) / span if span > 0 else stated
    return stated if stated and abs(shown / stated - 1) < 0.01 else shown


def stacked(frames: list[Frame]) -> np.ndarray:
    try:
        return np.stack([frame.pixels() for frame in frames])
    except ValueError as error:
        raise GulliverError(f"cannot be decoded: {error}") from error


def _turn_of(path: Path, format_name: str, frame: Any) -> Turn:
    if format_name == "image2" or format_name.endswith("_pipe"):
        # Not from the frame: which libraries convert EXIF to a matrix differs between versions.
        return _exif_turn(path)
    try:
        found = [item for item in frame.side_data if item.type.name == "DISPLAYMATRIX"]
    except ValueError:
        # PyAV has no name for this side data, but still reports the angle.
        quarters = round(frame.rotation / 90) % 4
        return (UPRIGHT, EXIF_TURNS[8], EXIF_TURNS[3], EXIF_TURNS[6])[quarters]
    if not found:
        return UPRIGHT
    a, b, _, c, d, *_ = struct.unpack("=9i", bytes(found[0])[:36])
    return Turn(a, b, c, d)


def _exif_turn(path: Path) -> Turn:
    try:
        from PIL import Image
    except ImportError:
        raise missing_extra("reading pictures needs Pillow", "video") from None
    try:
        with warnings.catch_warnings(), Image.open(path) as picture:
            warnings.simplefilter("ignore")
            return EXIF_TURNS.get(picture.getexif().get(ORIENTATION, 1), UPRIGHT)
    except Image.DecompressionBombError as error:
        raise GulliverError(f"cannot be decoded: {error}") from error
    except (OSError, ValueError, SyntaxError, struct.error):
        # The decoder reports unreadable files; here, the file has no orientation.
        return UPRIGHT


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise missing_extra("reading clips needs PyAV", "video") from None
    return av


# The types of `gulliver.data`: buckets, clips, datasets, and batches of clips of one bucket.


@dataclass(frozen=True, order=True)
class Bucket:
    """The shape of a batch's clips: frames, and height and width in pixels."""

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
    """A clip [3, T, H, W] in [-1, 1], its caption, frame rate (1/s) and index in the dataset."""

    video: Tensor
    caption: str
    fps: float
    index: int


@dataclass(frozen=True)
class BrokenClip:
    """A sample that could not be read, with the reason."""

    index: int
    reason: str


@runtime_checkable
class ClipDataset(Protocol):
    """Interface of a dataset of clips."""

    def __len__(self) -> int: ...

    def bucket_of(self, index: int) -> Bucket | None: ...

    def __getitem__(self, index: int) -> Clip | BrokenClip: ...


class ClipBatch(NamedTuple):
    """Clips of one bucket: videos [B, 3, T, H, W], or None if no sample could be read."""

    # `kept` has the positions, among the requested indices, of samples that could be read.

    videos: Tensor | None
    captions: list[str]
    fps: Tensor
    kept: list[int]
    broken: list[BrokenClip]


@runtime_checkable
class WindowedDataset(ClipDataset, Protocol):
    """A dataset whose clips are longer than its samples; a seed selects the frames."""

    def read(self, index: int, seed: int) -> Clip | BrokenClip: ...


@runtime_checkable
class DealtDataset(WindowedDataset, Protocol):
    """A dataset that reassigns samples to buckets in each epoch."""

    def assign(self, epoch: int) -> Sequence[Bucket | None]: ...

    def read(self, index: int, seed: int, bucket: Bucket | None = None) -> Clip | BrokenClip: ...


def collate(
    dataset: ClipDataset,
    indices: list[int],
    seeds: Sequence[int] | None = None,
    bucket: Bucket | None = None,
) -> ClipBatch:
    """Reads samples of one bucket as a batch; corrupt samples are listed instead."""
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
