"""What a file's header and its packets say, without decoding a frame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gulliver.data import open_video

HIDING = frozenset(("vp8", "mpeg4", "msmpeg4v3", "cavs"))
"""Codecs that have packets without a frame of their own."""


@dataclass(frozen=True)
class Packets:
    """Packets of a file's video and what its header says.

    `times` are those at which frames are shown, in seconds, in order; `stated` is the header's
    number of frames, 0 where it has none, and `seconds` its duration.
    """

    codec: str
    audio: bool
    packets: int
    times: np.ndarray
    damaged: bool
    stated: int
    seconds: float
    rate: float

    @property
    def in_doubt(self) -> bool:
        """Whether the packets may not be the frames."""
        if self.damaged or not self.packets or self.codec in HIDING:
            return True
        expected = self.seconds * self.rate
        late = expected and abs(expected - self.packets) > max(2.0, 0.05 * self.packets)
        return bool(late) or bool(self.stated and self.stated != self.packets)

    @property
    def has_times(self) -> bool:
        """Whether it is known of each packet when its frame is shown."""
        return len(self.times) == self.packets > 0

    def moments(self, count: int) -> np.ndarray:
        """Middles of as many equal parts of the clip: in seconds, or in frames without times."""
        begin, length = 0.0, float(max(1, self.packets or self.stated))
        if self.has_times:
            steps = np.diff(self.times)
            length = float(self.times[-1] - self.times[0] + (np.median(steps) if len(steps) else 0))
            begin = float(self.times[0])
        return begin + (np.arange(count) + 0.5) / count * length

    @property
    def is_variable(self) -> bool:
        """Whether some frames stay a quarter longer than others, beyond what clocks round."""
        steps = np.diff(self.times)
        steps = steps[steps > 0]
        if len(steps) < 2:
            return False
        return bool(np.ptp(steps) > max(0.25 * np.median(steps), 0.0025))

    def duration(self, frames: int, fps: float) -> float:
        """Seconds from the first frame to the end of the last."""
        if len(self.times) < 2:
            return frames / fps
        return float(self.times[-1] - self.times[0]) + 1 / fps


def read_packets(path: Path) -> Packets:
    """Reads the packets of a file's video, without decoding them.

    Raises:
        GulliverError: it is missing, empty or unreadable, or holds no video.
    """
    times, packets, damaged = [], 0, False
    with open_video(path) as (container, stream):
        try:
            for packet in container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                packets += 1
                damaged = damaged or packet.is_corrupt
                if packet.pts is not None and packet.time_base:
                    times.append(float(packet.pts * packet.time_base))
        except (_ffmpeg_error(), OSError, ValueError):
            # What was read before counts.
            damaged = True
        clock = float(stream.time_base or 0)
        seconds = stream.duration * clock if stream.duration else (container.duration or 0) / 1e6
        return Packets(
            codec=stream.codec_context.name,
            audio=bool(container.streams.audio),
            packets=packets,
            times=np.sort(np.array(times)),
            damaged=damaged,
            stated=stream.frames,
            seconds=float(seconds),
            rate=float(stream.average_rate or stream.guessed_rate or 0),
        )


def _ffmpeg_error() -> type[Exception]:
    import av

    return av.FFmpegError
