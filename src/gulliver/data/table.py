"""A CSV or Parquet table of video and image files with captions, decoded with PyAV.

Unusable rows are counted and listed with their reason, never replaced: files that cannot be opened
when the table is read, and files found to be corrupt later (`BrokenClip`).
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.data.buckets import ENOUGH_PIXELS, BucketConfig, ClipSizes
from gulliver.data.clips import (
    STILL_FPS,
    BrokenClip,
    Bucket,
    Clip,
    Frame,
    rate_shown,
    stacked,
    upright_frames,
)
from gulliver.data.records import NUMBERS, Record, check_scores, read_records, with_scores
from gulliver.errors import GulliverError

SIZES = ("frames", "height", "width")


@dataclass(frozen=True)
class Probe:
    """Properties of a file: frames, height, width, and frames per second."""

    frames: int
    height: int
    width: int
    fps: float


@dataclass(frozen=True)
class TableRow:
    """A usable row of the table; `name` is its path in the table.

    `bucket` is its bucket in the first epoch, or None if it is left out.
    """

    name: str
    path: Path
    text: str
    probe: Probe
    bucket: Bucket | None


class ClipTable:
    """Clips listed in a table with the columns `path` and `text`."""

    # With the optional columns num_frames, height, width and fps, files need not be opened at the
    # start; height and width are those of the upright image. Paths are relative to the table's
    # folder.

    encoded = False
    """Whether the clips are already encoded as latents."""

    def __init__(
        self,
        table: Path,
        buckets: Sequence[Bucket] | BucketConfig,
        frame_interval: int = 1,
        progress: Callable[[int, int], None] | None = None,
        scores: str = "none",
        seed: int = 0,
        windows: int = 0,
    ) -> None:
        self.table, self.frame_interval, self.scores = Path(table), frame_interval, scores
        self.buckets = buckets if isinstance(buckets, BucketConfig) else tuple(buckets)
        self.seed, self.windows = seed, windows
        # Rows that are used.
        self.rows: list[TableRow] = []
        # Name of each skipped row, with the reason.
        self.skipped: list[tuple[str, str]] = []
        self._broken: dict[int, str] = {}
        self._misstated: dict[int, str] = {}
        records = read_records(self.table)
        check_scores(self.table, records, scores)
        for number, record in enumerate(records):
            self._add(record)
            if progress is not None:
                progress(number + 1, len(records))
        if not self.rows:
            first = f"; e.g., {self.skipped[0][0]} ({self.skipped[0][1]})" if self.skipped else ""
            raise GulliverError(f"{table} has no row that can be used{first}")
        self._deal_rows()

    def hold_out(self, share: float, seed: int) -> ClipTable:
        """Moves a share of the rows into a new table, and returns it."""
        taken = [_chance(row.name, seed) < share for row in self.rows]
        if len(set(taken)) < 2:
            which = "all" if all(taken) else "none"
            raise GulliverError(
                f"a share of {share:g} holds out {which} of the {len(taken)} clips; choose another "
                "share"
            )
        held = copy.copy(self)
        held.rows = [row for row, out in zip(self.rows, taken, strict=True) if out]
        self.rows = [row for row, out in zip(self.rows, taken, strict=True) if not out]
        held._broken, held._misstated = {}, {}
        for table in (self, held):
            table._deal_rows()
        return held

    def _deal_rows(self) -> None:
        dealt = zip(self.rows, self.assign(0), strict=True)
        self.rows = [replace(row, bucket=bucket) for row, bucket in dealt]

    def _add(self, record: Record) -> None:
        name = str(record.get("path") or "").strip()
        text = str(record.get("text") or "").strip()
        if not name or not any(letter.isalnum() for letter in text):
            self.skipped.append((name or "(no path)", "no caption" if name else "no path"))
            return
        path = (self.table if self.table.is_dir() else self.table.parent) / name
        try:
            probe = _stated(record, path) or probe_file(path)
            bucket = self._choose(probe)
        except GulliverError as error:
            self.skipped.append((name, str(error)))
            return
        except OSError as error:
            # Such as a name that is too long for the file system.
            self.skipped.append((f"{name[:80]}...", f"cannot be opened: {error.strerror}"))
            return
        self.rows.append(
            TableRow(name, path, with_scores(text, record, self.scores), probe, bucket)
        )

    def _choose(self, probe: Probe) -> Bucket | None:
        """Chooses a clip's bucket, unless buckets are assigned per epoch."""
        if not isinstance(self.buckets, BucketConfig):
            return choose_bucket(probe, self.buckets, self.frame_interval)
        size = probe.frames, probe.height, probe.width
        refusal = self.buckets.refusal(*size, self.frame_interval)
        if refusal is not None:
            raise GulliverError(refusal)
        return None

    def assign(self, epoch: int) -> list[Bucket | None]:
        """Assigns rows to the buckets of an epoch; None for rows that are left out."""
        if not isinstance(self.buckets, BucketConfig):
            return [row.bucket for row in self.rows]
        probes = [row.probe for row in self.rows]
        sizes = ClipSizes(*(np.array([getattr(p, side) for p in probes]) for side in SIZES))
        return self.buckets.buckets(sizes, self.frame_interval, self.seed, epoch)

    def samples(self, index: int) -> list[tuple[Bucket, int]]:
        """Lists the windows of a row as (bucket, seed), for each bucket that it may be in."""
        if not self.windows:
            raise GulliverError(
                "the number of windows is not set, so they may begin at any frame and cannot be "
                "listed; set it"
            )
        row = self.rows[index]
        if isinstance(self.buckets, BucketConfig):
            size = row.probe.frames, row.probe.height, row.probe.width
            buckets = self.buckets.possible(*size, self.frame_interval)
        else:
            buckets = [row.bucket] if row.bucket else []
        return [
            (bucket, window)
            for bucket in buckets
            for window in range(min(self.windows, self._starts(row, bucket.frames)))
        ]

    def first_frame(self, index: int, bucket: Bucket, seed: int) -> int:
        return _first_frame(seed, self._starts(self.rows[index], bucket.frames), self.windows)

    def _starts(self, row: TableRow, wanted: int) -> int:
        return max(1, row.probe.frames - span_of(wanted, self.frame_interval) + 1)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def broken(self) -> list[tuple[str, str]]:
        """Name and latest error of each file that could not be read."""
        return [(self.rows[index].name, reason) for index, reason in self._broken.items()]

    @property
    def misdescribed(self) -> list[tuple[str, str]]:
        """Files whose content differs from the table, and the difference."""
        return [(self.rows[index].name, stated) for index, stated in self._misstated.items()]

    @property
    def fingerprint(self) -> str:
        """Digest of the usable rows in order, on which saved positions depend."""
        digest = hashlib.blake2b(digest_size=8)
        for row in self.rows:
            # Not the path, which changes when the folder is moved, nor the derived bucket.
            digest.update(repr((row.name, row.text, astuple(row.probe))).encode())
        return digest.hexdigest()

    def check_rows(self, fingerprint: str) -> None:
        if fingerprint != self.fingerprint:
            raise GulliverError(
                f"the rows of {self.table} have changed since the run started: restore them, or "
                "start a new run with another --out"
            )

    def bucket_of(self, index: int) -> Bucket | None:
        return self.rows[index].bucket

    def caption(self, index: int) -> str:
        return self.rows[index].text

    @property
    def fps(self) -> float:
        """Median frame rate of videos, or of stills if there are no videos."""
        clips = [row for row in self.rows if row.probe.frames > 1]
        return median(row.probe.fps / self.frame_interval for row in clips) if clips else STILL_FPS

    def __getitem__(self, index: int) -> Clip | BrokenClip:
        """Reads a clip from the first frames of a row."""
        return self.read(index, 0)

    def read(self, index: int, seed: int, bucket: Bucket | None = None) -> Clip | BrokenClip:
        """Reads the window that a seed selects; 0 selects the first frames."""
        row = self.rows[index]
        bucket = bucket or row.bucket
        if bucket is None:
            raise GulliverError(f"{row.name} is in no bucket of the first epoch: pass a bucket")
        try:
            content = self._content(index, bucket, seed)
        except GulliverError as error:
            self._broken[index] = str(error)
            return BrokenClip(index, str(error))
        fps = STILL_FPS if bucket.frames == 1 else row.probe.fps / self.frame_interval
        return Clip(content, row.text, fps, index)

    def _content(self, index: int, bucket: Bucket, seed: int) -> Tensor:
        """Reads the pixels of a window, [3, T, H, W]."""
        row = self.rows[index]
        path, stated = row.path, (bucket.frames, self.frame_interval)
        try:
            frames = decode(path, *stated, self.first_frame(index, bucket, seed))
        except EndOfClip as end:
            # Tables and headers are often off by a frame or two: the existing frames are used.
            if end.frames < end.needed:
                raise
            starts = end.frames - end.needed + 1
            frames = decode(path, *stated, _first_frame(seed, starts, self.windows))
            self._misstated[index] = f"{end.frames} frames, but the table has {row.probe.frames}"
        self._check_size(index, bucket, *frames.shape[2:])
        return resize_and_crop(frames, bucket)

    def _check_size(self, index: int, bucket: Bucket, height: int, width: int) -> None:
        """Records a size that differs from the table; rejects sizes too small for the bucket."""
        probe = self.rows[index].probe
        if (height, width) == (probe.height, probe.width):
            return
        stated = f"{height}x{width}, but the table has {probe.height}x{probe.width}"
        if height * width < ENOUGH_PIXELS * bucket.height * bucket.width:
            raise GulliverError(f"is {stated}: too small for {bucket}")
        self._misstated[index] = stated

    def report(self) -> str:
        lines = [f"{len(self.rows)} clips used, {len(self.skipped)} skipped"]
        lines += [f"  {name}: {reason}" for name, reason in self.skipped[:20]]
        if len(self.skipped) > 20:
            lines.append(f"  and {len(self.skipped) - 20} more")
        if isinstance(self.buckets, BucketConfig):
            spread = Counter(str(row.bucket) for row in self.rows if row.bucket)
            stated = ", ".join(f"{name}: {count}" for name, count in spread.most_common())
            out = len(self.rows) - spread.total()
            lines.append(f"the first epoch has {spread.total()} of them ({stated}), {out} left out")
        return "\n".join(lines)


