"""Training clips and held-out clips for an autoencoder.

    table -> ClipWindows (frames or clips are held out) -> MixedClips (pictures, repeats)

All randomness depends only on a seed, the epoch and the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gulliver.data.clips import BrokenClip, Bucket, Clip, stacked, upright_frames
from gulliver.data.table import ClipTable, resize_and_crop, span_of
from gulliver.errors import GulliverError
from gulliver.jobs.log import derive
from gulliver.video.autoencoder_config import AutoencoderDataConfig
from gulliver.video.digits import MovingDigits

DECODED_TOGETHER = 16
"""Frames scaled per batch when clips are kept in memory."""


class FrameWindow(NamedTuple):
    """Windows of a table row's frames; they start at `first` to `first + starts - 1`."""

    row: int
    first: int
    starts: int


class ClipWindows:
    """Dataset of frame windows of a table's clips; the seed selects where a window starts."""

    def __init__(
        self,
        table: ClipTable,
        windows: Sequence[FrameWindow],
        kept: dict[int, Tensor | BrokenClip] | None = None,
    ) -> None:
        self.table, self.windows, self._kept = table, windows, kept

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def broken(self) -> list[tuple[str, str]]:
        kept = {} if self._kept is None else self._kept
        lost = [
            (self.table.rows[row].name, clip.reason)
            for row, clip in kept.items()
            if isinstance(clip, BrokenClip)
        ]
        return [*self.table.broken, *lost]

    def bucket_of(self, index: int) -> Bucket:
        bucket = self.table.bucket_of(self.windows[index].row)
        assert bucket is not None, "windows belong to rows with a bucket"
        return bucket

    def __getitem__(self, index: int) -> Clip | BrokenClip:
        return self.read(index, 0)

    def read(self, index: int, seed: int) -> Clip | BrokenClip:
        """Reads a sample; its window starts at `seed` modulo the number of possible starts."""
        window = self.windows[index]
        start = window.first + seed % window.starts
        if self._kept is None:
            return self.table.read(window.row, start)
        if window.row not in self._kept:
            self._kept[window.row] = self._decoded(window.row, self.bucket_of(index))
        clip = self._kept[window.row]
        if isinstance(clip, BrokenClip):
            return BrokenClip(index, clip.reason)
        row, interval = self.table.rows[window.row], self.table.frame_interval
        wanted = self.bucket_of(index).frames
        frames = clip[:, start : start + span_of(wanted, interval) : interval]
        if frames.shape[1] < wanted:
            return BrokenClip(index, f"has {clip.shape[1]} frames, fewer than counted before")
        return Clip(frames.float() / 127.5 - 1, row.text, row.probe.fps / interval, index)

    def _decoded(self, number: int, bucket: Bucket) -> Tensor | BrokenClip:
        row, parts = self.table.rows[number], []
        try:
            frames = upright_frames(row.path)
            while some := list(islice(frames, DECODED_TOGETHER)):
                pixels = torch.from_numpy(stacked(some)).permute(0, 3, 1, 2).float() / 127.5 - 1
                scaled = resize_and_crop(pixels, bucket).clamp(-1, 1)
                parts.append(((scaled + 1) * 127.5).round().to(torch.uint8))
        except GulliverError as error:
            return BrokenClip(number, str(error))
        return torch.cat(parts, dim=1)


class MixedClips:
    """Repeats the clips of another dataset; a fraction of the samples are single frames."""

    def __init__(self, dataset: Any, image_share: float, repeats: int, seed: int) -> None:
        self.dataset, self.repeats = dataset, repeats
        count = len(self)
        order = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(count)
        self._pictures = np.zeros(count, dtype=bool)
        self._pictures[order[: round(image_share * count)]] = True

    def __len__(self) -> int:
        return len(self.dataset) * self.repeats

    @property
    def broken(self) -> list[tuple[str, str]]:
        return getattr(self.dataset, "broken", [])

    def bucket_of(self, index: int) -> Bucket:
        bucket = self.dataset.bucket_of(index % len(self.dataset))
        return Bucket(1, bucket.height, bucket.width) if self._pictures[index] else bucket

    def __getitem__(self, index: int) -> Clip | BrokenClip:
        return self.read(index, 0)

    def read(self, index: int, seed: int) -> Clip | BrokenClip:
        """Reads a sample; the seed selects the clip's frame."""
        own = index % len(self.dataset)
        windowed = hasattr(self.dataset, "read")
        clip = self.dataset.read(own, seed) if windowed else self.dataset[own]
        if isinstance(clip, BrokenClip):
            return BrokenClip(index, clip.reason)
        video = clip.video
        if self._pictures[index]:
            frame = derive(seed, 1) % video.shape[1]
            video = video[:, frame : frame + 1]
        return Clip(video, clip.caption, clip.fps, index)


class Sources(NamedTuple):
    """Training clips, held-out clips with a description, and their table."""

    training: Any
    held_out: Any
    name: str
    table: ClipTable | None = None


def make_sources(dataset: Any, config: AutoencoderDataConfig, seed: int) -> Sources:
    if isinstance(dataset, ClipTable):
        training, held_out = split_table(dataset, config, seed)
        clips = f"{len({window.row for window in held_out.windows})} clips"
        name = f"{len(held_out)} held-out windows of {clips}"
        sources = Sources(training, held_out, name, dataset)
    else:
        held = MovingDigits("heldout", 256, shapes=dict.fromkeys(dataset.buckets, 1.0))
        sources = Sources(dataset, held, "held-out handwriting")
    if not config.image_share and config.repeats == 1:
        return sources
    mixed = MixedClips(sources.training, config.image_share, config.repeats, seed % 2**63)
    return sources._replace(training=mixed)


def split_table(
    table: ClipTable, config: AutoencoderDataConfig, seed: int
) -> tuple[ClipWindows, ClipWindows]:
    """Holds out whole clips of a table, and the last frames of the others."""
    # A video too short for a sample on both sides of the cut is used for training only.
    draw = np.random.Generator(np.random.Philox(key=[seed % 2**63, 1]))
    count = round(config.held_out_clips * len(table))
    left_out = set(draw.permutation(len(table))[:count].tolist())
    training: list[FrameWindow] = []
    held_out: list[FrameWindow] = []
    for number, row in enumerate(table.rows):
        if row.bucket is None:
            continue
        span, frames = span_of(row.bucket.frames, table.frame_interval), row.probe.frames
        cut = 0 if number in left_out else round(frames * (1 - config.held_out_frames))
        if cut and (cut < span or frames - cut < span):
            cut = frames
        if cut:
            training.append(FrameWindow(number, 0, max(1, cut - span + 1)))
        held_out += [FrameWindow(number, at, 1) for at in range(cut, frames - span + 1, span)]
    if not training or not held_out:
        what = "held out" if training else "left for training"
        right = (
            "--data.held-out-clips 0.1, which holds out whole clips"
            if training
            else "smaller values"
        )
        raise GulliverError(
            f"no clips would be {what}: with --data.held-out-clips {config.held_out_clips:g} and "
            f"--data.held-out-frames {config.held_out_frames:g}, {len(table)} clips cannot be "
            f"split; use {right}"
        )
    kept: dict[int, Tensor | BrokenClip] | None = {} if config.in_memory else None
    return ClipWindows(table, training, kept), ClipWindows(table, held_out, kept)
