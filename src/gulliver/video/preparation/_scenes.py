"""Where the scenes of a file begin, and when its frames are shown: one pass over its frames.

Read `survey` first. Cuts are found by PySceneDetect's detectors, which are shown small pictures; it
is given frame after frame here, and numbers of frames come back: it never opens the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.data import Frame, upright_frames
from gulliver.errors import GulliverError, missing_extra
from gulliver.video.preparation._cut_settings import THRESHOLDS, CutSettings
from gulliver.video.preparation._packets import (
    STEADY,
    USUAL_FPS,
    Packets,
    as_fraction,
    read_packets,
    steady_rate,
)

SMALL = 96
"""Pixels of the shorter side of the pictures that detectors see."""
HELD = 0.25
"""Mean change of a pixel, in levels, below which a picture is the one before, held."""
EARLY = 0.49
"""Share of a frame's time that a frame may be shown too early: to the nearest, but never a tie."""
MOST_FPS = 120.0
"""Most frames per second of the clips of a file of variable rate."""


class SourceError(GulliverError):
    """A source cannot be read; errors of writing are others."""


@dataclass(frozen=True)
class Footage:
    """Scenes and times of a file."""

    # First frames of the scenes; the first is 0.
    starts: tuple[int, ...]
    # Height and width of each scene, upright.
    sizes: tuple[tuple[int, int], ...]
    # Seconds at which each frame is shown from the first on, and the end [frames + 1].
    times: np.ndarray
    # Frames per second; of a variable rate the one of the shortest distance.
    rate: Fraction
    # Whether frame n is shown at n / rate.
    constant: bool

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.times) - 1

    @property
    def scenes(self) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """First frame, end and size of each scene."""
        return zip(self.starts, (*self.starts[1:], self.frames), self.sizes, strict=True)


def survey(path: Path, settings: CutSettings) -> Footage:
    """Decodes a file once, finds its scenes, and measures when its frames are shown."""
    try:
        packets = read_packets(path)
    except GulliverError as error:
        raise SourceError(str(error)) from error
    if packets.breaks_off:
        raise SourceError("; ".join(packets.problems))
    detector = None if settings.detector == "none" else Detector(settings)
    times, starts = list[float](), set[int]()
    sizes: dict[int, tuple[int, int]] = {}
    size, stays = None, 0.0
    for number, frame in enumerate(source_frames(path)):
        times.append(packets.time_of(number, frame.decoded))
        stays = float((frame.decoded.duration or 0) * (frame.decoded.time_base or 0))
        if (frame.height, frame.width) != size:
            # A clip has one size: joined recordings are taken apart.
            size = sizes[number] = frame.height, frame.width
            starts.add(number)
        if detector is not None:
            detector.add(frame)
    if not sizes:
        raise SourceError("has no frames")
    if early := packets.ends_early(len(times), times[-1]):
        raise SourceError(early)
    if detector is not None:
        starts.update(detector.cuts())
    ordered = sorted(starts)
    changes = np.array(sorted(sizes))
    held = [sizes[int(changes[np.searchsorted(changes, n, "right") - 1])] for n in ordered]
    return Footage(tuple(ordered), tuple(held), *_measured(times, stays, packets))


def source_frames(path: Path) -> Iterator[Frame]:
    """Yields the upright frames of a file."""
    number = 0
    try:
        for frame in upright_frames(path):
            yield frame
            number += 1
    except GulliverError as error:
        after = f" (after {number} frames)" if number else ""
        raise SourceError(f"{error}{after}") from error


