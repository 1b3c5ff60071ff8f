"""Detects the scenes of a file and its frame times in one pass.

Start with `survey`. PySceneDetect's detectors find the cuts: they receive small pictures frame by
frame and return frame numbers, without opening the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np

from gulliver.data.clips import Frame, upright_frames
from gulliver.errors import GulliverError, missing_extra
from gulliver.video.config import THRESHOLDS, CutSettings
from gulliver.video.preparation.packets import (
    STEADY,
    USUAL_FPS,
    Packets,
    as_fraction,
    read_packets,
    steady_rate,
)

SMALL = 96
"""Pixels of the shorter side of the detector's pictures."""
HELD = 0.25
"""Mean pixel change, in levels, below which a picture counts as repeated."""
EARLY = 0.49
"""Maximum fraction of its duration by which a frame is shown early; below 0.5 to avoid ties."""
MOST_FPS = 120.0
"""Maximum frames per second of clips from a file with a variable rate."""


class SourceError(GulliverError):
    """A source cannot be read (unlike a write error)."""


@dataclass(frozen=True)
class SourceScenes:
    """Scenes and times of a file."""

    # First frames of the scenes; the first is 0.
    starts: tuple[int, ...]
    # Height and width of each scene, upright.
    sizes: tuple[tuple[int, int], ...]
    # Times of all frames in seconds, from the first, and the end [frames + 1].
    times: np.ndarray
    # Frames per second; for a variable rate from the shortest distance.
    rate: Fraction
    # Whether frame n is shown at n / rate.
    constant: bool

    @property
    def frames(self) -> int:
        return len(self.times) - 1

    @property
    def scenes(self) -> Iterator[tuple[int, int, tuple[int, int]]]:
        return zip(self.starts, (*self.starts[1:], self.frames), self.sizes, strict=True)


def survey(path: Path, settings: CutSettings) -> SourceScenes:
    """Decodes a file once; detects its scenes and measures its frame times."""
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
            # A clip has one size: joined recordings are split.
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
    return SourceScenes(tuple(ordered), tuple(held), *_measured(times, stays, packets))


def source_frames(path: Path) -> Iterator[Frame]:
    number = 0
    try:
        for frame in upright_frames(path):
            yield frame
            number += 1
    except GulliverError as error:
        after = f" (after {number} frames)" if number else ""
        raise SourceError(f"{error}{after}") from error


class Detector:
    """Detects cuts in a sequence of pictures."""

    # [Note: what detectors do not see] The adaptive detector compares a frame with `window` frames
    # on both sides, so it would find no cuts near the ends of a file, and clips there would include
    # frames of another scene. Therefore the first and the last picture are repeated `window` times.
    # And if a file shows each picture for several frames, such as 12 drawings per second in a film
    # of 24, the changes around a frame are zero, and every movement would look like a cut: repeated
    # pictures are skipped.

    def __init__(self, settings: CutSettings) -> None:
        self._inner = _made(settings)
        self._more = settings.window if settings.detector == "adaptive" else 0
        self._shown: list[int] = []
        self._found: list[int] = []
        self._frames = 0
        self._last: np.ndarray | None = None

    def add(self, frame: Frame) -> None:
        picture = _small(frame)
        if self._last is None:
            for _ in range(self._more):
                self._show(picture, 0)
        if self._last is None or _change(picture, self._last) >= HELD:
            self._show(picture, self._frames)
            self._last = picture
        self._frames += 1

    def cuts(self) -> list[int]:
        """Finishes detection; returns the first frame of each scene except the first."""
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
    """Creates PySceneDetect's detector, without a minimum scene length."""
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
    """Downscales an unrotated frame to uint8 [h, w, 3], BGR; all frames have the same size."""
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
    """Returns frame times including the end, the rate, and whether it is constant."""
    # Times of damaged files may decrease: such a frame has zero duration.
    shown = np.maximum.accumulate(np.array(times) - times[0])
    if rate := steady_rate(shown, packets.rate):
        return np.arange(len(shown) + 1) / float(rate), rate, True
    steps = np.diff(shown)
    shortest = float(steps[steps > 0].min()) if (steps > 0).any() else 1 / USUAL_FPS
    ends = np.append(shown, shown[-1] + max(stated, shortest))
    return ends, _fastest_rate(ends, shortest), False


def _fastest_rate(times: np.ndarray, shortest: float) -> Fraction:
    """Returns the rate of the shortest frame interval, rounded to an integer if it is close."""
    # Rounded distances count as their mean, if each frame is still shown at that rate.
    steps = np.diff(times)
    near = 1 / float(steps[(steps > 0) & (steps < (1 + STEADY) * shortest)].mean())
    for rate in (round(near), near):
        if 0 < rate <= MOST_FPS and abs(rate - near) < 0.02 * near:
            found = as_fraction(rate)
            if len(np.unique(shown_at(times, found, found))) == len(steps):
                return found
    return as_fraction(min(MOST_FPS, 1 / shortest))


