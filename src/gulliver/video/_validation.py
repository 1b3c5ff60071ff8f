"""Validation: the loss of held-out clips at fixed noise levels, for each bucket.

A training loss jumps with the levels and the shapes that a step drew. Here clips, noise and levels
are the same every time, so that a difference between two validations is the model's. The published
trainers found this the one cheap figure that follows quality.

What it does not know: how the ranks share the model (`_training.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gulliver.comm import all_reduce
from gulliver.data import Bucket, Step, collate
from gulliver.jobs import Display
from gulliver.video._batches import BatchMaker, VideoBatch
from gulliver.video._config import ValidationConfig
from gulliver.video._run import Run

EPOCH = 2**40
"""Epoch that the noise of held-out clips is drawn for, which no training reaches."""
WINDOW = 0
"""Seed of the frames that are taken of a longer clip: always the first."""


@dataclass(frozen=True)
class Validation:
    """Held-out clips, and the way to their losses."""

    dataset: Any
    maker: BatchMaker
    config: ValidationConfig
    place: tuple[int, int]
    batch_size: int

    def losses(
        self, loss_sum: Callable[[VideoBatch], Tensor], ranks_of_a_model: int
    ) -> dict[str, list[float]]:
        """Computes the mean loss of each bucket's clips at each level; every rank calls it."""
        buckets = self._members()
        levels, device = self.config.levels, self.maker.device
        totals = torch.zeros(len(buckets), levels + 1, dtype=torch.float64, device=device)
        for row, (bucket, members) in enumerate(buckets.items()):
            for batch in self._batches(bucket, members):
                for number in range(levels):
                    totals[row, number] += loss_sum(self._at(batch, number)).double()
                totals[row, -1] += len(batch.latents) * batch.weight
        all_reduce(totals)
        totals /= ranks_of_a_model
        # A bucket of which no clip could be read has no loss.
        return {
            str(bucket): (row[:-1] / row[-1]).tolist()
            for bucket, row in zip(buckets, totals, strict=True)
            if row[-1]
        }

    def report(
        self,
        found: dict[str, list[float]],
        step: int,
        run: Run,
        display: Display,
        scalars: Callable[[str, float, int], None],
    ) -> None:
        """Writes losses to the run's log and to TensorBoard, and prints their means."""
        means = {bucket: sum(losses) / len(losses) for bucket, losses in found.items()}
        loss = sum(means.values()) / len(means)
        run.validation.append({"step": step, "loss": loss, "buckets": found})
        told = ", ".join(f"{bucket} {mean:.4f}" for bucket, mean in means.items())
        display.console.print(f"step {step}: held-out loss {loss:.4f} ({told})")
        for bucket, mean in means.items():
            scalars(f"validation/{bucket}", mean, step)

    def _members(self) -> dict[Bucket, list[int]]:
        members: dict[Bucket, list[int]] = {}
        for index in range(len(self.dataset)):
            bucket = self.dataset.bucket_of(index)
            if bucket is not None:
                members.setdefault(bucket, []).append(index)
        return {bucket: members[bucket][: self.config.clips] for bucket in sorted(members)}

    def _batches(self, bucket: Bucket, members: list[int]) -> Iterator[VideoBatch]:
        """Yields this rank's share of each batch; all ranks have as many."""
        rank, ranks = self.place
        for start in range(0, len(members), self.batch_size):
            part = members[start : start + self.batch_size]
            first, end = (len(part) * n // ranks for n in (rank, rank + 1))
            step = Step(bucket, part[first:end], first, len(part), EPOCH, start)
            clips = collate(self.dataset, step.indices, [WINDOW] * (end - first), bucket)
            yield self.maker.make(step, clips, {})

    def _at(self, batch: VideoBatch, number: int) -> VideoBatch:
        """Puts all samples of a batch at a level, with their captions and no given frames."""
        level = (number + 1) / (self.config.levels + 1) * self.maker.flow.num_timesteps
        return replace(
            batch,
            timesteps=torch.full_like(batch.timesteps, level),
            drop_caption=torch.zeros_like(batch.drop_caption),
            generate=None,
        )
