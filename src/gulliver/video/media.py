"""Reads clips, and writes them atomically as mp4, gif and png files.

Videos are float tensors [3, T, H, W] in [-1, 1]. Files are written under a temporary name next to
the final path and renamed when complete: a link at that path is replaced, not followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from gulliver.data.clips import stacked, upright_frames
from gulliver.errors import GulliverError, nearest
from gulliver.io.files import atomic_file
from gulliver.options import Range

SCALE = Range(1, 64)
FPS = Range(0, 1000, open_below=True)
GIF_FPS, GIF_S = 50, 655
"""Maximum frames per second of a GIF, and seconds of a frame (so of a GIF without changes)."""
MP4_FPS = 0.001
BEYOND = 1.5
"""Tolerance for pixels outside [-1, 1]."""

WRITERS: dict[str, Callable[[Path, np.ndarray, float], None]] = {}


def to_frames(video: Tensor, scale: int = 1) -> np.ndarray:
    """Converts a clip [3, T, H, W] in [-1, 1] to uint8 frames [T, H * scale, W * scale, 3]."""
    levels = ((video.detach().float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    frames = levels.permute(1, 2, 3, 0).cpu().numpy()
    return frames.repeat(scale, axis=1).repeat(scale, axis=2)


def check_output(path: Path, frames: int | None = None, fps: float = 8) -> None:
    """Raises an error if a clip cannot be written to this path."""
    suffix = path.suffix.lower()
    if suffix not in WRITERS:
        raise GulliverError(
            f"cannot write {path.name!r}, because its suffix is unknown: "
            f"{nearest(suffix or 'none', WRITERS)}"
        )
    if suffix == ".png" and frames is not None and frames > 1:
        raise GulliverError(
            f"{path.name!r} can only store a single frame, not {frames}; use .mp4 or .gif"
        )
    if suffix == ".gif" and fps > GIF_FPS:
        raise GulliverError(f"a GIF can show at most {GIF_FPS} frames per second; use .mp4")
    if suffix == ".gif" and fps in FPS and (frames or 1) / fps > GIF_S:
        raise GulliverError(
            f"{frames or 1} frames at fps {fps:g} take {(frames or 1) / fps:.0f} s, but a GIF "
            f"holds at most {GIF_S} s; use a higher fps or .mp4"
        )
    if suffix == ".mp4" and fps < MP4_FPS:
        raise GulliverError(f"an mp4 needs at least {MP4_FPS} frames per second, not {fps:g}")
    if path.is_dir():
        raise GulliverError(f"{path} is a folder; pass a file in it")


def write_clip(path: Path, video: Tensor, fps: float, scale: int = 1) -> Path:
    """Writes a clip atomically in the format of the path's suffix."""
    check_output(path, video.shape[1], fps)
    with atomic_file(path) as partial:
        WRITERS[path.suffix.lower()](partial, to_frames(video, scale), fps)
    return path


def _write_mp4(path: Path, frames: np.ndarray, fps: float) -> None:
    import av

    # H.264 with 4:2:0 chroma requires even sizes.
    frames = np.pad(frames, ((0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)))
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "14"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def write_gif(path: Path | IO[bytes], frames: np.ndarray, fps: float) -> None:
    from PIL import Image

    images = [Image.fromarray(frame) for frame in frames]
    duration = max(20, round(1000 / fps))
    images[0].save(
        path,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=duration,
        loop=0,
        optimize=True,
    )


def _write_png(path: Path, frames: np.ndarray, fps: float) -> None:
    from PIL import Image

    Image.fromarray(frames[0]).save(path, format="PNG")


WRITERS.update({".mp4": _write_mp4, ".gif": write_gif, ".png": _write_png})


def read_frames(path: Path, most: int | None = None) -> Tensor:
    """Reads an image or a video, upright, as [3, T, H, W] in [-1, 1]."""
    if not path.is_file():
        raise GulliverError(f"{path} does not exist")
    try:
        frames = list(islice(upright_frames(path), most))
        if not frames:
            raise GulliverError("it has no frames")
        pixels = stacked(frames)
    except GulliverError as error:
        raise GulliverError(f"{path} is not a readable image or video: {error}") from error
    return torch.from_numpy(pixels).permute(3, 0, 1, 2).float() / 127.5 - 1


def check_pixels(what: str, video: Tensor) -> None:
    """Raises an error unless the input is an image or clip [3, T, H, W] in [-1, 1]."""
    # Scaling and decoding may produce values slightly outside.
    if video.ndim != 4 or video.shape[0] != 3 or not video.numel():
        raise GulliverError(f"{what} has shape {tuple(video.shape)}; expected [3, T, H, W]")
    if not video.is_floating_point():
        name = str(video.dtype).removeprefix("torch.")
        raise GulliverError(
            f"{what} has dtype {name}; expected floats in [-1, 1], such as bytes / 127.5 - 1"
        )
    low, high = (float(end) for end in video.detach().float().aminmax())
    if not math.isfinite(low + high):
        raise GulliverError(f"{what} has NaN or infinite values; expected values in [-1, 1]")
    if max(-low, high) > BEYOND:
        raise GulliverError(
            f"{what} has values from {low:g} to {high:g}; expected values in [-1, 1], such as "
            "bytes / 127.5 - 1"
        )


def fit(video: Tensor, height: int, width: int) -> Tensor:
    """Scales [3, T, H, W] to cover height x width and crops the center."""
    _, _, h, w = video.shape
    ratio = max(height / h, width / w)
    size = (max(height, round(h * ratio)), max(width, round(w * ratio)))
    if size != (h, w):
        scaled = torch.nn.functional.interpolate(
            video.transpose(0, 1), size=size, mode="bilinear", antialias=True, align_corners=False
        )
        video = scaled.transpose(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return video[:, :, top : top + height, left : left + width]


# Pictures for reports: a contact sheet of captioned clips, and the loss curve.


BACKGROUND, INK, FAINT = (16, 18, 24), (236, 238, 242), (140, 146, 158)
GAP, LABEL, HEADING = 12, 18, 30
REST = 3
"""Frames of pause at the end of a sheet, which separate its repetitions."""


@dataclass(frozen=True)
class SheetRow:
    """One row of the sheet: clips [3, T, H, W] of equal shape and their captions."""

    title: str
    clips: list[Tensor]
    captions: list[str]


def contact_sheet(path: Path, rows: list[SheetRow], fps: float, scale: int = 4) -> Path:
    # Shorter clips hold their last frame until the longest ends. A still of the middle frame is
    # saved next to it, with the suffix .png.
    frames = _drawn(rows, scale)
    with atomic_file(path) as partial:
        write_gif(partial, frames, fps)
    _write_still(path.with_suffix(".png"), frames[(len(frames) - REST) // 2])
    return path


def still_sheet(path: Path, rows: list[SheetRow], scale: int = 4) -> tuple[Path, np.ndarray]:
    """Draws rows of images with captions as one PNG; also returns its pixels [H, W, 3]."""
    pixels = _drawn(rows, scale)[0]
    _write_still(path, pixels)
    return path, pixels


def _write_still(path: Path, pixels: np.ndarray) -> None:
    from PIL import Image

    with atomic_file(path) as partial:
        Image.fromarray(pixels).save(partial, format="PNG")


def _drawn(rows: list[SheetRow], scale: int) -> np.ndarray:
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
    smooth, average, weight = [], 0.0, 0.0
    for value in values:
        average, weight = decay * average + (1 - decay) * value, decay * weight + 1 - decay
        smooth.append(average / weight)
    return smooth
