"""Where the scenes of a file begin, and when its frames are shown: one pass over its frames.

Read `survey` first. Cuts are found by PySceneDetect's detectors, which are shown small pictures; it
is given frame after frame here, and numbers of frames come back: it never opens the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.data import Frame, upright_frames
from gulliver.errors import GulliverError, missing_extra
from gulliver.video.preparation._cut_settings import THRESHOLDS, CutSettings
from gulliver.video.preparation._packets import read_packets

SMALL = 96
"""Pixels of the shorter side of the pictures that detectors see."""
HELD = 0.25
"""Mean change of a pixel, in levels, below which a picture is the one before, held."""
STEADY = 0.25
"""Share of a frame's time that frames of a constant rate may be early or late."""
USUAL_FPS = 25.0
"""Frames per second of a file that says nothing about its times."""


class SourceError(GulliverError):
    """A source cannot be read; errors of writing are others."""


@dataclass(frozen=True)
class Footage:
    """Scenes and times of a file.

    Attributes:
        starts: first frames of the scenes; the first is 0.
        sizes: height and width of each scene, upright.
        times: seconds at which each frame is shown from the first on, and the end [frames + 1].
        rate: frames per second; of a variable rate the one of the most usual distance.
        constant: whether frame n is shown at n / rate.
    """

    starts: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    times: np.ndarray
    rate: Fraction
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
    """Decodes a file once, finds its scenes, and measures when its frames are shown.

    Raises:
        SourceError: it cannot be read to its end.
        GulliverError: PySceneDetect is not installed.
    """
    try:
        packets = read_packets(path)
    except GulliverError as error:
        raise SourceError(str(error)) from error
    if packets.breaks_off:
        raise SourceError("; ".join(packets.problems))
    detector = None if settings.detector == "none" else Detector(settings)
    clock, starts = _Clock(), set[int]()
    sizes: dict[int, tuple[int, int]] = {}
    size, number, shown = None, -1, None
    for number, frame in enumerate(source_frames(path)):
        clock.add(frame)
        shown = frame.decoded.time
        if (frame.height, frame.width) != size:
            # A clip has one size: joined recordings are taken apart.
            size = sizes[number] = frame.height, frame.width
            starts.add(number)
        if detector is not None:
            detector.add(frame)
    if not sizes:
        raise SourceError("has no frames")
    if early := packets.ends_early(number + 1, shown):
        raise SourceError(early)
    if detector is not None:
        starts.update(detector.cuts())
    ordered = sorted(starts)
    changes = np.array(sorted(sizes))
    held = [sizes[int(changes[np.searchsorted(changes, n, "right") - 1])] for n in ordered]
    return Footage(tuple(ordered), tuple(held), *clock.read())


def source_frames(path: Path) -> Iterator[Frame]:
    """Yields the upright frames of a file.

    Raises:
        SourceError: it cannot be read; it says after how many frames.
    """
    number = 0
    try:
        for frame in upright_frames(path):
            yield frame
            number += 1
    except GulliverError as error:
        after = f" (after {number} frames)" if number else ""
        raise SourceError(f"{error}{after}") from error


class Detector:
    """Finds cuts among pictures that are shown to it one after another.

    [Note: what detectors do not see]
    The adaptive detector compares a frame with `window` frames on both sides of it, so nothing that
    is nearer to an end of the file would be a cut, and its clip would end in frames of another
    scene. It is shown the first and the last picture `window` times more. And where a file holds
    each picture for several frames, as 12 drawings per second in a film of 24, the changes around a
    frame are none at all, and every movement would stand out: pictures that are held are not shown.
    """

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


class _Clock:
    """Times of frames, as the file states them; where it does not, they are evenly spaced."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._last = self._rate = 0.0

    def add(self, frame: Frame) -> None:
        """Notes when the next frame is shown."""
        decoded = frame.decoded
        self._rate = frame.rate or self._rate
        usual = 1 / (self._rate or USUAL_FPS)
        known = decoded.pts is not None and decoded.time_base
        time = float(decoded.pts * decoded.time_base) if known else -np.inf
        if self._times and time <= self._times[-1]:
            time = self._times[-1] + usual
        self._times.append(time if np.isfinite(time) else 0.0)
        stated = float((decoded.duration or 0) * (decoded.time_base or 0))
        self._last = stated if stated > 0 else usual

    def read(self) -> tuple[np.ndarray, Fraction, bool]:
        """Returns the times from the first frame on with the end, the rate, and if it is kept."""
        times = np.array([*self._times, self._times[-1] + self._last]) - self._times[0]
        for rate in self._candidates(times[:-1]):
            if _is_steady(times[:-1], rate):
                return np.arange(len(times)) / float(rate), rate, True
        return times, _usual_rate(times), False

    def _candidates(self, times: np.ndarray) -> Iterable[Fraction]:
        if self._rate:
            yield _as_fraction(self._rate)
        if len(times) > 1:
            yield _as_fraction((len(times) - 1) / times[-1])
        else:
            yield _as_fraction(USUAL_FPS)


def _is_steady(times: np.ndarray, rate: Fraction) -> bool:
    late = times * float(rate) - np.arange(len(times))
    return bool(np.abs(late).max() <= STEADY)


def _usual_rate(times: np.ndarray) -> Fraction:
    """Returns the rate of the most usual distance of frames, a whole one if it is nearly that."""
    steps, counts = np.unique(np.diff(times).round(3), return_counts=True)
    rate = 1 / max(float(steps[counts.argmax()]), 1e-3)
    whole = max(1, round(rate))
    return Fraction(whole) if abs(rate - whole) < 0.02 * whole else _as_fraction(rate)


def _as_fraction(rate: float) -> Fraction:
    return Fraction(rate).limit_denominator(1001)
