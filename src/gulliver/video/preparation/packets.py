"""Frame times from a file's header and packets, and pictures at evenly spaced times."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from gulliver.data.clips import Frame, open_video, upright_frames
from gulliver.errors import GulliverError

JOINED = ("mpegts", "mpeg")
"""Formats that can be concatenated as files, so that anything may change midway."""
FEW = 3
"""Number of frames that may be missing at the end without a warning."""
HIDING = frozenset(("vp8", "mpeg4", "msmpeg4v3", "cavs"))
"""Codecs with packets that contain no frame."""
STEADY = 0.25
"""Tolerance for a constant frame rate, as a fraction of a frame's duration."""
USUAL_FPS = 25.0
"""Assumed frames per second of a file without times."""


# [Note: when frames are shown] Packets are stored in decoding order. Their presentation times,
# sorted, are the times of frames 0, 1, 2, ...; decoding times only show where files were joined,
# and Matroska omits some of them. AVI has no presentation times, and FFmpeg's guesses are wrong if
# frames are reordered. There a frame is shown when the packet that is as many places later as the
# decoder delays frames is decoded; the first frame reveals the delay.
@dataclass(frozen=True)
class Packets:
    """Header and packets of a file's video."""

    # `times` are the presentation times of frames in seconds, sorted; `stated` is the header's
    # number of frames, 0 if unknown, and `seconds` its duration. `restarts` counts how often times
    # restart (they continue in `times`). `missing` are the seconds between the last packet and the
    # end stated by a Matroska header. `presented` is whether packets have presentation times.

    codec: str
    audio: bool
    packets: int
    times: np.ndarray
    damaged: bool
    stated: int
    seconds: float
    rate: float
    format: str = ""
    restarts: int = 0
    missing: float = 0.0
    presented: bool = True

    @property
    def problems(self) -> list[str]:
        found = []
        if self.restarts:
            found.append(f"its times restart {self.restarts}x, as in joined files")
        if self.breaks_off:
            there = float(self.times[-1]) if len(self.times) else 0.0
            found.append(f"is truncated: ends {self.missing:.2f} s early, after {there:.2f} s")
        return found

    @property
    def breaks_off(self) -> bool:
        steps = np.diff(self.times)
        longest = float(steps.max()) if len(steps) else 0.0
        return self.missing > FEW * max(longest, 1 / self.rate if self.rate else 0.04)

    def ends_early(self, frames: int, last: float | None) -> str:
        """Describes packets that were not decoded; some decoders silently skip damaged ones."""
        lost = 0.0 if self.codec in HIDING else float(self.packets - frames)
        if self.has_times and last is not None and (usual := _usual(self.times)):
            lost = float(self.times[-1] - last) * usual
        if lost <= FEW:
            return ""
        return f"ends early: {frames} frames of {self.packets} packets can be decoded"

    @property
    def in_doubt(self) -> bool:
        """Whether the number of packets may differ from the number of frames."""
        if self.damaged or not self.packets or self.codec in HIDING or self.format in JOINED:
            return True
        expected = self.seconds * self.rate
        late = expected and abs(expected - self.packets) > max(2.0, 0.05 * self.packets)
        return bool(late) or bool(self.stated and self.stated != self.packets)

    @property
    def has_times(self) -> bool:
        return len(self.times) == self.packets > 0 and not self.restarts

    def time_of(self, number: int, frame: Any) -> float:
        """Returns the presentation time in seconds of decoded frame `number`."""
        if self.presented and not self.restarts and frame.time is not None:
            return float(frame.time)
        if number < len(self.times):
            return float(self.times[number])
        step = 1 / (_usual(self.times) or self.rate or USUAL_FPS)
        last = float(self.times[-1]) if len(self.times) else -step
        return last + (number + 1 - len(self.times)) * step

    def moments(self, count: int) -> np.ndarray:
        """Midpoints of equal parts of the clip, in seconds, or in frames if it has no times."""
        begin, length = 0.0, float(max(1, self.packets or self.stated))
        if self.has_times:
            steps = np.diff(self.times)
            length = float(self.times[-1] - self.times[0] + (np.median(steps) if len(steps) else 0))
            begin = float(self.times[0])
        return begin + (np.arange(count) + 0.5) / count * length

    @property
    def is_variable(self) -> bool:
        return len(self.times) > 2 and steady_rate(self.times, self.rate) is None

    def duration(self, frames: int, fps: float) -> float:
        if len(self.times) < 2:
            return frames / fps
        return float(self.times[-1] - self.times[0]) + 1 / fps


def read_packets(path: Path) -> Packets:
    """Reads the packets of a file's video, without decoding."""
    shown, coded, packets, damaged, end = [], [], 0, False, 0.0
    with open_video(path) as (container, stream):
        clock = float(stream.time_base or 0)
        presented = container.format.name != "avi"
        try:
            for packet in container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                packets += 1
                damaged = damaged or packet.is_corrupt
                time = packet.pts if presented else packet.dts
                if time is not None and clock:
                    shown.append(time * clock)
                    coded.append(np.nan if packet.dts is None else packet.dts * clock)
                    end = max(end, shown[-1] + (packet.duration or 0) * clock)
        except (_ffmpeg_error(), OSError, ValueError):
            # Packets before the error count.
            damaged = True
        seconds = stream.duration * clock if stream.duration else (container.duration or 0) / 1e6
        times, restarts = _unrolled(np.array(shown), np.array(coded))
        stated = stream.frames
        if not presented and len(times) > 1:
            # The header of an AVI file also counts repeated frames.
            held = (times[-1] - times[0]) / clock > len(times) - 0.5
            times, stated = _delayed(path, times, clock), 0 if held else stated
        missing = 0.0 if damaged else _stated_end(container, stream) - end
        return Packets(
            codec=stream.codec_context.codec.canonical_name,
            audio=bool(container.streams.audio),
            packets=packets,
            times=times,
            damaged=damaged,
            stated=stated,
            seconds=float(seconds),
            # If times restart, FFmpeg computes a rate that no part has.
            rate=_usual(times) if restarts else _declared_rate(stream),
            format=container.format.name,
            restarts=restarts,
            missing=max(0.0, missing),
            presented=presented,
        )


