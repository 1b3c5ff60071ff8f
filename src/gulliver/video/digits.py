"""The moving digits: real handwriting in motion, rendered on the fly.

A clip depends only on (seed, split, index). The scans are the 1,797 digits included in scikit-learn
(UCI optical recognition of handwritten digits); train and held-out clips never share a scan.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from gulliver.data.clips import Bucket, Clip
from gulliver.errors import GulliverError, UsageError, missing_extra

DIGITS = tuple("0123456789")
DIRECTIONS = ("left", "right", "up", "down")
STEPS = ((-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0))
"""Movement of each direction in x and y; y points down."""
SIDE = 16
"""Side of a digit in pixels."""
SPEED = 1.07
"""Pixels per frame; less if the path would not fit."""
WANDER = 2.0
"""Maximum distance in pixels between a path's middle and the center of the frame."""
HELD_OUT = 297
FPS = 8.0


@cache
def _scans() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Returns scans [1797, 16, 16] in [0, 1], their digits, and the indices of each split."""
    pixels, digits = _read_scans()
    small = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
    images = F.interpolate(small, size=(SIDE, SIDE), mode="bilinear", align_corners=False)[:, 0]
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).permutation(len(images)))
    splits = {"heldout": order[:HELD_OUT].sort().values, "train": order[HELD_OUT:].sort().values}
    return images, torch.from_numpy(digits).long(), splits


def _read_scans() -> tuple[Any, Any]:
    """Reads pixels [1797, 64] from 0 to 16 and digits [1797] from scikit-learn's file."""
    # Importing scikit-learn takes longer than everything else before a rank's first step, so only
    # its location is looked up if the file is at its usual place.
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise missing_extra("the moving digits need scikit-learn", "video")
    file = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        with gzip.open(file, "rb") as lines:
            table = np.loadtxt(lines, delimiter=",")
        return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    return data.data, data.target


class MovingDigits:
    """Clips of a moving handwritten digit, with a matching sentence as caption."""

    encoded = False
    vocabulary = frozenset(("the", "digit", "moving", *DIGITS, *DIRECTIONS))

    def __init__(
        self,
        split: Literal["train", "heldout"] = "train",
        length: int = 40_000,
        seed: int = 0,
        shapes: dict[Bucket, float] | None = None,
        exclude: tuple[tuple[int, int], ...] = (),
    ) -> None:
        shapes = shapes or {Bucket(13, 32, 32): 1.0}
        for bucket in shapes:
            _check_bucket(bucket)
        images, targets, splits = _scans()
        self._images, self.length, self.buckets = images, length, tuple(shapes)
        draw = np.random.Generator(np.random.Philox(key=[seed, split == "heldout"]))
        weights = np.array(list(shapes.values()))
        self._bucket = draw.choice(len(weights), size=length, p=weights / weights.sum())
        self._scan = splits[split][torch.from_numpy(draw.integers(len(splits[split]), size=length))]
        self._digit = targets[self._scan]
        self._direction = torch.from_numpy(draw.integers(len(DIRECTIONS), size=length))
        for digit, direction in exclude:
            # An excluded pair gets the next direction, so that digits and buckets keep their
            # proportions.
            hit = (self._digit == digit) & (self._direction == direction)
            self._direction[hit] = _other_directions(digit, exclude)[: int(hit.sum())]
        offsets = draw.uniform(-WANDER, WANDER, size=(length, 2))
        self._offset = torch.from_numpy(offsets).float()

    def __len__(self) -> int:
        return self.length

    def bucket_of(self, index: int) -> Bucket:
        return self.buckets[self._bucket[index]]

    def labels(self, index: int) -> tuple[int, int]:
        """Returns the digit and the direction (an index in `DIRECTIONS`) of a clip."""
        return int(self._digit[index]), int(self._direction[index])

    def caption(self, index: int) -> str:
        digit, direction = self.labels(index)
        still = self.bucket_of(index).frames == 1
        return sentence(digit, None if still else direction)

    def __getitem__(self, index: int) -> Clip:
        return Clip(self.batch([index])[0], self.caption(index), FPS, index)

    def batch(self, indices: list[int]) -> Tensor:
        """Renders the clips of samples of one bucket, [B, 3, T, H, W] in [-1, 1]."""
        bucket = self.bucket_of(indices[0])
        assert all(self.bucket_of(index) == bucket for index in indices)
        chosen = torch.as_tensor(indices)
        return compose(
            self._images[self._scan[chosen]],
            torch.tensor(STEPS)[self._direction[chosen]],
            self._offset[chosen],
            bucket,
        )


