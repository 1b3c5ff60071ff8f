"""Pictures of a clip at a few moments, with the frame after each: what scorers look at.

Moments are spread evenly over the time that a clip is shown, whatever the distances of its frames;
so a copy at another frame rate is looked at where the original is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from gulliver.data import Frame, upright_frames
from gulliver.errors import GulliverError
from gulliver.video.preparation._packets import read_packets

MOMENTS = 8
"""Moments of a clip that are looked at."""
SIDE = 512
"""Most pixels of a picture's longer side; larger ones are scaled down."""
LUMA = np.array((0.299, 0.587, 0.114), np.float32)
"""Weights of red, green and blue (BT.601)."""


@dataclass(frozen=True)
class Samples:
    """Pictures of a clip.

    Attributes:
        path: file of the clip.
        pictures: frames shown at the moments, uint8 [N, H, W, 3].
        neighbours: frame after each of them, or before the last; a still is its own neighbour.
        problem: reason why only a part of the clip was seen, if so.
    """

    path: Path
    pictures: np.ndarray
    neighbours: np.ndarray
    problem: str | None = None

    @cached_property
    def grey(self) -> np.ndarray:
        """Brightness of the pictures, float32 [N, H, W] in 0..255."""
        return self.pictures @ LUMA

    @cached_property
    def grey_neighbours(self) -> np.ndarray:
        """Brightness of the neighbours, float32 [N, H, W] in 0..255."""
        return self.neighbours @ LUMA


def take_samples(path: Path, moments: int = MOMENTS, side: int = SIDE) -> Samples:
    """Decodes a clip up to its last moment."""
    # Where it breaks off the last frame stands for what is missing, and `problem` says so.
    packets = read_packets(path)
    wanted = packets.moments(moments)
    taken: list[tuple[np.ndarray, np.ndarray]] = []
    problem = "; ".join(packets.problems) if packets.breaks_off else None
    before: Frame | None = None
    shown: Frame | None = None
    number, time = -1, 0.0
    try:
        for number, frame in enumerate(upright_frames(path)):
            time = packets.time_of(number, frame.decoded) if packets.has_times else float(number)
            # At a moment the last frame is shown whose time is not after it.
            while shown is not None and len(taken) < moments and time > wanted[len(taken)]:
                taken.append((_small(shown, side), _small(frame, side)))
            if len(taken) == moments:
                break
            before, shown = shown, frame
    except GulliverError as error:
        if shown is None:
            raise
        problem = f"breaks off: {error}"
    if shown is None:
        raise GulliverError("has no frames")
    if len(taken) < moments:
        problem = problem or packets.ends_early(number + 1, time) or None
        last = _small(shown, side)
        rest = (last, last if before is None else _small(before, side))
        taken += [rest] * (moments - len(taken))
    try:
        pictures, neighbours = (np.stack(every) for every in zip(*taken, strict=True))
    except ValueError:
        raise GulliverError("changes its size between frames") from None
    return Samples(path, pictures, neighbours, problem)


def _small(frame: Frame, side: int) -> np.ndarray:
    """Converts a frame to RGB, uint8 [H, W, 3], upright and no longer than `side`."""
    decoded = frame.decoded
    ratio = min(1.0, side / max(decoded.width, decoded.height))
    width, height = (max(1, round(size * ratio)) for size in (decoded.width, decoded.height))
    small = decoded.reformat(width=width, height=height, format="rgb24", interpolation="AREA")
    return frame.turn.applied(small.to_ndarray())


def averaged(pictures: np.ndarray, side: int) -> np.ndarray:
    """Averages pictures [..., H, W] over a grid of squares: float32 [..., side, side]."""
    whole = torch.from_numpy(np.ascontiguousarray(pictures, np.float32))
    flat = whole.reshape(-1, 1, *whole.shape[-2:])
    return F.adaptive_avg_pool2d(flat, side).reshape(*whole.shape[:-2], side, side).numpy()
