"""Judges of the moving digits: they read the digit and measure which way it moves.

The digit is read by a small network that was trained on real clips of the training handwriting; the
movement is measured, not learnt: where the ink's centre goes. Both see generated clips only to
judge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.data import Bucket
from gulliver.jobs import derive
from gulliver.video._digits import DIGITS, DIRECTIONS, STEPS, WANDER, MovingDigits, compose

WINDOW = 16
"""Side of the window that is cut out around the ink, in pixels."""
INK = 0.2
"""Fainter pixels are noise and do not count for the centre."""
STILL = 0.15
"""Pixels per frame below which nothing moves."""
READER_STEPS, READER_BATCH = 500, 64
_SEEN = Bucket(5, 32, 32)


@dataclass(frozen=True)
class Verdict:
    """Verdict on each clip: digit [B], direction [B] (-1: it does not move)."""

    digit: Tensor
    direction: Tensor


@dataclass(frozen=True)
class Scores:
    """Shares of clips, of 1, with the right digit, the right direction, and both."""

    digit: float
    direction: float
    both: float
    clips: int


class DigitReader(nn.Module):
    """A network from windows [B, 1, 16, 16] to logits [B, classes]."""

    def __init__(self, classes: int = len(DIGITS)) -> None:
        super().__init__()
        self.classes = classes
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
            nn.Linear(128, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Judges:
    """Reads digits and measures movement."""

    def __init__(self, reader: DigitReader) -> None:
        self.reader = reader.eval()

    @torch.no_grad()
    def verdict(self, clips: Tensor, frames: list[int] | None = None) -> Verdict:
        """Judges clips [B, 3, T, H, W] in [-1, 1] of any size, or only those of their frames."""
        times = torch.arange(clips.shape[2]) if frames is None else torch.tensor(frames)
        windows, centres = windows_around_ink(clips[:, :, times])
        logits = self.reader(windows).log_softmax(-1).view(len(clips), -1, self.reader.classes)
        return Verdict(logits.mean(dim=1).argmax(-1), directions_of(centres, times))

    def score(
        self,
        clips: list[Tensor],
        digits: Sequence[int],
        directions: Sequence[int | None],
        frames: list[int] | None = None,
    ) -> Scores:
        """Compares the verdict on clips [3, T, H, W] with what was asked; None: any movement."""
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


def train_judges(seed: int = 0, others: Sequence[Tensor] = ()) -> Judges:
    """Trains the reader on real clips of the training handwriting (some seconds)."""
    torch.manual_seed(derive(seed, 20))
    dataset = MovingDigits(
        "train", READER_STEPS * READER_BATCH, seed=derive(seed, 21), shapes={_SEEN: 1}
    )
    reader = DigitReader(len(DIGITS) + len(others))
    optimizer = torch.optim.Adam(reader.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, READER_STEPS)
    for step in range(READER_STEPS):
        indices = list(range(step * READER_BATCH, (step + 1) * READER_BATCH))
        read = [dataset.labels(i)[0] for i in indices]
        clips = [dataset.batch(indices)]
        for number, ink in enumerate(others, len(DIGITS)):
            clips.append(_moving(ink, READER_BATCH // len(DIGITS)))
            read += [number] * len(clips[-1])
        windows, _ = windows_around_ink(torch.cat(clips)[:, :, [0, -1]])
        # Faint noise and small shifts, so that blurred clips are read as a person would read them.
        windows = windows + 0.1 * torch.randn_like(windows)
        windows = windows.roll(tuple(torch.randint(-1, 2, (2,)).tolist()), (-2, -1))
        targets = torch.tensor(read).repeat_interleave(2)
        loss = F.cross_entropy(reader(windows), targets, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return Judges(reader)


def _moving(ink: Tensor, count: int) -> Tensor:
    """Moves images drawn from those of a class, as the digits move."""
    ways = torch.tensor(STEPS)[torch.randint(len(STEPS), (count,))]
    offsets = (2 * torch.rand(count, 2) - 1) * WANDER
    return compose(ink[torch.randint(len(ink), (count,))], ways, offsets, _SEEN)


def windows_around_ink(clips: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts a window around the ink of every frame."""
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
    """Direction of the line through centres [B, T, 2] at times [T] by least squares; -1: none."""
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


def ceiling(judges: Judges, bucket: Bucket, clips: int = 297) -> Scores:
    """Scores real clips of held-out handwriting: the most that a model can reach."""
    real = MovingDigits("heldout", clips, seed=1, shapes={bucket: 1})
    labels = [real.labels(index) for index in range(clips)]
    videos = list(real.batch(list(range(clips))).unbind())
    return judges.score(videos, [d for d, _ in labels], [m for _, m in labels])
