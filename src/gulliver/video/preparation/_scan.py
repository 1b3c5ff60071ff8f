"""A folder of clips becomes a table: what each file holds, by PyAV, and which cannot be used.

[Note: files that lie about their length]
A header says how many frames there are, and may be wrong: a download that broke off, a recorder
that died, a tool that cut without decoding. So the packets are counted, which reads the file but
decodes nothing: thousands of clips a minute. Where packets say otherwise than the header, or are no
frames in the file's codec, or are damaged, the frames are decoded and counted. The first frame is
decoded always: it tells whether anything can be, and how the picture is turned.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.data import STILL_FPS, Frame, upright_frames
from gulliver.errors import GulliverError
from gulliver.video.preparation._table import COLUMNS, Table, broken_path, write_broken
from gulliver.video.preparation._work import Outcome, work_on

_VIDEOS = (
    ".3gp .asf .avi .f4v .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .mxf .ogv .ts .vob "
    ".webm .wmv"
)
_PICTURES = ".bmp .jpeg .jpg .png .tif .tiff .webp"
VIDEOS, PICTURES = frozenset(_VIDEOS.split()), frozenset(_PICTURES.split())
FACTS = ("duration", "codec", "rotation", "variable_fps", "audio", "bytes", "note")
"""Columns of a scan besides Open-Sora's; seconds, degrees clockwise, and what was noticed."""
HIDING = frozenset(("vp8", "vp9", "mpeg4", "msmpeg4v3", "cavs"))
"""Codecs that have packets without a frame of their own."""
FPS = 0.1, 1000.0
"""Frame rates that training takes."""


@dataclass(frozen=True)
class Scanned:
    """What became of the files of a folder.

    Attributes:
        table: files that can be used.
        broken: name and reason of each that cannot.
        ignored: how many files are no clips by their suffix, by suffix.
    """

    table: Table
    broken: list[tuple[str, str]]
    ignored: Counter[str]


def scan(
    folder: Path, out: Path, decode: bool = False, again: bool = False, workers: int = 0
) -> Scanned:
    """Writes a table of the clips and pictures of a folder and its folders.

    Captions are those of a text file beside the clip (clip.txt), else the words of its name. Rows
    of a table that is there already stay as they are, with all their columns, where the file is as
    large as it was.

    Args:
        folder: folder of clips.
        out: table to write; files that cannot be used are listed beside it, in NAME.broken.csv.
        decode: whether to decode all frames of all files, and not only where in doubt.
        again: whether to look at all files anew.
        workers: threads; 0 takes one for each core.

    Raises:
        GulliverError: there is no such folder, or no clip in it.
    """
    if not folder.is_dir():
        raise GulliverError(f"{folder} is no folder: name the folder of the clips")
    root = out.absolute().parent
    before = {} if again or not out.is_file() else _rows_of(Table.read(out))
    clips, ignored, broken = _files(folder, out)
    if not clips and not broken:
        raise GulliverError(f"{folder} holds no clip or picture ({' '.join(sorted(VIDEOS))} ...)")
    names = {path: _relative(path, root) for path in clips}
    known = {
        path
        for path in clips
        if names[path] in before and before[names[path]].get("bytes") == path.stat().st_size
    }
    left = [(names[path], path) for path in clips if path not in known]
    work = partial(read_facts, decode=decode)
    with work_on(left, work, out, "scan", str(decode), workers) as outcomes:
        fresh = {name: found for (name, _), found in zip(left, outcomes, strict=True)}
        rows = [_row(name, before, fresh) for name in names.values()]
        broken += [(name, found.problem) for name, found in fresh.items() if found.problem]
        columns = list(dict.fromkeys((*COLUMNS, *FACTS, *(name for row in rows for name in row))))
        table = Table.of_rows([row for row in rows if row], out, columns).write()
        write_broken(out, broken)
    return Scanned(table, broken, ignored)


def _rows_of(table: Table) -> dict[str, dict[str, Any]]:
    return {str(row["path"]): row for row in table.data.to_pylist()}


def _row(name: str, before: dict[str, dict[str, Any]], fresh: dict[str, Outcome]) -> dict[str, Any]:
    """Returns the row of a file; none where it cannot be used."""
    if name not in fresh:
        return before[name]
    found = fresh[name]
    return {"path": name, **found.values} if found.problem is None else {}


