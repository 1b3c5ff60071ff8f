"""Scans a folder of clips into a table, using PyAV, and lists unusable files."""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gulliver.data.clips import STILL_FPS, Frame, rate_shown, upright_frames
from gulliver.errors import GulliverError
from gulliver.io.files import named_errors
from gulliver.video.preparation.packets import Packets, read_packets
from gulliver.video.preparation.table import (
    COLUMNS,
    Table,
    broken_path,
    check_suffix,
    stamp_of,
    write_broken,
)
from gulliver.video.preparation.work import FileOutcome, work_on

_VIDEOS = (
    ".3gp .asf .avi .f4v .flv .gif .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .mxf .ogv .ts .vob "
    ".webm .wmv"
)
_PICTURES = ".bmp .jpeg .jpg .png .tif .tiff .webp"
VIDEOS, PICTURES = frozenset(_VIDEOS.split()), frozenset(_PICTURES.split())
FACTS = ("duration", "codec", "rotation", "variable_fps", "audio", "bytes", "note")
"""Columns of a scan in addition to Open-Sora's: seconds, degrees clockwise, and remarks."""
FPS = 0.1, 1000.0
"""Frame rates that training accepts."""


# [Note: files that lie about their length] A header's number of frames may be wrong: interrupted
# downloads, crashed recorders, tools that cut without decoding. So the packets are counted, which
# reads the file but decodes nothing: thousands of clips per minute. If packets disagree with the
# header, are not frames in the file's codec, or are damaged, the frames are decoded and counted.
# The first frame is always decoded, to check the decoder and to find the rotation.
@dataclass(frozen=True)
class ScanResult:
    """Result of a scan."""

    table: Table
    broken: list[tuple[str, str]]
    # Number of files that are not clips, by suffix.
    ignored: Counter[str]


def scan(
    folder: Path, out: Path, decode: bool = False, again: bool = False, workers: int = 0
) -> ScanResult:
    """Writes a table of the clips and pictures in a folder, recursively.

    Captions are read from a text file next to the clip (clip.txt), else taken from the words of its
    name. Existing rows of the table stay unchanged, with all columns, if the file has the same
    size.

    Args:
        folder: folder of clips.
        out: table to write; unusable files are listed next to it, in NAME.broken.csv.
        decode: whether to decode all frames of all files, not only if in doubt.
        again: whether to scan all files again.
        workers: threads; 0 uses one per core.

    Raises:
        GulliverError: the folder does not exist, or has no clips.
    """
    if not folder.is_dir():
        raise GulliverError(f"{folder} is not a folder; pass the folder that contains the clips")
    check_suffix(out)
    root, stamp = out.absolute().parent, stamp_of(out)
    before = {} if again or not out.is_file() else _rows_of(Table.read(out))
    clips, ignored, broken = _files(folder, out)
    if not clips and not broken:
        raise GulliverError(
            f"{folder} has no clips or pictures ({' '.join(sorted(VIDEOS))} ...); add some"
        )
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
        table = Table.of_rows([row for row in rows if row], out, columns, stamp).write()
        write_broken(out, "scan", broken)
    return ScanResult(table, broken, ignored)


def _rows_of(table: Table) -> dict[str, dict[str, Any]]:
    return {str(row["path"]): row for row in table.data.to_pylist()}


def _row(
    name: str, before: dict[str, dict[str, Any]], fresh: dict[str, FileOutcome]
) -> dict[str, Any]:
    if name not in fresh:
        return before[name]
    found = fresh[name]
    return {"path": name, **found.values} if found.problem is None else {}


def _files(folder: Path, out: Path) -> tuple[list[Path], Counter[str], list[tuple[str, str]]]:
    """Finds clips and pictures, counts other suffixes, and lists unusable paths with reasons."""
    folder, root = folder.absolute(), out.absolute().parent
    clips, others, broken = [], [], []
    paths, again = _walk(folder)
    ours = {out.absolute(), broken_path(out).absolute()}
    for path in paths:
        suffix, name = path.suffix.lower(), _relative(path, root)
        if path in ours or path.name.startswith(f".{out.name}."):
            continue
        if suffix not in VIDEOS and suffix not in PICTURES:
            others += [] if path.is_dir() else [path]
        elif path.is_dir():
            broken.append((name, "is a folder"))
        elif path.exists() and not path.is_file():
            broken.append((name, "is not a regular file"))
        elif not name.isprintable():
            broken.append((repr(name), "has a name that tables cannot hold; rename it"))
        else:
            clips.append(path)
    captions = {path.with_suffix(".txt") for path in clips}
    ignored = Counter(path.suffix.lower() or "no suffix" for path in {*others} - captions)
    ignored += Counter({"link to a folder that was already scanned": again} if again else {})
    return clips, ignored, broken