def sentence(digit: int, direction: int | None) -> str:
    still = f"the digit {DIGITS[digit]}"
    return still if direction is None else f"{still} moving {DIRECTIONS[direction]}"


def compose(images: Tensor, steps: Tensor, offsets: Tensor, bucket: Bucket) -> Tensor:
    frames, height, width = bucket.frames, bucket.height, bucket.width
    room = torch.tensor([width - SIDE, height - SIDE], dtype=torch.float32) / 2
    along = (room * steps.abs()).sum(-1)
    half_path = (SPEED * (frames - 1) / 2 * torch.ones(len(images))).minimum(along)
    free = (room - steps.abs() * half_path[:, None]).clamp(min=0)
    middle = offsets.clamp(-free, free)
    times = torch.linspace(-1, 1, frames) if frames > 1 else torch.zeros(1)
    places = middle[:, None] + steps[:, None] * half_path[:, None, None] * times[None, :, None]
    canvas = F.pad(images, _centre_padding(height, width))
    theta = torch.zeros(len(images), frames, 2, 3)
    theta[..., 0, 0] = theta[..., 1, 1] = 1
    theta[..., 2] = -2 * places / torch.tensor([width, height])
    shape = (len(images) * frames, 1, height, width)
    grid = F.affine_grid(theta.flatten(0, 1), list(shape), align_corners=False)
    still = canvas[:, None].expand(-1, frames, -1, -1).reshape(shape)
    ink = F.grid_sample(still, grid, align_corners=False).view(
        len(images), 1, frames, height, width
    )
    return (ink * 2 - 1).expand(-1, 3, -1, -1, -1).contiguous()


def _centre_padding(height: int, width: int) -> tuple[int, int, int, int]:
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    return left, width - SIDE - left, top, height - SIDE - top


