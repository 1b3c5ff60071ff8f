"""Cuts videos into clips of scenes, and writes a new table with their origins.

Start with `cut`. A source is decoded twice, from its first frame because seeking is not exact in
all files: to detect its scenes, and to write their clips (both `scenes.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gulliver.data.clips import Frame
from gulliver.errors import GulliverError
from gulliver.io.files import atomic_file, remove_leftovers, write_text
from gulliver.video.config import CutSettings
from gulliver.video.preparation.scanning import FACTS, FPS
from gulliver.video.preparation.scenes import (
    SUFFIXES,
    ClipWriter,
    SourceError,
    SourceScenes,
    clip_size,
    rate_of,
    slots,
    source_frames,
    survey,
)
from gulliver.video.preparation.scoring import GROUP, IN_THE_BOX
from gulliver.video.preparation.table import COLUMNS, Table, check_other, write_list
from gulliver.video.preparation.work import FileOutcome, in_processes, usable_cores, work_on

SOURCE = ("source", "source_first", "source_end")
"""Columns of a clip: path of its source, its first frame there, and the frame after its last."""
VERSION = 3
"""Version; changes when the same settings give other clips."""


# [Note: nothing is lost silently] Each frame of each source is in a clip, or in the list of skipped
# frames with the reason; an unreadable or duplicate source is listed as a whole. So each row of the
# table is accounted for.
#
# [Note: a job that is killed] The planned clips of a source are saved next to the clips as soon as
# they are known, with the settings and the size and modification time of the source. A clip gets
# its final name when it is complete, so the next run only writes clips in the plan that do not
# exist.
@dataclass(frozen=True)
class UnusedFrames:
    """Frames of a source that are in no clip; all frames if the range is None."""

    path: str
    first: int | None
    end: int | None
    reason: str

    @property
    def span(self) -> str:
        """Name of the source, with the frame range unless all frames are unused."""
        return self.path if self.first is None else f"{self.path}, frames {self.first}:{self.end}"


@dataclass(frozen=True)
class CutReport:
    """Clips, and all skipped parts."""

    table: Table
    sources: int
    left_out: list[UnusedFrames]
    # List of skipped frames; None if nothing was skipped.
    listed: Path | None


@dataclass(frozen=True)
class PlannedClip:
    """A clip to write."""

    name: str
    first: int
    # Frame after the last.
    end: int
    size: tuple[int, int]
    # Frames of the source that it shows, one per frame.
    frames: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Clips of a source, and its skipped ranges: (first frame, end, reason)."""

    frames: int
    rate: Fraction
    clips: tuple[PlannedClip, ...]
    left: tuple[tuple[int, int, str], ...]


def cut(
    table: Table, out: Path, settings: CutSettings | None = None, workers: int = 0
) -> CutReport:
    """Cuts the videos of a table into clips of one scene each.

    Clips are written to the folder NAME.clips next to the new table, without sound. A clip inherits
    the caption and the other columns of its source, except for measurements and scores. Results of
    an earlier run with these settings are reused.

    Args:
        table: table of videos.
        out: table to write; skipped frames are listed next to it, in NAME.left_out.csv.
        settings: how scenes are detected, and how clips are written.
        workers: number of processes; 0 uses one per core.

    Raises:
        GulliverError: PySceneDetect is not installed, the disk is full, or `out` is the input
            table.
    """
    settings, out = settings or CutSettings(), Path(out)
    _check(table, out, settings)
    folder = out.with_name(f"{out.stem}.clips")
    remove_leftovers(folder)
    clips = table.clips()
    # Of a file and links to it, the one with its own caption is used, then the file itself.
    ranked = sorted(range(len(clips)), key=lambda row: (*_rank(clips[row][1]), row))
    first = {_identity(clips[row][1]): row for row in reversed(ranked)}
    mine = [row for row, (_, path) in enumerate(clips) if first[_identity(path)] == row]
    work = partial(cut_source, folder=folder, settings=settings)
    with work_on(
        [clips[row] for row in mine],
        work,
        out,
        "cut",
        json.dumps(asdict(settings)),
        workers or usable_cores(),
        in_processes,
    ) as outcomes:
        found = dict(zip(mine, outcomes, strict=True))
        kept = [name for name in table.names if _is_inherited(name)]
        rows, left = [], []
        for row, (record, (name, path)) in enumerate(
            zip(table.data.to_pylist(), clips, strict=True)
        ):
            if row not in found:
                twin = clips[first[_identity(path)]][0]
                left.append(UnusedFrames(name, None, None, f"is the same file as {twin}"))
                continue
            cells = {name: record[name] for name in kept}
            cells["source"] = os.path.relpath(path.absolute(), out.absolute().parent)
            rows += [cells | row for row in _rows(found[row], folder)]
            left += _left(name, found[row], record)
        noted = ("note",) if any("note" in row for row in rows) else ()
        names = dict.fromkeys((*COLUMNS, *SOURCE, *kept, *noted))
        made = Table.of_rows(rows, out, list(names)).write()
        listed = write_left_out(out, left)
    sources = len({row["source"] for row in rows})
    return CutReport(made, sources, left, listed)