def _walk(folder: Path) -> tuple[list[Path], int]:
    """Lists the content of a folder recursively and in order, following links to folders."""
    # Each folder is visited once, under its own name instead of a link's, so that cyclic links
    # terminate and no clip occurs twice.
    found, again = [], 0
    seen: set[str] = set()
    left = deque([folder])
    while left:
        top = left.popleft()
        if os.path.realpath(top) in seen:
            again += 1
            continue
        for name, folders, files in os.walk(top):
            here, real = Path(name), os.path.realpath(name)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            left += sorted(here / each for each in folders if (here / each).is_symlink())
            found += [here / each for each in (*folders, *files)]
    return sorted(found), again


def _relative(path: Path, root: Path) -> str:
    return os.path.relpath(path, root)


def caption_of(path: Path) -> str:
    """Reads the text next to a clip, or returns the words of its name."""
    beside = path.with_suffix(".txt")
    if beside.is_file():
        with named_errors(beside, "read"):
            content = beside.read_bytes()
        try:
            text = " ".join(content.decode("utf-8-sig").split())
        except UnicodeDecodeError as error:
            raise GulliverError(
                f"caption {beside.name} is not UTF-8 (byte {error.start + 1}); save it as UTF-8"
            ) from None
        if text:
            return text
    return re.sub("[_-]+", " ", path.stem)


def read_facts(path: Path, decode: bool = False) -> dict[str, Any]:
    """Reads the properties of a file: cells of a row, by column."""
    first = next(upright_frames(path), None)
    if first is None:
        raise GulliverError("has no frames")
    counted = read_packets(path)
    frames, notes, sizes = counted.packets, counted.problems, {}
    if path.suffix.lower() in PICTURES and frames <= 1:
        frames = 1
    elif decode or counted.in_doubt:
        frames, problem, sizes = _count_frames(path)
        notes += [problem] if problem else []
        stated = counted.stated or counted.packets
        if abs(stated - frames) > 1:
            notes.append(f"should have {stated} frames, but has {frames}")
    if len(sizes) > 1:
        _, (height, width) = [*sizes.values()][:2]
        at = [*sizes][1]
        notes.append(f"changes its size to {width}x{height} at frame {at}")
    fps = _rate(counted, frames, first)
    seconds = 0.0 if frames == 1 else counted.duration(frames, fps)
    if (
        frames > 1
        and not counted.problems
        and abs(counted.seconds - seconds) > max(1.0, 0.2 * seconds)
    ):
        notes.append(f"should last {counted.seconds:.1f} s, but lasts {seconds:.1f} s")
    if not FPS[0] <= fps <= FPS[1]:
        notes.append(f"states {fps:g} frames per second")
    return {
        "text": caption_of(path),
        "num_frames": frames,
        "height": first.height,
        "width": first.width,
        "aspect_ratio": first.height / first.width,
        "resolution": first.height * first.width,
        "fps": fps if FPS[0] <= fps <= FPS[1] else None,
        "duration": round(seconds, 6),
        "codec": counted.codec,
        "rotation": _degrees(first),
        "variable_fps": counted.is_variable,
        "audio": counted.audio,
        "bytes": path.stat().st_size,
        "note": "; ".join(notes) or None,
    }


def _count_frames(path: Path) -> tuple[int, str | None, dict[int, tuple[int, int]]]:
    """Decodes a file; returns its frame count, an error, and each new size by first frame."""
    frames, size = 0, None
    sizes: dict[int, tuple[int, int]] = {}
    try:
        for frame in upright_frames(path):
            if (frame.height, frame.width) != size:
                size = sizes[frames] = frame.height, frame.width
            frames += 1
    except GulliverError as error:
        return frames, f"is truncated after {frames} frames: {error}", sizes
    return frames, None, sizes


def _rate(counted: Packets, frames: int, first: Frame) -> float:
    """Returns frames per second, from presentation times if the header is wrong."""
    if frames == 1:
        return STILL_FPS
    times = counted.times
    span = float(times[-1] - times[0]) if len(times) > 1 else 0.0
    return rate_shown(counted.rate or first.rate, len(times), span) or STILL_FPS


def _degrees(frame: Frame) -> int:
    a, b, _, d = frame.turn
    if frame.turn.swaps:
        return 90 if b > 0 else 270
    return 180 if a < 0 and d < 0 else 0
