"""Makes training batches of clips: latents, noise, noise levels, captions, masks.

Everything random here is a function of (seed, step) or of (seed, epoch, sample), never of the rank:
the same samples meet the same noise on any number of ranks, and a resumed run needs no saved
generator. What it does not know: how the gradient is made or shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gulliver.data import BucketSampler, ClipBatch, DataLoader, Step, collate
from gulliver.jobs import derive
from gulliver.models import Autoencoder
from gulliver.video._flow_config import FlowConfig
from gulliver.video._masks import MaskStrategies
from gulliver.video._releases import Flow, told
from gulliver.video._text_encoders import TextEncoder

OF_NO_SAMPLE = "nothing"
"""Caption of the sample of zeros that a rank without a sample has."""


@dataclass(frozen=True)
class VideoBatch:
    """One rank's share of an optimizer step."""

    # `latents` and `noise` are [B, C, T, H, W]; `timesteps` [B]; `captions` [B, 1, L, D] with
    # `caption_mask` [B, L]; `drop_caption` [B]; `generate` [B, T] is False for given frames, or
    # None when all are generated. `total` counts the samples of all ranks, `skipped` those of this
    # share that could not be read. A rank without a sample in this step has one sample of zeros,
    # whose `weight` is 0.

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
    more: dict[str, Tensor] = field(default_factory=dict)
    """What else the model is told of each sample, [B] each."""

    def model_inputs(self, part: slice | Tensor) -> dict[str, Any]:
        """Returns the conditions of the samples in `part`, as the model's keyword arguments."""
        return {
            "y": self.captions[part],
            "mask": self.caption_mask[part],
            "x_mask": None if self.generate is None else self.generate[part],
            "fps": self.fps[part],
            "height": self.height[part],
            "width": self.width[part],
            **{name: value[part] for name, value in self.more.items()},
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


def read_ahead(
    dataset: Any, sampler: BucketSampler, seed: int, device: torch.device
) -> Iterator[tuple[Step, ClipBatch, dict[str, Any]]]:
    """Reads batches without end, epoch after epoch, in a thread that is ahead."""
    loader = DataLoader(
        _Steps(dataset, seed),
        batch_sampler=sampler,
        collate_fn=_as_read,
        device=device,
        threaded=True,
    )
    while True:
        for step, batch in loader:
            # The position after this batch; the thread is ahead of it.
            yield step, batch, loader.state_dict()["inner"]


@dataclass(frozen=True)
class BatchMaker:
    """Makes a `VideoBatch` of each step of a sampler."""

    dataset: Any
    sampler: BucketSampler
    autoencoder: Autoencoder
    text: TextEncoder
    flow: Flow
    config: FlowConfig
    seed: int
    device: torch.device
    agree: Callable[[list[int]], list[int]] | None = None
    """Function from the positions in a share that this rank could read to those that every rank
    with the same share could read; None where no two ranks have the same."""
    takes: frozenset[str] = frozenset()
    """What the model takes besides what all of them do."""

    @property
    def encoded(self) -> bool:
        """Whether the data set gives latents in place of pixels."""
        return self.dataset.encoded

    @cached_property
    def masks(self) -> MaskStrategies:
        """Strategies of given frames."""
        return MaskStrategies.of(self.config)

    def batches(self) -> Iterator[VideoBatch]:
        """Yields batches without end, epoch after epoch; clips are made ahead in a thread."""
        for step, clips, state in read_ahead(self.dataset, self.sampler, self.seed, self.device):
            yield self.make(step, clips, state)

    def make(self, step: Step, clips: ClipBatch, state: dict[str, Any]) -> VideoBatch:
        """Makes the batch of a step; ranks of one model keep the clips that all of them could read.

        Args:
            step: share of the step that the clips are of.
            clips: clips as they were read.
            state: position in the data after the step.
        """
        videos, captions, fps, kept, _ = clips
        if self.agree is not None:
            # A file may go between two ranks' looks at it.
            common = self.agree(kept)
            rows = [row for row, position in enumerate(kept) if position in common]
            if len(rows) < len(kept):
                videos = videos[rows] if videos is not None and rows else None
                captions, fps = [captions[row] for row in rows], fps[rows]
                kept = [kept[row] for row in rows]
        return self._batch(step, videos, captions, fps, kept, state)

    @torch.no_grad()
    def _batch(
        self,
        step: Step,
        videos: Tensor | None,
        captions: list[str],
        fps: Tensor,
        kept: list[int],
        state: dict[str, Any],
    ) -> VideoBatch:
        bucket = step.bucket
        shape = self.autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
        if videos is None:
            latents = torch.zeros(1, *shape, device=self.device)
            captions, fps = [OF_NO_SAMPLE], torch.full((1,), 8.0)
            kept = [0]
        elif self.encoded:
            latents = videos.to(self.device)
        else:
            latents = self.autoencoder.encode(videos.to(self.device))
        y, y_mask = self.text.encode(captions)[:2]
        timesteps, drop, generate = self._draws(step, shape[1])
        rows = torch.tensor([step.offset + position for position in kept]).clamp(max=step.total - 1)
        count = len(rows)
        return VideoBatch(
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
            more={
                name: value
                for name, value in told(bucket, 0, torch.ones(count, device=self.device)).items()
                if name in self.takes
            },
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
        return timesteps, drop, self.masks.draw(step.total, frames, generator)