def _first_frame(seed: int, starts: int, windows: int) -> int:
    """Chooses one of `starts` frames, or of `windows` evenly spaced frames."""
    count = min(windows or starts, starts)
    return seed % count * (starts - 1) // max(1, count - 1)


def _chance(name: str, seed: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") / 2**56


def _stated(record: Record, path: Path) -> Probe | None:
    """Returns a file's properties from the table; None if incomplete."""
    values = [record[name] for name in NUMBERS]
    stated = [value for value in values if isinstance(value, float)]
    if len(stated) < len(NUMBERS) or not path.is_file():
        return None
    frames, height, width, fps = stated
    return Probe(int(frames), int(height), int(width), fps)


def probe_file(path: Path) -> Probe:
    """Opens a file and counts its frames; sizes are those of the upright image."""
    times: list[float] = []
    counted, size, rate = 0, (0, 0), 0.0
    for frame in upright_frames(path):
        counted, size, rate = counted + 1, (frame.height, frame.width), frame.rate
        times += [] if frame.decoded.time is None else [frame.decoded.time]
    if counted == 0:
        raise GulliverError("has no frames")
    span = max(times) - min(times) if times else 0.0
    return Probe(counted, *size, rate_shown(rate, len(times), span) or STILL_FPS)


def choose_bucket(probe: Probe, buckets: tuple[Bucket, ...], interval: int) -> Bucket:
    """Chooses, among the buckets that a clip fills, by pixels, then frames, then aspect ratio."""
    long_enough = [b for b in buckets if probe.frames >= span_of(b.frames, interval)]
    if probe.frames > 1:
        # A video also fills buckets for stills, but is better used as a video.
        long_enough = [b for b in long_enough if b.frames > 1] or long_enough
    if not long_enough:
        raise GulliverError(f"{probe.frames} frames are too few for every bucket")
    pixels = probe.height * probe.width
    large_enough = [b for b in long_enough if pixels >= ENOUGH_PIXELS * b.height * b.width]
    if not large_enough:
        raise GulliverError(f"{probe.height}x{probe.width} is too small for every bucket")

    def rank(bucket: Bucket) -> tuple[float, float, float]:
        mismatch = abs(np.log(bucket.width / bucket.height * probe.height / probe.width))
        size = round(float(np.log2(bucket.height * bucket.width)))
        return size, bucket.frames, -float(mismatch)

    return max(large_enough, key=rank)


def decode(path: Path, frames: int, interval: int, start: int = 0) -> Tensor:
    """Decodes every `interval`-th frame from `start`, [frames, 3, H, W] in [-1, 1]."""
    found: list[Frame] = []
    seen = 0
    # Decoded from the first frame, even for a late window: seeking is exact in some files only.
    for frame in upright_frames(path):
        if seen >= start and (seen - start) % interval == 0:
            found.append(frame)
        seen += 1
        if len(found) == frames:
            return torch.from_numpy(stacked(found)).permute(0, 3, 1, 2).float() / 127.5 - 1
    raise EndOfClip(seen, span_of(frames, interval))


class EndOfClip(GulliverError):
    """A clip has fewer frames than expected."""

    def __init__(self, frames: int, needed: int) -> None:
        super().__init__(f"has {frames} of the {needed} expected frames")
        self.frames, self.needed = frames, needed


def span_of(frames: int, interval: int) -> int:
    return (frames - 1) * interval + 1


def resize_and_crop(frames: Tensor, bucket: Bucket) -> Tensor:
    """Scales [T, 3, H, W] to cover a bucket, and center-crops it to [3, T, height, width]."""
    height, width = frames.shape[2:]
    ratio = max(bucket.height / height, bucket.width / width)
    size = (max(bucket.height, round(height * ratio)), max(bucket.width, round(width * ratio)))
    if size != (height, width):
        frames = F.interpolate(
            frames, size=size, mode="bilinear", antialias=True, align_corners=False
        )
    top, left = (size[0] - bucket.height) // 2, (size[1] - bucket.width) // 2
    cut = frames[:, :, top : top + bucket.height, left : left + bucket.width]
    return cut.transpose(0, 1).contiguous()