def _check(table: Table, out: Path, settings: CutSettings) -> None:
    check_other(out, table.path)
    if settings.max_seconds < settings.min_seconds:
        raise GulliverError(
            f"--max-seconds {settings.max_seconds:g} is less than --min-seconds "
            f"{settings.min_seconds:g}; no clip would be possible"
        )
    if settings.threshold is not None and settings.detector == "none":
        raise GulliverError("--threshold has no effect with --detector none; omit it")


def _identity(path: Path) -> str:
    return os.path.realpath(path)


def _rank(path: Path) -> tuple[bool, bool]:
    """Sort key of a path: whether it lacks its own caption file, and whether it is a link."""
    return not path.with_suffix(".txt").is_file(), _identity(path) != os.path.abspath(path)


# --- one source ----------------------------------------------------------------------------------


def cut_source(path: Path, folder: Path, settings: CutSettings) -> FileOutcome:
    try:
        plan = _planned(path, folder, settings)
        failed = write_clips(path, plan, folder, settings)
    except SourceError as error:
        return FileOutcome(problem=str(error))
    rate = float(plan.rate)
    cuts = [
        [clip.name, clip.first, clip.end, len(clip.frames), *clip.size, rate]
        for clip in plan.clips
        if clip.name not in failed
    ]
    left = [*plan.left]
    left += [(c.first, c.end, failed[c.name]) for c in plan.clips if c.name in failed]
    return FileOutcome({"frames": plan.frames, "cuts": cuts, "left": [list(one) for one in left]})


def _planned(path: Path, folder: Path, settings: CutSettings) -> Plan:
    """Reads or creates the plan of a source; clips of another plan are deleted."""
    stem = (
        f"{path.stem[:80]}-{hashlib.blake2b(_identity(path).encode(), digest_size=4).hexdigest()}"
    )
    file = folder / ".plans" / f"{stem}.json"
    key = _key(path, settings)
    known = _read_plan(file, key)
    if known is not None:
        return known
    footage = survey(path, settings)
    for old in folder.glob(f"{_literal(stem)}-[0-9]*"):
        old.unlink()
    plan = make_plan(footage, stem, settings)
    write_text(file, json.dumps({"key": key, **_plain(plan)}))
    return plan


def _literal(stem: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in stem)


def _key(path: Path, settings: CutSettings) -> str:
    try:
        found = path.stat()
    except OSError:
        raise SourceError("does not exist") from None
    return json.dumps([VERSION, found.st_size, found.st_mtime_ns, asdict(settings)])


def _plain(plan: Plan) -> dict[str, Any]:
    return {**asdict(plan), "rate": str(plan.rate)}


def _read_plan(file: Path, key: str) -> Plan | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if found.pop("key", None) != key:
        return None
    clips = tuple(
        PlannedClip(**{**one, "size": tuple(one["size"]), "frames": tuple(one["frames"])})
        for one in found["clips"]
    )
    left = tuple((first, end, reason) for first, end, reason in found["left"])
    return Plan(found["frames"], Fraction(found["rate"]), clips, left)


def make_plan(footage: SourceScenes, stem: str, settings: CutSettings) -> Plan:
    rate = rate_of(footage, settings)
    most = int(round(settings.max_seconds * float(rate), 6))
    slow, most = most < 1, max(1, most)
    # If no number of frames is within the limits, clips have the maximum length.
    least = min(most, max(1, int(np.ceil(round(settings.min_seconds * float(rate), 6)))))
    clips: list[PlannedClip] = []
    left: list[tuple[int, int, str]] = []
    for first, end, size in footage.scenes:
        shown = slots(footage, first, end, rate)
        bounds = pieces(len(shown), least, most)
        # Frames dropped between two clips at a lower rate belong to the earlier one.
        places = [int(shown[at]) if at < len(shown) else end for at in bounds]
        places[0] = first
        for number, (at, until) in enumerate(pairwise(bounds)):
            begin, stop = places[number], max(places[number + 1], int(shown[until - 1]) + 1)
            if slow:
                reason = f"each frame lasts {1 / float(rate):g} s, longer than --max-seconds"
                left.append((begin, stop, f"{reason} {settings.max_seconds:g}"))
                continue
            if until - at < least:
                reason = (
                    f"has {until - at} frames at {float(rate):g} per second, fewer than {least}"
                )
                left.append((begin, stop, f"{reason} required for a clip"))
                continue
            name = f"{stem}-{len(clips):04}{SUFFIXES[settings.codec]}"
            frames = tuple(map(int, shown[at:until]))
            clips.append(PlannedClip(name, begin, stop, clip_size(*size, settings), frames))
            if settings.fps is None:
                left += _unseen(begin, stop, frames, rate)
    plan = Plan(footage.frames, rate, tuple(clips), tuple(left))
    assert _covers(plan), "a frame would be lost silently"
    return plan


