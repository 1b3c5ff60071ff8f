"""A picture of held-out clips: frames as they are, and below them as they were decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from gulliver.data import collate
from gulliver.io import atomic_file
from gulliver.models import VideoAutoencoder
from gulliver.video._media import to_frames

CLIPS = 4
FRAMES = 2
"""Frames of each clip: its first and its last."""
LEAST_SIDE = 96
"""Smaller frames are shown larger, pixel by pixel."""
GAP = 4


@torch.no_grad()
def reconstruction_picture(
    path: Path | None, model: VideoAutoencoder, dataset: Any, device: torch.device
) -> None:
    """Draws frames of up to four clips above their reconstructions, as a PNG.

    Every rank that shares the autoencoder's networks calls it.

    Args:
        path: file to write; None on ranks that only take part.
        model: autoencoder.
        dataset: held-out clips; those of the largest bucket are shown.
        device: device to compute on.
    """
    bucket = max(
        {dataset.bucket_of(index) for index in range(len(dataset))},
        key=lambda b: (b.frames > 1, b.height * b.width),
    )
    members = [i for i in range(len(dataset)) if dataset.bucket_of(i) == bucket]
    count = min(CLIPS, len(members))
    chosen = [members[number * len(members) // count] for number in range(count)]
    videos = collate(dataset, chosen).videos
    if videos is None:
        return
    videos = videos.to(device, next(model.parameters()).dtype)
    decoded = model.decode(model.encode(videos))
    if path is None:
        return
    scale = -(-LEAST_SIDE // bucket.height)
    rows = [_row(clips, scale) for clips in (videos, decoded)]
    gap = np.full((GAP, *rows[0].shape[1:]), 255, dtype=np.uint8)
    _write(path, np.concatenate([rows[0], gap, rows[1]]))


def _row(clips: torch.Tensor, scale: int) -> np.ndarray:
    """Lays frames of all clips side by side, [H, W, 3]."""
    shown: list[np.ndarray] = []
    for clip in clips:
        frames = to_frames(clip, scale)
        for number in np.linspace(0, len(frames) - 1, FRAMES if len(frames) > 1 else 1):
            if shown:
                shown.append(np.full((frames.shape[1], GAP, 3), 255, dtype=np.uint8))
            shown.append(frames[round(number)])
    return np.concatenate(shown, axis=1)


def _write(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    with atomic_file(path) as partial:
        Image.fromarray(pixels).save(partial, format="PNG", optimize=True)
