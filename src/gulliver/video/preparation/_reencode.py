"""Clips are written from the frames of a file: at a constant rate, upright, in one size.

Read `slots` first, which chooses the frame of each moment, then `ClipWriter`.
What this does not know: where scenes are, and which clips are there already.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from gulliver.data import Frame
from gulliver.video.preparation._cut_settings import CutSettings
from gulliver.video.preparation._scenes import Footage, shown_at

SUFFIXES = {"h264": ".mp4", "ffv1": ".mkv"}
FORMATS = {".mp4": "mp4", ".mkv": "matroska"}


def rate_of(footage: Footage, settings: CutSettings) -> Fraction:
    """Returns the frames per second that clips of a file have."""
    if settings.fps is None:
        return footage.rate
    return Fraction(settings.fps).limit_denominator(1001)


def slots(footage: Footage, first: int, end: int, rate: Fraction) -> np.ndarray:
    """Chooses the frames that a scene shows at a constant rate."""
    if footage.constant and footage.rate == rate:
        return np.arange(first, end)
    times = footage.times[first : end + 1] - footage.times[first]
    return first + shown_at(times, rate, footage.rate)


def clip_size(height: int, width: int, settings: CutSettings) -> tuple[int, int]:
    """Returns height and width of a clip; H.264 takes even numbers only."""
    # Without a change of scale an odd row or column is cut off, and not scaled away.
    shorter = settings.shorter_side
    if shorter is not None and min(height, width) > shorter:
        ratio = shorter / min(height, width)
        height, width = max(1, round(height * ratio)), max(1, round(width * ratio))
    if settings.codec == "ffv1":
        return height, width
    return max(2, height // 2 * 2), max(2, width // 2 * 2)


class ClipWriter:
    """Writes frames to a file, in the order in which they come; a context manager."""

    def __init__(
        self, path: Path, suffix: str, size: tuple[int, int], rate: Fraction, settings: CutSettings
    ) -> None:
        self.path, self.suffix, self.size, self.rate = path, suffix, size, rate
        self.settings, self._stream, self._written = settings, None, 0

    def __enter__(self) -> Self:
        import av

        # Without exact flags Matroska files have random names in them: no two would be the same.
        options = {"fflags": "+bitexact"}
        self._container: Any = av.open(
            str(self.path), "w", format=FORMATS[self.suffix], options=options
        )
        return self

    def add(self, frame: Frame) -> None:
        """Writes a frame."""
        stream = self._stream or self._open(frame)
        picture = fitted(frame, self.size, stream.pix_fmt)
        picture.pts, picture.time_base = self._written, 1 / self.rate
        # What kind of frame it was in its file would be forced upon the encoder.
        picture.pict_type = 0
        self._container.mux(stream.encode(picture))
        self._written += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._stream is not None:
                self._container.mux(self._stream.encode())
        finally:
            self._container.close()

    def _open(self, frame: Frame) -> Any:
        # One thread: the work is shared among files, and the bytes do not depend on the machine.
        options = {"threads": "1"}
        if self.settings.codec == "h264":
            # The macroblock tree of x264 reads memory that nobody wrote where sides are no
            # multiples of 16: each run would make other bytes.
            options |= {"crf": str(self.settings.crf), "preset": self.settings.preset}
            options |= {"mbtree": "0"}
        codec = {"h264": "libx264", "ffv1": "ffv1"}[self.settings.codec]
        stream = self._container.add_stream(codec, rate=self.rate, options=options)
        stream.height, stream.width = self.size
        stream.pix_fmt = _pixels(frame, self.size, self.settings.codec)
        if _goes_through(frame, self.size):
            for name in ("colorspace", "color_primaries", "color_trc"):
                setattr(stream.codec_context, name, getattr(frame.decoded, name))
        self._stream = stream
        return stream


def fitted(frame: Frame, size: tuple[int, int], pixels: str) -> Any:
    """Returns a frame, upright, in a size and pixel format, as PyAV has it."""
    # It stays as it was decoded where that is right already: nothing is lost on the way.
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
    """Whether only the last row or column is too many."""
    spare = frame.height - size[0], frame.width - size[1]
    return max(spare) == 1 and min(spare) >= 0


def _goes_through(frame: Frame, size: tuple[int, int]) -> bool:
    return frame.turn.is_upright and not _is_cropped(frame, size)


def _pixels(frame: Frame, size: tuple[int, int], codec: str) -> str:
    """Chooses the pixel format of a clip."""
    import av

    if codec == "h264":
        return "yuv420p"
    known: Any = av.Codec("ffv1", "w").video_formats
    name = frame.decoded.format.name
    kept = _goes_through(frame, size) and name in {found.name for found in known}
    return name if kept else "bgr0"