def _files(folder: Path, out: Path) -> tuple[list[Path], Counter[str], list[tuple[str, str]]]:
    """Finds clips and pictures, counts others by suffix, lists names that no table holds."""
    clips, ignored, broken = [], Counter[str](), []
    ours = {out.absolute(), broken_path(out).absolute()}
    for path in sorted(folder.absolute().rglob("*")):
        suffix = path.suffix.lower()
        if path.is_dir() or path in ours or path.name.startswith(f".{out.name}."):
            continue
        if suffix not in VIDEOS and suffix not in PICTURES:
            ignored[suffix or "no suffix"] += 1
        elif not path.name.isprintable() or "\ufffd" in path.name:
            broken.append((repr(path.name), "has a name that tables cannot hold: rename it"))
        else:
            clips.append(path)
    return clips, ignored, broken


def _relative(path: Path, root: Path) -> str:
    return os.path.relpath(path, root)


def caption_of(path: Path) -> str:
    """Reads the text beside a clip, or says the words of its name."""
    beside = path.with_suffix(".txt")
    if beside.is_file():
        text = " ".join(beside.read_text(encoding="utf-8-sig", errors="replace").split())
        if text:
            return text
    return re.sub("[_-]+", " ", path.stem)


def read_facts(path: Path, decode: bool = False) -> dict[str, Any]:
    """Finds out what a file holds: cells of a row, by column.

    Args:
        path: clip or picture.
        decode: whether to decode all frames, and not only where in doubt.

    Raises:
        GulliverError: it is missing or empty, holds no video, or no frame can be decoded.
    """
    first = next(upright_frames(path), None)
    if first is None:
        raise GulliverError("has no frames")
    counted = _count_packets(path)
    frames, notes = counted.packets, []
    if path.suffix.lower() in PICTURES and frames <= 1:
        frames = 1
    elif decode or counted.in_doubt:
        frames, problem = _count_frames(path)
        notes += [problem] if problem else []
        stated = counted.stated or counted.packets
        if abs(stated - frames) > 1:
            notes.append(f"is said to have {stated} frames, {frames} are there")
    fps = _rate(counted, frames, first)
    if not FPS[0] <= fps <= FPS[1]:
        notes.append(f"says {fps:g} frames per second")
    return {
        "text": caption_of(path),
        "num_frames": frames,
        "height": first.height,
        "width": first.width,
        "aspect_ratio": first.height / first.width,
        "resolution": first.height * first.width,
        "fps": fps if FPS[0] <= fps <= FPS[1] else None,
        "duration": 0.0 if frames == 1 else round(counted.duration(frames, fps), 6),
        "codec": counted.codec,
        "rotation": _degrees(first),
        "variable_fps": counted.is_variable,
        "audio": counted.audio,
        "bytes": path.stat().st_size,
        "note": "; ".join(notes) or None,
    }


@dataclass(frozen=True)
class _Counted:
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


def _count_packets(path: Path) -> _Counted:
    """Reads the packets of a file's video, without decoding them."""
    import av

    times, packets, damaged = [], 0, False
    with av.open(str(path), metadata_errors="ignore") as container:
        stream = container.streams.video[0]
        try:
            for packet in container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                packets += 1
                damaged = damaged or packet.is_corrupt
                if packet.pts is not None and packet.time_base:
                    times.append(float(packet.pts * packet.time_base))
        except (av.FFmpegError, OSError, ValueError):
            damaged = True
        clock = float(stream.time_base or 0)
        seconds = stream.duration * clock if stream.duration else (container.duration or 0) / 1e6
        return _Counted(
            codec=stream.codec_context.name,
            audio=bool(container.streams.audio),
            packets=packets,
            times=np.sort(np.array(times)),
            damaged=damaged,
            stated=stream.frames,
            seconds=float(seconds),
            rate=float(stream.average_rate or stream.guessed_rate or 0),
        )


def _count_frames(path: Path) -> tuple[int, str | None]:
    """Decodes a file; returns its frames and, where it breaks off, why."""
    frames = 0
    try:
        for _ in upright_frames(path):
            frames += 1
    except GulliverError as error:
        return frames, f"breaks off after {frames} frames: {error}"
    return frames, None


def _rate(counted: _Counted, frames: int, first: Frame) -> float:
    """Frames per second, by the times at which frames are shown where the header says another."""
    if frames == 1:
        return STILL_FPS
    rate = counted.rate or first.rate
    times = counted.times
    span = float(times[-1] - times[0]) if len(times) > 1 else 0.0
    if span <= 0:
        return rate or STILL_FPS
    shown = (len(times) - 1) / span
    return rate if rate and abs(shown / rate - 1) < 0.01 else shown


def _degrees(frame: Frame) -> int:
    """Degrees clockwise by which the stored picture is turned to be shown."""
    a, b, _, d = frame.turn
    if frame.turn.swaps:
        return 90 if b > 0 else 270
    return 180 if a < 0 and d < 0 else 0