def _delayed(path: Path, times: np.ndarray, clock: float) -> np.ndarray:
    try:
        first = next(upright_frames(path), None)
    except GulliverError:
        first = None
    if first is None or first.decoded.dts is None:
        return times
    delay = int(np.searchsorted(times, (first.decoded.dts - 0.5) * clock))
    last = times[-1] + np.arange(1, delay + 1) / (_usual(times) or USUAL_FPS)
    return np.concatenate([times[delay:], last])


def steady_rate(times: np.ndarray, said: float) -> Fraction | None:
    """Returns the constant frame rate; None if it is variable."""
    span = float(times[-1] - times[0]) if len(times) > 1 else 0.0
    mean = (len(times) - 1) / span if span > 0 else 0.0
    for rate in (said, mean, 0.0 if len(times) > 1 else USUAL_FPS):
        late = (times - times[0]) * float(as_fraction(rate)) - np.arange(len(times))
        if rate and np.abs(late).max() <= STEADY:
            return as_fraction(rate)
    return None


def as_fraction(rate: float) -> Fraction:
    """Returns the nearest fraction with a denominator that is common for frame rates."""
    return Fraction(rate).limit_denominator(1001)


def _declared_rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or 0)


def _usual(times: np.ndarray) -> float:
    steps = np.diff(times)
    return float(1 / np.median(steps[steps > 0])) if (steps > 0).any() else 0.0


def _unrolled(times: np.ndarray, coded: np.ndarray) -> tuple[np.ndarray, int]:
    """Sorts packet times; where times restart, later parts are appended."""
    known = np.flatnonzero(~np.isnan(coded))
    places = known[1:][np.diff(coded[known]) < 0]
    if not len(places):
        return np.sort(times), 0
    parts = [np.sort(part) for part in np.split(times, places)]
    step = 1 / (_usual(max(parts, key=len)) or 25.0)
    for before, part in pairwise(parts):
        part += before[-1] + step - part[0]
    return np.concatenate(parts), len(places)


def _stated_end(container: Any, stream: Any) -> float:
    """Returns the end of a Matroska file's video from its header; 0 if unknown."""
    if "matroska" not in container.format.name:
        return 0.0
    said = stream.metadata.get("DURATION")
    if said:
        with suppress(ValueError):
            hours, minutes, seconds = map(float, said.split(":"))
            return 3600 * hours + 60 * minutes + seconds
    # The file's duration is the duration of its longest stream.
    return (container.duration or 0) / 1e6 if len(container.streams) == 1 else 0.0


def _ffmpeg_error() -> type[Exception]:
    import av

    return av.FFmpegError


# Frames at a few moments of a clip, each with its successor: the input of scorers.
#
# Moments are evenly spaced in time, so that a copy with another frame rate is sampled at the same
# moments.


MOMENTS = 8
"""Number of moments of a clip."""
SIDE = 512
"""Maximum pixels of a picture's longer side; larger ones are scaled down."""
LUMA = np.array((0.299, 0.587, 0.114), np.float32)
"""Weights of red, green and blue (BT.601)."""


@dataclass(frozen=True)
class Samples:
    """Frames of a clip at evenly spaced times.

    Attributes:
        path: file of the clip.
        pictures: sampled frames, uint8 [N, H, W, 3].
        neighbours: next frame of each picture, or the previous frame at the end; a still is its
            own neighbor.
        problem: reason why only a part of the clip was read, or None.
    """

    path: Path
    pictures: np.ndarray
    neighbours: np.ndarray
    problem: str | None = None

    @cached_property
    def grey(self) -> np.ndarray:
        """Luma of the pictures, float32 [N, H, W] in 0..255."""
        return self.pictures @ LUMA

    @cached_property
    def grey_neighbours(self) -> np.ndarray:
        return self.neighbours @ LUMA


def take_samples(path: Path, moments: int = MOMENTS, side: int = SIDE) -> Samples:
    """Decodes a clip up to its last sampled moment."""
    # If the file is truncated, the last frame is repeated, and `problem` says so.
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
            # The frame at a moment is the last one with a time not after it.
            while shown is not None and len(taken) < moments and time > wanted[len(taken)]:
                taken.append((_small(shown, side), _small(frame, side)))
            if len(taken) == moments:
                break
            before, shown = shown, frame
    except GulliverError as error:
        if shown is None:
            raise
        problem = f"is truncated: {error}"
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
    """Converts a frame to RGB, uint8 [H, W, 3], upright and at most `side` pixels long."""
    decoded = frame.decoded
    ratio = min(1.0, side / max(decoded.width, decoded.height))
    width, height = (max(1, round(size * ratio)) for size in (decoded.width, decoded.height))
    small = decoded.reformat(width=width, height=height, format="rgb24", interpolation="AREA")
    return frame.turn.applied(small.to_ndarray())


def averaged(pictures: np.ndarray, side: int) -> np.ndarray:
    """Averages pictures [..., H, W] over a square grid: float32 [..., side, side]."""
    whole = torch.from_numpy(np.ascontiguousarray(pictures, np.float32))
    flat = whole.reshape(-1, 1, *whole.shape[-2:])
    return F.adaptive_avg_pool2d(flat, side).reshape(*whole.shape[:-2], side, side).numpy()
