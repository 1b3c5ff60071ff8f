"""Makes training batches of clips: latents, noise, noise levels, captions, masks.

Everything random here is a function of (seed, step) or of (seed, epoch, sample), never of the rank:
the same samples meet the same noise on any number of ranks, and a resumed run needs no saved
generator. What it does not know: how the gradient is made or shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gulliver.data import BucketSampler, ClipBatch, DataLoader, Step, collate
from gulliver.jobs import derive
from gulliver.models import VideoAutoencoder
from gulliver.video._config import FlowConfig
from gulliver.video._masks import MaskStrategies
from gulliver.video._rectified_flow import RectifiedFlow
from gulliver.video._words import WordEncoder


@dataclass(frozen=True)
class Batch:
    """One rank's share of an optimizer step.

    `latents` and `noise` are [B, C, T, H, W]; `timesteps` [B]; `captions` [B, 1, L, D] with
    `caption_mask` [B, L]; `drop_caption` [B]; `generate` [B, T] is False for given frames, or None
    when all are generated. `total` counts the samples of all ranks, `skipped` those of this share
    that could not be read. A rank without a sample in this step has one sample of zeros, whose
    `weight` is 0.
    """

    latents: Tensor
    noise: Tensor
    timesteps: Tensor
    captions: Tensor
    caption_mask: Tensor
    drop_caption: Tensor
    generate: Tensor | None
    fps: Tensor
    height: Tensor
    width: Tensor
    total: int
    skipped: int
    epoch: int
    weight: float
    sampler_state: dict[str, Any]

    def model_inputs(self, part: slice | Tensor) -> dict[str, Any]:
        """Returns the conditions of the samples in `part`, as the model's keyword arguments."""
        return {
            "y": self.captions[part],
            "mask": self.caption_mask[part],
            "x_mask": None if self.generate is None else self.generate[part],
            "fps": self.fps[part],
            "height": self.height[part],
            "width": self.width[part],
            "drop_caption": self.drop_caption[part],
        }


@dataclass(frozen=True)
class _Steps:
    """A data set of clips, read a step at a time; the epoch decides which frames are taken."""

    dataset: Any
    seed: int

    def __len__(self) -> int:
        return len(self.dataset)

    def read_step(self, step: Step) -> tuple[Step, ClipBatch]:
        windows = [derive(self.seed, 8, step.epoch, index) for index in step.indices]
        return step, collate(self.dataset, step.indices, windows, step.bucket)


def _as_read(batch: tuple[Step, ClipBatch]) -> tuple[Step, ClipBatch]:
    return batch


@dataclass(frozen=True)
class BatchMaker:
    """Makes a `Batch` of each step of a sampler."""

    dataset: Any
    sampler: BucketSampler
    autoencoder: VideoAutoencoder
    text: WordEncoder
    flow: RectifiedFlow
    config: FlowConfig
    seed: int
    device: torch.device
    agree: Callable[[list[int]], list[int]] | None = None
    """Function from the positions in a share that this rank could read to those that every rank
    with the same share could read; None where no two ranks have the same."""

    @cached_property
    def _masks(self) -> MaskStrategies:
        return MaskStrategies.of(self.config)

    def batches(self) -> Iterator[Batch]:
        """Yields batches without end, epoch after epoch; clips are made ahead in a thread."""
        loader = DataLoader(
            _Steps(self.dataset, self.seed),
            batch_sampler=self.sampler,
            collate_fn=_as_read,
            device=self.device,
            threaded=True,
        )
        while True:
            for step, (videos, captions, fps, kept, _) in loader:
                # The position after this batch; the thread is ahead of it.
                state = loader.state_dict()["inner"]
                if self.agree is not None:
                    # A file may go between two ranks' looks at it.
                    common = self.agree(kept)
                    rows = [row for row, position in enumerate(kept) if position in common]
                    if len(rows) < len(kept):
                        videos = videos[rows] if rows else None
                        captions, fps = [captions[row] for row in rows], fps[rows]
                        kept = [kept[row] for row in rows]
                yield self._batch(step, videos, captions, fps, kept, state)

    @torch.no_grad()
    def _batch(
        self,
        step: Step,
        videos: Tensor | None,
        captions: list[str],
        fps: Tensor,
        kept: list[int],
        state: dict[str, Any],
    ) -> Batch:
        bucket = step.bucket
        shape = self.autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
        if videos is None:
            latents = torch.zeros(1, *shape, device=self.device)
            captions, fps = ["nothing"], torch.full((1,), 8.0)
            kept = [0]
        else:
            latents = self.autoencoder.encode(videos.to(self.device))
        y, y_mask = self.text.encode(captions)
        timesteps, drop, generate = self._draws(step, shape[1])
        rows = torch.tensor([step.offset + position for position in kept]).clamp(max=step.total - 1)
        count = len(rows)
        return Batch(
            latents=latents,
            noise=self._noise(step, kept, shape).to(self.device),
            timesteps=timesteps[rows].to(self.device),
            captions=y.to(self.device),
            caption_mask=y_mask.to(self.device),
            drop_caption=drop[rows].to(self.device),
            generate=None if generate is None else generate[rows].to(self.device),
            fps=fps.to(self.device),
            height=torch.full((count,), float(bucket.height), device=self.device),
            width=torch.full((count,), float(bucket.width), device=self.device),
            total=step.total,
            skipped=len(step.indices) - (0 if videos is None else len(videos)),
            epoch=step.epoch,
            weight=0.0 if videos is None else 1.0,
            sampler_state=state,
        )

    def _noise(self, step: Step, kept: list[int], shape: tuple[int, ...]) -> Tensor:
        """Draws from a generator per sample, whose noise must not depend on its neighbours."""
        rows = []
        for position in kept:
            index = step.indices[position] if len(step.indices) else -1
            generator = torch.Generator().manual_seed(derive(self.seed, 1, step.epoch, int(index)))
            rows.append(torch.randn(shape, generator=generator))
        return torch.stack(rows)

    def _draws(self, step: Step, frames: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Draws levels [N], dropped captions [N] and masks [N, T] for the samples of all ranks."""
        generator = torch.Generator().manual_seed(derive(self.seed, 2, step.epoch, step.number))
        bucket = step.bucket
        timesteps = self.flow.sample_timesteps(
            step.total,
            generator=generator,
            height=bucket.height,
            width=bucket.width,
            num_frames=frames,
        )
        drop = torch.rand(step.total, generator=generator) < self.config.drop_caption
        return timesteps, drop, self._masks.draw(step.total, frames, generator)