def _unseen(
    begin: int, stop: int, frames: tuple[int, ...], rate: Fraction
) -> list[tuple[int, int, str]]:
    ends = [begin - 1, *frames, stop]
    reason = f"lasts less than 1/{float(rate):g} s, the duration of a frame of its clip"
    return [(at + 1, after, reason) for at, after in pairwise(ends) if after > at + 1]


def _covers(plan: Plan) -> bool:
    spans = [(clip.first, clip.end) for clip in plan.clips]
    spans += [(first, end) for first, end, _ in plan.left]
    reached = 0
    for first, end in sorted(spans):
        if first > reached:
            return False
        reached = max(reached, end)
    return reached == plan.frames


def pieces(length: int, least: int, most: int) -> list[int]:
    """Divides a length evenly into pieces of at most `most`; returns their starts, and the end.

    If even pieces would be shorter than `least`, pieces have the maximum length and the rest is
    dropped.
    """
    count = -(-length // most)
    if length // count >= least or count == 1:
        return [round(length * n / count) for n in range(count + 1)]
    return [*range(0, length, most), length]


def write_clips(path: Path, plan: Plan, folder: Path, settings: CutSettings) -> dict[str, str]:
    import av

    failed: dict[str, str] = {}
    frames = _Frames(path)
    for clip in plan.clips:
        final = folder / clip.name
        if final.exists():
            continue
        try:
            with (
                _with_written_clips(folder),
                atomic_file(final) as partial_path,
                ClipWriter(partial_path, final.suffix, clip.size, plan.rate, settings) as writer,
            ):
                for number in clip.frames:
                    writer.add(frames.at(number))
        except av.FFmpegError as error:
            failed[clip.name] = f"cannot be encoded: {error}"
    return failed


@contextmanager
def _with_written_clips(folder: Path) -> Iterator[None]:
    try:
        yield
    except SourceError:
        raise
    except GulliverError as error:
        raise GulliverError(
            f"{error}; finished clips stay in {folder} without a table; run the same command to "
            "continue"
        ) from error


class _Frames:
    """Reads frames of a file in the order of their indices."""

    def __init__(self, path: Path) -> None:
        self._coming: Iterator[tuple[int, Frame]] = enumerate(source_frames(path))
        self._now: tuple[int, Frame] | None = None

    def at(self, number: int) -> Frame:
        while self._now is None or self._now[0] < number:
            self._now = next(self._coming, None)
            if self._now is None:
                raise SourceError("has fewer frames than before; it may have been changed")
        return self._now[1]


# --- the table -----------------------------------------------------------------------------------


def _is_inherited(name: str) -> bool:
    """Whether clips inherit a column of their source, which must not describe the whole file."""
    told = (*COLUMNS, *FACTS, *SOURCE, *IN_THE_BOX)
    plugged = {point.name for point in entry_points(group=GROUP)}
    return name == "text" or (name not in told and name not in plugged)


def _rows(outcome: FileOutcome, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "path": f"{folder.name}/{name}",
            "num_frames": frames,
            "height": height,
            "width": width,
            "aspect_ratio": height / width,
            "resolution": height * width,
            "fps": fps,
            "source_first": first,
            "source_end": end,
        }
        for name, first, end, frames, height, width, fps in outcome.values.get("cuts", ())
    ]
    for row in rows:
        if not FPS[0] <= row["fps"] <= FPS[1]:
            # As in a scan: training does not accept this rate.
            row |= {"note": f"has {row['fps']:g} frames per second", "fps": None}
    return rows


def _left(name: str, outcome: FileOutcome, record: dict[str, Any]) -> list[UnusedFrames]:
    # A truncated file may decode without an error: frames counted in the table that do not exist
    # are listed, too.
    if outcome.problem is not None:
        return [UnusedFrames(name, None, None, outcome.problem)]
    left = [UnusedFrames(name, *one) for one in outcome.values["left"]]
    frames, stated = outcome.values["frames"], record.get("num_frames")
    if stated is not None and stated > frames + 1:
        reason = f"missing: the table states {stated:g} frames, the file has {frames}"
        left.append(UnusedFrames(name, frames, int(stated), reason))
    return left


def write_left_out(table: Path, left: Sequence[UnusedFrames]) -> Path | None:
    path = table.with_name(f"{table.stem}.left_out.csv")
    if not left:
        path.unlink(missing_ok=True)
        return None
    rows = [(one.path, one.first, one.end, one.reason) for one in left]
    return write_list(path, ("path", "first", "end", "reason"), rows)