def _other_directions(digit: int, exclude: tuple[tuple[int, int], ...]) -> Tensor:
    allowed = [d for d in range(len(DIRECTIONS)) if (digit, d) not in exclude]
    if not allowed:
        raise GulliverError(f"every direction of the digit {digit} is excluded; allow at least one")
    return torch.tensor(allowed).repeat(1_000_000 // len(allowed))


def _check_bucket(bucket: Bucket) -> None:
    if min(bucket.height, bucket.width) < SIDE:
        raise UsageError(
            f"{bucket} is too small for a digit of {SIDE}x{SIDE}; choose a larger frame"
        )
    if bucket.height % 8 or bucket.width % 8:
        right = "x".join(str(round(side / 8) * 8) for side in (bucket.height, bucket.width))
        raise UsageError(f"{bucket}: height and width must be multiples of 8, such as {right}")
    if bucket.frames < 1 or (bucket.frames - 1) % 4:
        right = -(-max(0, bucket.frames - 1) // 4) * 4 + 1  # rounded up: 4 must not become a still
        raise UsageError(f"{bucket}: frames must be 4 k + 1, such as {right}")


# Judges of the moving digits: recognize the digit and measure its direction.
#
# The digit is recognized by a small network trained on real clips of the training handwriting; the
# direction is measured from the path of the ink's center. Both only see generated clips to evaluate
# them.


WINDOW = 16
"""Side of the window around the ink, in pixels."""
INK = 0.2
"""Fainter pixels are noise and do not count for the center."""
STILL = 0.15
"""Speed in pixels per frame below which nothing moves."""


@dataclass(frozen=True)
class Verdict:
    """Recognized digit [B] and direction [B] of each clip (-1: not moving)."""

    digit: Tensor
    direction: Tensor


@dataclass(frozen=True)
class Scores:
    """Fractions of clips with the right digit, the right direction, and both."""

    digit: float
    direction: float
    both: float
    clips: int


class DigitReader(nn.Module):
    """A network from windows [B, 1, 16, 16] to logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (WINDOW // 4) ** 2, 128),
            nn.ReLU(),
            nn.Linear(128, len(DIGITS)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class DigitReaders:
    """Recognizes the digits of clips and measures their movement."""

    def __init__(self, reader: DigitReader) -> None:
        self.reader = reader.eval()

    @torch.no_grad()
    def verdict(self, clips: Tensor, frames: list[int] | None = None) -> Verdict:
        """Recognizes digits and directions of clips [B, 3, T, H, W] in [-1, 1]."""
        times = torch.arange(clips.shape[2]) if frames is None else torch.tensor(frames)
        windows, centres = windows_around_ink(clips[:, :, times])
        logits = self.reader(windows).log_softmax(-1).view(len(clips), -1, len(DIGITS))
        return Verdict(logits.mean(dim=1).argmax(-1), directions_of(centres, times))

    def score(
        self,
        clips: list[Tensor],
        digits: Sequence[int],
        directions: Sequence[int | None],
        frames: list[int] | None = None,
    ) -> Scores:
        """Scores clips [3, T, H, W] against the requested labels; direction None matches any."""
        right_digit = right_direction = right_both = 0
        for clip, digit, direction in zip(clips, digits, directions, strict=True):
            seen = self.verdict(clip[None], frames)
            is_digit = int(seen.digit) == digit
            is_direction = direction is None or int(seen.direction) == direction
            right_digit += is_digit
            right_direction += is_direction
            right_both += is_digit and is_direction
        count = len(clips)
        return Scores(right_digit / count, right_direction / count, right_both / count, count)


def load_judges() -> DigitReaders:
    """Loads the reader that `python -m tools.judges` trained on clips of the training split."""
    reader = DigitReader()
    reader.load_state_dict(load_file(Path(__file__).with_name("judges.safetensors")))
    return DigitReaders(reader)


def windows_around_ink(clips: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, frames, height, width = clips.shape
    ink = ((clips.float().mean(dim=1) + 1) / 2).clamp(0, 1).view(-1, height, width)
    weight = ink * (ink > INK)
    mass = weight.sum(dim=(1, 2)).clamp(min=1e-6)
    x = (weight.sum(dim=1) * torch.arange(width)).sum(dim=1) / mass
    y = (weight.sum(dim=2) * torch.arange(height)).sum(dim=1) / mass
    theta = torch.zeros(len(ink), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = WINDOW / width, WINDOW / height
    theta[:, 0, 2], theta[:, 1, 2] = (x + 0.5) * 2 / width - 1, (y + 0.5) * 2 / height - 1
    grid = F.affine_grid(theta, [len(ink), 1, WINDOW, WINDOW], align_corners=False)
    windows = F.grid_sample(ink[:, None], grid, align_corners=False)
    return windows, torch.stack([x, y], dim=-1).view(batch, frames, 2)


def directions_of(centres: Tensor, times: Tensor) -> Tensor:
    """Returns the direction of a least-squares line through centers [B, T, 2]; -1 if not moving."""
    if len(times) < 2:
        return torch.full((len(centres),), -1)
    times = times - times.float().mean()
    speed = (centres * times[:, None]).sum(dim=1) / times.square().sum()
    horizontal = speed[:, 0].abs() >= speed[:, 1].abs()
    left, right, up, down = (DIRECTIONS.index(name) for name in ("left", "right", "up", "down"))
    across = torch.where(speed[:, 0] < 0, left, right)
    along = torch.where(speed[:, 1] < 0, up, down)
    found = torch.where(horizontal, across, along)
    return torch.where(speed.abs().amax(dim=1) < STILL, -1, found)


def ceiling(judges: DigitReaders, bucket: Bucket, clips: int = 297) -> Scores:
    real = MovingDigits("heldout", clips, seed=1, shapes={bucket: 1})
    labels = [real.labels(index) for index in range(clips)]
    videos = list(real.batch(list(range(clips))).unbind())
    return judges.score(videos, [d for d, _ in labels], [m for _, m in labels])
