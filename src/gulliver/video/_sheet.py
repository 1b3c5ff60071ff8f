"""Pictures for people: a contact sheet of captioned clips, and the loss curve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from gulliver.io import atomic_file
from gulliver.video._media import to_frames, write_gif

BACKGROUND, INK, FAINT = (16, 18, 24), (236, 238, 242), (140, 146, 158)
GAP, LABEL, HEADING = 12, 18, 30
REST = 3
"""Frames of rest at the end of a sheet, so that the eye sees where a clip begins."""


@dataclass(frozen=True)
class SheetRow:
    """One row of the sheet: clips [3, T, H, W] of equal shape and the sentence under each."""

    title: str
    clips: list[Tensor]
    captions: list[str]


def contact_sheet(path: Path, rows: list[SheetRow], fps: float, scale: int = 4) -> Path:
    """Draws rows of clips with their captions as one animated GIF."""
    # Shorter clips hold their last frame until the longest ends. A still of the middle frame is
    # left beside it, with the suffix .png.
    frames = _drawn(rows, scale)
    with atomic_file(path) as partial:
        write_gif(partial, frames, fps)
    _write_still(path.with_suffix(".png"), frames[(len(frames) - REST) // 2])
    return path


def still_sheet(path: Path, rows: list[SheetRow], scale: int = 4) -> tuple[Path, np.ndarray]:
    """Draws rows of pictures with their captions as one PNG; returns its pixels [H, W, 3], too."""
    pixels = _drawn(rows, scale)[0]
    _write_still(path, pixels)
    return path, pixels


def _write_still(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    with atomic_file(path) as partial:
        Image.fromarray(pixels).save(partial, format="PNG")


def _drawn(rows: list[SheetRow], scale: int) -> np.ndarray:
    """Draws the frames of the sheet [T, H, W, 3], the last of which rest."""
    length = max(clip.shape[1] for row in rows for clip in row.clips)
    width = max(_row_width(row, scale) for row in rows)
    height = sum(HEADING + row.clips[0].shape[2] * scale + LABEL + GAP for row in rows) + GAP
    canvas = _lettering(rows, width, height, scale)
    frames = np.repeat(np.asarray(canvas)[None], length + REST, axis=0)
    top = GAP
    for row in rows:
        left = GAP
        for clip in row.clips:
            pixels = to_frames(clip, scale)
            hold = np.minimum(np.arange(length + REST), len(pixels) - 1)
            h, w = pixels.shape[1:3]
            frames[:, top + HEADING : top + HEADING + h, left : left + w] = pixels[hold]
            left += w + GAP
        top += HEADING + row.clips[0].shape[2] * scale + LABEL + GAP
    return frames


def _row_width(row: SheetRow, scale: int) -> int:
    return GAP + len(row.clips) * (row.clips[0].shape[3] * scale + GAP)


def _lettering(rows: list[SheetRow], width: int, height: int, scale: int):
    """Draws the sheet without its clips: headings, and under each clip its sentence."""
    from PIL import Image, ImageDraw, ImageFont

    canvas = Image.new("RGB", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    heading, label = ImageFont.load_default(15), ImageFont.load_default(12)
    top = GAP
    for row in rows:
        draw.text((GAP, top + 4), row.title, fill=FAINT, font=heading)
        h, w = (size * scale for size in row.clips[0].shape[2:])
        for column, caption in enumerate(row.captions):
            middle = GAP + column * (w + GAP) + w // 2
            draw.text((middle, top + HEADING + h + 3), caption, fill=INK, font=label, anchor="ma")
        top += HEADING + h + LABEL + GAP
    return canvas


def loss_curve(path: Path, steps: list[int], losses: list[float], norms: list[float]) -> Path:
    """Draws the training loss, smoothed and raw, and the gradient norm below it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot(steps, losses, color="#9bb7d4", linewidth=0.8, label="each step")
    top.plot(steps, _smooth(losses), color="#1f4e8c", linewidth=1.8, label="average")
    top.set_ylabel("rectified-flow loss")
    top.legend(frameon=False)
    bottom.plot(steps, norms, color="#b0553a", linewidth=0.8)
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("step")
    with atomic_file(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    plt.close(figure)
    return path


def _smooth(values: list[float], decay: float = 0.95) -> list[float]:
    """Computes an exponential average without the bias of its start."""
    smooth, average, weight = [], 0.0, 0.0
    for value in values:
        average, weight = decay * average + (1 - decay) * value, decay * weight + 1 - decay
        smooth.append(average / weight)
    return smooth
