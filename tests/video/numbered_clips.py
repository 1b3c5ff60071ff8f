"""Small clips whose frames carry their number in their pixels, in every container and coding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from tests.video.messy_clips import Coding, write_film

SIDE, GRID = 64, 4
"""Pixels of a side, and blocks of a side: each block is a bit of the frame's number."""
X264 = {"preset": "veryfast", "threads": "1", "crf": "20"}
REORDERED = {**X264, "bf": "3", "b-pyramid": "normal"}


@dataclass(frozen=True)
class Numbered:
    """A clip of which frame n shows the number n from `times[n]` on, in seconds; with the end."""

    path: Path
    frames: int
    rate: Fraction
    times: tuple[float, ...]
    variable: bool

    def shown_at(self, moment: float) -> int:
        """By brute force, the number of the frame that is shown at a moment."""
        return max(n for n, time in enumerate(self.times[:-1]) if time <= moment or n == 0)


def numbered(count: int) -> np.ndarray:
    """Draws pictures with their numbers as blocks of light and dark: uint8 [T, H, W, 3]."""
    bits = (np.arange(count)[:, None] >> np.arange(GRID**2)) & 1
    levels = (40 + 170 * bits).astype(np.uint8).reshape(count, GRID, GRID)
    scale = SIDE // GRID
    return levels.repeat(scale, 1).repeat(scale, 2)[..., None].repeat(3, -1)


def numbers_of(pictures: np.ndarray) -> list[int]:
    """Reads the numbers of pictures [T, H, W, 3] with levels 0..255, at any scale."""
    height, width = pictures.shape[1:3]
    ys, xs = (((np.arange(GRID) + 0.5) * size / GRID).astype(int) for size in (height, width))
    bits = pictures[:, ys][:, :, xs].mean(-1).reshape(len(pictures), -1) > 125
    return [int(number) for number in bits @ (1 << np.arange(GRID**2))]


CODINGS = {
    f"{name}-{'b' if reordered else 'i'}": coding
    for name, (plain, reorders) in {
        suffix: (
            Coding(f".{suffix}", "libx264", options=X264 | {"bf": "0"}),
            Coding(f".{suffix}", "libx264", options=REORDERED),
        )
        for suffix in ("mp4", "mkv", "mov")
    }.items()
    for reordered, coding in ((False, plain), (True, reorders))
}
CODINGS |= {
    "avi-i": Coding(".avi", "mpeg4", options={"qscale": "3", "b": "2M", "bf": "0"}),
    "avi-b": Coding(".avi", "mpeg4", options={"qscale": "3", "b": "2M", "bf": "2"}),
    "avi264-i": Coding(".avi", "libx264", options=X264 | {"bf": "0"}),
    "avi264-b": Coding(".avi", "libx264", options=REORDERED),
    "webm-i": Coding(
        ".webm", "libvpx-vp9", options={"deadline": "realtime", "cpu-used": "8", "b": "1M"}
    ),
    "webm-b": Coding(
        ".webm",
        "libvpx-vp9",
        options={
            "deadline": "good",
            "cpu-used": "8",
            "b": "1M",
            "auto-alt-ref": "1",
            "lag-in-frames": "16",
        },
    ),
}
"""Codings by container, with frames that are stored out of order (b) and without (i)."""


def clip(folder: Path, name: str, variable: bool, seed: int) -> Numbered:
    """Writes a clip of 40 to 60 frames.

    Args:
        folder: folder of the file.
        name: name in `CODINGS`.
        variable: whether frames stay for 1, 2 or 4 times 1 / rate.
        seed: seed of its length, rate and times.
    """
    draw = np.random.default_rng([seed, len(name), variable])
    count = int(draw.integers(40, 61))
    rate = Fraction(int(draw.choice([20, 25])))
    steps = np.ones(count, int)
    if variable:
        steps = draw.choice([1, 2, 2, 2, 4], count)
        steps[:2] = 1, 2
    starts = np.concatenate([[0], np.cumsum(steps)])
    path = folder / f"{name}-{'variable' if variable else 'constant'}-{seed}{CODINGS[name].suffix}"
    milliseconds = [int(start * 1000 / rate) for start in starts]
    write_film(
        path,
        numbered(count),
        rate,
        CODINGS[name],
        times=milliseconds[:-1] if variable else None,
    )
    times = np.array(milliseconds) / 1000
    if variable and name.startswith("avi") and name.endswith("-b"):
        # AVI stores times of decoding only: when the last frames are shown is lost.
        held = 2 if CODINGS[name].codec == "libx264" else 1
        step = float(np.median(np.diff(times[: -1 - held])))
        times[-1 - held :] = times[-2 - held] + step * np.arange(1, held + 2)
    return Numbered(path, count, rate, tuple(times.tolist()), variable)


def clips(folder: Path, seed: int = 0) -> Iterator[Numbered]:
    """Writes a clip of each coding, of a constant and of a variable rate."""
    for name in CODINGS:
        for variable in (False, True):
            yield clip(folder, name, variable, seed)
