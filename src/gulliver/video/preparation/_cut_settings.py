"""How clips are cut: options that are read before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gulliver.options import POSITIVE, Options, Range

THRESHOLDS = {"adaptive": 3.0, "content": 27.0}
"""Thresholds of the detectors where none is given: those of PySceneDetect."""


@dataclass(frozen=True, kw_only=True)
class CutSettings(Options):
    """How scenes are found, and how their clips are written."""

    detector: Literal["adaptive", "content", "none"] = "adaptive"
    """Way to find scenes, of PySceneDetect: a change that stands out from those around it, a change
    that is large, or none: each file is one scene."""
    threshold: Annotated[float | None, POSITIVE] = None
    """Threshold of a cut: how many times the changes around it (adaptive; by default 3), or mean
    change of a pixel in levels of 255 (content; by default 27)."""
    least_change: Annotated[float, Range(0, 255)] = 15.0
    """Mean change of a pixel, in levels of 255, below which nothing is a cut (adaptive)."""
    window: Annotated[int, Range(1, 100)] = 2
    """Frames before and after one that it is compared with (adaptive)."""
    min_seconds: Annotated[float, Range(0, 1e6)] = 0.5
    """Least length of a clip; shorter scenes are left out, and listed."""
    max_seconds: Annotated[float, Range(0, 1e6, open_below=True)] = 20.0
    """Most length of a clip; longer scenes are divided evenly."""
    fps: Annotated[float | None, Range(0.1, 1000)] = None
    """Frames per second of the clips, by the times of the frames; by default those of the file, and
    of a file of variable rate the one at which each frame is shown, up to 120."""
    shorter_side: Annotated[int | None, Range(2, 2**14)] = None
    """Pixels of the shorter side, for pictures that are larger."""
    codec: Literal["h264", "ffv1"] = "h264"
    """Codec of the clips: H.264 in mp4 files, or FFV1 in mkv files, which loses nothing."""
    crf: Annotated[int, Range(0, 51)] = 18
    """Quality of H.264: 0 loses next to nothing, 51 nearly all."""
    preset: Literal["ultrafast", "veryfast", "faster", "fast", "medium", "slow"] = "veryfast"
    """Effort of H.264: what is slower makes smaller files."""