class Detector:
    """Finds cuts among pictures that are shown to it one after another."""

    # [Note: what detectors do not see] The adaptive detector compares a frame with `window` frames
    # on both sides of it, so nothing that is nearer to an end of the file would be a cut, and its
    # clip would end in frames of another scene. It is shown the first and the last picture `window`
    # times more. And where a file holds each picture for several frames, as 12 drawings per second
    # in a film of 24, the changes around a frame are none at all, and every movement would stand
    # out: pictures that are held are not shown.

    def __init__(self, settings: CutSettings) -> None:
        self._inner = _made(settings)
        self._more = settings.window if settings.detector == "adaptive" else 0
        self._shown: list[int] = []
        self._found: list[int] = []
        self._frames = 0
        self._last: np.ndarray | None = None

    def add(self, frame: Frame) -> None:
        """Shows the next frame."""
        picture = _small(frame)
        if self._last is None:
            for _ in range(self._more):
                self._show(picture, 0)
        if self._last is None or _change(picture, self._last) >= HELD:
            self._show(picture, self._frames)
            self._last = picture
        self._frames += 1

    def cuts(self) -> list[int]:
        """Ends, and returns the first frame of each scene but the first."""
        if self._last is not None:
            for _ in range(self._more):
                self._show(self._last, self._frames)
        return [number for number in self._found if 0 < number < self._frames]

    def _show(self, picture: np.ndarray, number: int) -> None:
        from scenedetect import FrameTimecode

        code = FrameTimecode(len(self._shown), USUAL_FPS)
        self._shown.append(number)
        for found in self._inner.process_frame(code, picture):
            self._found.append(self._shown[found.frame_num])


def _made(settings: CutSettings) -> Any:
    """Makes the detector of PySceneDetect; scenes of any length count, short ones are told later.

    Raises:
        GulliverError: it is not installed.
    """
    try:
        from scenedetect import AdaptiveDetector, ContentDetector
    except ImportError:
        raise missing_extra("finding scenes needs PySceneDetect", "data") from None
    threshold = settings.threshold or THRESHOLDS[settings.detector]
    if settings.detector == "content":
        return ContentDetector(threshold, min_scene_len=0)
    return AdaptiveDetector(
        threshold,
        min_scene_len=0,
        window_width=settings.window,
        min_content_val=settings.least_change,
    )


def _small(frame: Frame) -> np.ndarray:
    """Scales a frame down, as it is stored: uint8 [h, w, 3], blue first; all frames alike."""
    stored = frame.decoded
    ratio = min(1.0, SMALL / min(stored.width, stored.height))
    size = max(2, round(stored.width * ratio)), max(2, round(stored.height * ratio))
    return stored.reformat(*size, format="bgr24", interpolation="AREA").to_ndarray()


def _change(one: np.ndarray, other: np.ndarray) -> float:
    if one.shape != other.shape:
        return np.inf
    return float(np.abs(one.astype(np.int16) - other).mean())


def _measured(
    times: list[float], stated: float, packets: Packets
) -> tuple[np.ndarray, Fraction, bool]:
    """Returns times from the first frame on with the end, the rate, and whether it is constant."""
    # Broken files may go back: such a frame is shown for no time.
    shown = np.maximum.accumulate(np.array(times) - times[0])
    if rate := steady_rate(shown, packets.rate):
        return np.arange(len(shown) + 1) / float(rate), rate, True
    steps = np.diff(shown)
    shortest = float(steps[steps > 0].min()) if (steps > 0).any() else 1 / USUAL_FPS
    ends = np.append(shown, shown[-1] + max(stated, shortest))
    return ends, _fastest_rate(ends, shortest), False


def _fastest_rate(times: np.ndarray, shortest: float) -> Fraction:
    """Returns the rate of the shortest distance of frames, a whole one if it is nearly that."""
    # Distances that are rounded count as their mean, if each frame is shown at that rate still.
    steps = np.diff(times)
    near = 1 / float(steps[(steps > 0) & (steps < (1 + STEADY) * shortest)].mean())
    for rate in (round(near), near):
        if 0 < rate <= MOST_FPS and abs(rate - near) < 0.02 * near:
            found = as_fraction(rate)
            if len(np.unique(shown_at(times, found, found))) == len(steps):
                return found
    return as_fraction(min(MOST_FPS, 1 / shortest))


def shown_at(times: np.ndarray, rate: Fraction, fastest: Fraction) -> np.ndarray:
    """Returns the frame that is shown at each moment of a constant rate."""
    # It is the newest that has begun, where one that begins within half a frame's time counts, as
    # times are rounded in files.
    count = max(1, round(float(times[-1] * rate)))
    moments = np.arange(count) / float(rate)
    early = EARLY / float(max(rate, fastest))
    return np.searchsorted(times[:-1], moments + early, "right") - 1
