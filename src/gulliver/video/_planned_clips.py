"""Clips of planned steps: read ahead, and left out on all ranks alike where one cannot be read.

Read `StepClips.begin`; `ClipOrder` says which row of a table a planner's sample is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gulliver.comm import gather_objects
from gulliver.data import BrokenClip, Bucket, BucketConfig, Clip, ClipTable, StepPlan
from gulliver.jobs import derive

READERS = 2
"""Threads of a rank that read clips."""
Read = Clip | BrokenClip


# [Note: clips that break] The gradient of a step is that of the mean over the clips that could be
# read, and every micro-batch is weighed when its backward begins. So each rank reads all clips of
# its part of a step first, and all ranks tell each other what they could not read: the ranks of a
# group then leave the same clips out, and all know how many are left. While a step runs, two
# threads read this rank's clips of the next one. What it does not know: how a step is weighed and
# run (`gulliver.booster`), and when so many are lost that a run ends (`_skipped.py`).
class ClipOrder:
    """Numbers of a planner's samples: rows of a data set, or of those that an epoch deals out."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self.is_dealt = isinstance(getattr(dataset, "buckets", None), BucketConfig)
        """Whether every epoch deals the rows to other buckets, and leaves some out."""
        self.epoch = lru_cache(maxsize=3)(self._epoch)

    def _epoch(self, epoch: int) -> tuple[list[int], list[Bucket]]:
        """Rows of an epoch in their order, and the bucket of each."""
        if not self.is_dealt:
            buckets = [self._dataset.bucket_of(row) for row in range(len(self._dataset))]
            return list(range(len(buckets))), buckets
        dealt = self._dataset.deal(epoch)
        rows = [row for row, bucket in enumerate(dealt) if bucket is not None]
        draw = np.random.Generator(np.random.Philox(key=[abs(self._seed), epoch]))
        rows = draw.permutation(np.array(rows, dtype=np.int64)).tolist()
        return rows, [dealt[row] for row in rows]

    def buckets(self) -> list[Bucket]:
        """All buckets that a sample of any epoch may have."""
        if not self.is_dealt:
            return list(dict.fromkeys(self.epoch(0)[1]))
        config, interval = self._dataset.buckets, self._dataset.frame_interval
        sizes = {(p.frames, p.height, p.width): None for p in self._probes()}
        return list(dict.fromkeys(b for size in sizes for b in config.possible(*size, interval)))

    def row(self, epoch: int, index: int) -> tuple[int, Bucket]:
        """Row and bucket of a planner's sample."""
        rows, buckets = self.epoch(epoch)
        return rows[index], buckets[index]

    @property
    def digest(self) -> str:
        """Digest of what epochs are dealt from: ranks and resumed runs must have the same."""
        told = [self._seed, *map(repr, self._probes()), *map(repr, self._dataset.buckets.rules)]
        return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()

    def _probes(self) -> Iterable[Any]:
        return (row.probe for row in self._dataset.rows)


class StepClips:
    """This rank's clips of one planned step after the other."""

    def __init__(self, dataset: Any, order: ClipOrder, seed: int) -> None:
        self._dataset, self._order, self._seed = dataset, order, seed
        self._pool = ThreadPoolExecutor(READERS, "gulliver-clips")
        self._coming: dict[tuple[int, int], Future[Read]] = {}
        self._clips: dict[int, Read] = {}
        # Samples of the present step that some rank could not read.
        self.lost: frozenset[int] = frozenset()

    def begin(self, rank: int, plan: StepPlan, upcoming: StepPlan | None) -> None:
        """Reads a step, agrees with all ranks on what is lost, and begins to read the next one."""
        now = self._asked(plan, rank)
        self._clips = {index: future.result() for (_, index), future in now.items()}
        lost = [n for n, clip in self._clips.items() if isinstance(clip, BrokenClip)]
        if isinstance(self._dataset, ClipTable):  # what is made cannot break
            lost = [index for found in gather_objects(lost) for index in found]
        self.lost = frozenset(lost)
        self._coming = {} if upcoming is None else self._asked(upcoming, rank)

    def _asked(self, plan: StepPlan, rank: int) -> dict[tuple[int, int], Future[Read]]:
        """This rank's clips of a step as they are read; what was read for nothing is dropped."""
        groups = plan.groups_of(rank)
        keys = [
            (plan.epoch, index)
            for group in groups
            for batch in group.micro_batches
            for index in batch.samples
        ]
        found = {k: self._coming.pop(k, None) or self._pool.submit(self._read, *k) for k in keys}
        for future in self._coming.values():
            future.cancel()
        return found

    def _read(self, epoch: int, index: int) -> Read:
        row, bucket = self._order.row(epoch, index)
        if not isinstance(self._dataset, ClipTable):
            return self._dataset[row]
        return self._dataset.read(row, derive(self._seed, 8, epoch, row), bucket)

    def __getitem__(self, index: int) -> Read:
        """Gives a clip of the present step away: it is kept no longer than it is needed."""
        clip = self._clips.pop(index)
        if index in self.lost and isinstance(clip, Clip):
            return BrokenClip(clip.index, "another rank cannot read it")
        return clip

    def weight(self, index: int) -> float:
        """What a sample of the present step counts: 1, or 0 where it is lost."""
        return float(index not in self.lost)

    def close(self) -> None:
        """Ends the reading ahead."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def stack_clips(clips: Sequence[Read]) -> dict[str, Any]:
    """Makes a micro-batch of the clips that could be read."""
    read = [clip for clip in clips if isinstance(clip, Clip)]
    return {
        "videos": torch.stack([clip.video for clip in read]) if read else None,
        "captions": [clip.caption for clip in read],
        "fps": torch.tensor([clip.fps for clip in read]),
        "rows": [clip.index for clip in read],
    }