def shown_at(times: np.ndarray, rate: Fraction, fastest: Fraction) -> np.ndarray:
    """Returns the frame shown at each moment of a constant rate."""
    # The newest frame that has begun; one that begins within half a frame's duration counts,
    # because times in files are rounded.
    count = max(1, round(float(times[-1] * rate)))
    moments = np.arange(count) / float(rate)
    early = EARLY / float(max(rate, fastest))
    return np.searchsorted(times[:-1], moments + early, "right") - 1


# Writes clips from the frames of a file: at a constant rate, upright, in one size.
#
# Start with `slots`, which selects the frame of each moment, then `ClipWriter`.


SUFFIXES = {"h264": ".mp4", "ffv1": ".mkv"}
FORMATS = {".mp4": "mp4", ".mkv": "matroska"}


def rate_of(footage: SourceScenes, settings: CutSettings) -> Fraction:
    if settings.fps is None:
        return footage.rate
    return Fraction(settings.fps).limit_denominator(1001)


def slots(footage: SourceScenes, first: int, end: int, rate: Fraction) -> np.ndarray:
    if footage.constant and footage.rate == rate:
        return np.arange(first, end)
    times = footage.times[first : end + 1] - footage.times[first]
    return first + shown_at(times, rate, footage.rate)


def clip_size(height: int, width: int, settings: CutSettings) -> tuple[int, int]:
    """Returns height and width of a clip; H.264 requires even numbers."""
    # Without scaling, an odd row or column is cropped.
    shorter = settings.shorter_side
    if shorter is not None and min(height, width) > shorter:
        ratio = shorter / min(height, width)
        height, width = max(1, round(height * ratio)), max(1, round(width * ratio))
    if settings.codec == "ffv1":
        return height, width
    return max(2, height // 2 * 2), max(2, width // 2 * 2)


class ClipWriter:
    """Context manager that writes frames to a file in order."""

    def __init__(
        self, path: Path, suffix: str, size: tuple[int, int], rate: Fraction, settings: CutSettings
    ) -> None:
        self.path, self.suffix, self.size, self.rate = path, suffix, size, rate
        self.settings, self._stream, self._written = settings, None, 0

    def __enter__(self) -> Self:
        import av

        # Without exact flags Matroska files contain random ids and would never be equal.
        options = {"fflags": "+bitexact"}
        self._container: Any = av.open(
            str(self.path), "w", format=FORMATS[self.suffix], options=options
        )
        return self

    def add(self, frame: Frame) -> None:
        stream = self._stream or self._open(frame)
        picture = fitted(frame, self.size, stream.pix_fmt)
        picture.pts, picture.time_base = self._written, 1 / self.rate
        # The encoder would otherwise be forced to use the frame type of the source.
        picture.pict_type = 0
        self._container.mux(stream.encode(picture))
        self._written += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._stream is not None:
                self._container.mux(self._stream.encode())
        finally:
            self._container.close()

    def _open(self, frame: Frame) -> Any:
        # One thread: files run in parallel, and the bytes do not depend on the machine.
        options = {"threads": "1"}
        if self.settings.codec == "h264":
            # x264's macroblock tree reads uninitialized memory if sides are not multiples of 16,
            # which would make each run different.
            options |= {"crf": str(self.settings.crf), "preset": self.settings.preset}
            options |= {"mbtree": "0"}
        codec = {"h264": "libx264", "ffv1": "ffv1"}[self.settings.codec]
        stream = self._container.add_stream(codec, rate=self.rate, options=options)
        stream.height, stream.width = self.size
        stream.pix_fmt = _pixels(frame, self.size, self.settings.codec)
        if _passes_through(frame, self.size):
            for name in ("colorspace", "color_primaries", "color_trc"):
                setattr(stream.codec_context, name, getattr(frame.decoded, name))
        self._stream = stream
        return stream


def fitted(frame: Frame, size: tuple[int, int], pixels: str) -> Any:
    # An already matching frame is returned unchanged, without loss.
    import av

    height, width = size
    cropped = _is_cropped(frame, size)
    if frame.turn.is_upright and not cropped:
        area = {"interpolation": "AREA"} if (frame.height, frame.width) != size else {}
        return frame.decoded.reformat(width, height, format=pixels, **area)
    picture = frame.pixels()
    if cropped:
        picture = picture[:height, :width]
    made = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
    return made.reformat(width, height, format=pixels, interpolation="AREA")


def _is_cropped(frame: Frame, size: tuple[int, int]) -> bool:
    spare = frame.height - size[0], frame.width - size[1]
    return max(spare) == 1 and min(spare) >= 0


def _passes_through(frame: Frame, size: tuple[int, int]) -> bool:
    return frame.turn.is_upright and not _is_cropped(frame, size)


def _pixels(frame: Frame, size: tuple[int, int], codec: str) -> str:
    import av

    if codec == "h264":
        return "yuv420p"
    known: Any = av.Codec("ffv1", "w").video_formats
    name = frame.decoded.format.name
    kept = _passes_through(frame, size) and name in {found.name for found in known}
    return name if kept else "bgr0"
