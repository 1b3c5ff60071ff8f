"""Batches of training clips, and masks: which latent frames are given and which are generated.

A model that sees some frames without noise learns to generate matching ones: it animates images,
and continues, prepends to and interpolates clips. Masks are [T], True for generated frames, like
the models' `x_mask`.

Source: the strategies and names of Open-Sora 1.1 to 1.3 (https://arxiv.org/abs/2412.20404).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor

from gulliver.comm.collectives import gather_objects
from gulliver.data.clips import Bucket, ClipBatch, collate
from gulliver.data.loader import DataLoader
from gulliver.data.sampler import BucketSampler, Step
from gulliver.errors import GulliverError, nearest
from gulliver.jobs.log import derive
from gulliver.models.autoencoders import Autoencoder
from gulliver.options import SHARE
from gulliver.video.config import FlowConfig
from gulliver.video.public_models import Flow, told
from gulliver.video.text_encoders import TextEncoder

Draw = torch.Generator
Length = Callable[[int, Draw], int]
Strategy = Callable[[int, Draw], Tensor]
"""Maps a number of latent frames and a generator to a mask of the given frames, bool [T]."""


def _integer(least: int, most: int, draw: Draw) -> int:
    return int(torch.randint(least, most + 1, (), generator=draw))


def _one(frames: int, draw: Draw) -> int:
    return 1


def _two(frames: int, draw: Draw) -> int:
    return min(2, frames - 1)


def _quarter(frames: int, draw: Draw) -> int:
    return _integer(1, max(1, frames // 4), draw)


def _head(length: Length, frames: int, draw: Draw) -> Tensor:
    return torch.arange(frames) < length(frames, draw)


def _tail(length: Length, frames: int, draw: Draw) -> Tensor:
    return torch.arange(frames) >= frames - length(frames, draw)


def _head_tail(length: Length, frames: int, draw: Draw) -> Tensor:
    given = length(frames, draw)
    places = torch.arange(frames)
    return (places < given) | (places >= frames - given)


def _anywhere(length: Length, frames: int, draw: Draw) -> Tensor:
    given = length(frames, draw)
    start = _integer(0, frames - given, draw)
    places = torch.arange(frames)
    return (places >= start) & (places < start + given)


def _identity(frames: int, draw: Draw) -> Tensor:
    return torch.zeros(frames, dtype=torch.bool)


def _random(frames: int, draw: Draw) -> Tensor:
    chance = 0.1 + 0.8 * float(torch.rand((), generator=draw))
    return torch.rand(frames, generator=draw) <= chance


def _interpolate(frames: int, draw: Draw) -> Tensor:
    return torch.arange(frames) % 2 == _integer(0, 1, draw)


STRATEGIES: dict[str, Strategy] = {
    "identity": _identity,
    **{
        f"{name}_{side}": partial(place, length)
        for name, length in (("quarter", _quarter), ("image", _one))
        for side, place in (
            ("random", _anywhere),
            ("head", _head),
            ("tail", _tail),
            ("head_tail", _head_tail),
        )
    },
    "random": _random,
    "interpolate": _interpolate,
    "extend": partial(_head, _two),
}
"""Open-Sora's strategies, and `extend`: the first two latent frames are given. In short clips a
quarter would be a single frame, which is a still image.
"""
ALIASES = {"intepolate": "interpolate"}
"""Misspelled names in Open-Sora's configurations."""


@dataclass(frozen=True)
class MaskStrategies:
    """Fraction of clips per mask strategy; the remaining clips are fully generated."""

    ratios: dict[str, float]

    @classmethod
    def of(cls, config: FlowConfig) -> Self:
        ratios: dict[str, float] = {}
        for text in config.masks:
            name, ratio = _parsed(text)
            if name in ratios:
                raise GulliverError(f"--flow.masks contains {name} twice; remove one of them")
            ratios[name] = ratio
        return cls(_checked(ratios))

    @property
    def share(self) -> float:
        return sum(ratio for name, ratio in self.ratios.items() if name != "identity")

    def draw(
        self,
        clips: int,
        frames: int,
        generator: torch.Generator,
        step: torch.Generator | None = None,
    ) -> Tensor | None:
        """Samples the masks [clips, frames] of a step; None if all clips are fully generated."""
        # Masks cost a second modulation of every block, so whole steps have them, with the
        # probability that a clip has one, and each clip of the step draws its strategy.
        masked = float(torch.rand((), generator=step or generator)) < self.share
        if not masked or frames == 1:
            return None
        names = [name for name in self.ratios if name != "identity"]
        bounds = torch.tensor([self.ratios[name] for name in names]).cumsum(0)[:-1]
        places = torch.rand(clips, generator=generator) * self.share
        chosen = (places[:, None] >= bounds).sum(dim=1)
        return torch.stack(
            [_rest(STRATEGIES[names[number]](frames, generator)) for number in chosen.tolist()]
        )


def _rest(given: Tensor) -> Tensor:
    made = ~given
    made[-1] |= not bool(made.any())
    return made


def _parsed(text: str) -> tuple[str, float]:
    name, colon, ratio = text.partition(":")
    name = ALIASES.get(name, name)
    if name not in STRATEGIES:
        raise GulliverError(
            f"unknown strategy {name!r} in --flow.masks: {nearest(name, STRATEGIES)}"
        )
    try:
        share = float(ratio)
    except ValueError:
        share = math.nan
    if share not in SHARE:
        problem = f"its fraction is {ratio!r}" if colon else "it has no fraction"
        raise GulliverError(
            f"--flow.masks {text!r} is invalid: {problem}; write one {SHARE} after a colon, such "
            f"as {name}:0.05"
        )
    return name, share


def _checked(ratios: dict[str, float]) -> dict[str, float]:
    total = sum(ratios.values())
    if total > 1 + 1e-6:
        parts = " + ".join(f"{name}:{ratio:g}" for name, ratio in ratios.items())
        raise GulliverError(f"--flow.masks {parts} adds up to {total:g}; it must be at most 1")
    return ratios


# Counts unreadable clips, and detects when there are too many.
#
# All ranks count the clips of all ranks, so that they stop together.


EMPTY_BATCHES = 10
"""Maximum consecutive empty batches (or the batches of an epoch, if fewer)."""
SHOWN = 20
"""Maximum number of skipped clips to print."""


@dataclass
class SkippedClips:
    """Counts read and skipped clips of the current epoch."""

    samples: int
    batches: int
    limit: float
    epoch: int = -1
    skipped: int = 0
    empty: int = 0
    """Consecutive batches without a single clip."""

    def count(self, epoch: int, read: int, skipped: int) -> None:
        """Adds a batch's numbers of readable and unreadable clips, summed over all ranks."""
        if epoch != self.epoch:
            self.epoch, self.skipped = epoch, 0
        self.skipped += skipped
        self.empty = 0 if read else self.empty + 1

    @property
    def problem(self) -> str | None:
        """Reason why the run cannot continue; None if it can."""
        if self.skipped > self.limit * self.samples:
            return (
                f"{self.skipped} of the {self.samples} clips of epoch {self.epoch} could not be "
                f"read, more than --data.unreadable-limit {self.limit:g} allows"
            )
        if self.empty >= min(EMPTY_BATCHES, self.batches):
            return f"{self.empty} batches in a row had no clip that could be read"
        return None


def common_samples(place: tuple[int, int], kept: list[int]) -> list[int]:
    """Returns the samples that all ranks with the same share could read (collective)."""
    found = [theirs for other, theirs in gather_objects((place, kept)) if other == place]
    return sorted(set(kept).intersection(*found))


def listing(clips: set[tuple[str, str]], problem: str = "could not be read") -> str:
    lines = [f"{len(clips)} clip{'s' * (len(clips) != 1)} {problem}:"]
    lines += [f"  {name}: {reason}" for name, reason in sorted(clips)[:SHOWN]]
    if len(clips) > SHOWN:
        lines.append(f"  and {len(clips) - SHOWN} more")
    return "\n".join(lines)


# Builds training batches of clips: latents, noise, noise levels, captions, masks.
#
# All randomness depends only on (seed, step) or on (seed, epoch, sample), not on the rank: samples
# get the same noise on any number of ranks, and a resumed run needs no saved generator.


OF_NO_SAMPLE = "nothing"
"""Caption of the zero sample on a rank without samples."""


@dataclass(frozen=True)
class VideoBatch:
    """This rank's share of an optimizer step."""

    # `latents` and `noise` are [B, C, T, H, W]; `timesteps` [B]; `captions` [B, 1, L, D] with
    # `caption_mask` [B, L]; `drop_caption` [B]; `generate` [B, T] is False for given frames, or
    # None if all are generated. `total` counts the samples of all ranks, `skipped` the unreadable
    # ones of this share. A rank without samples in this step has one sample of zeros with `weight`
    # 0.

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
    """Other conditioning per sample, [B] each."""

    def model_inputs(self, part: slice | Tensor) -> dict[str, Any]:
        """Returns the conditioning of the samples in `part`, as the model's keyword arguments."""
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
    """Reads a dataset of clips one step at a time; the epoch selects the frames."""

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
    """Reads batches indefinitely, epoch after epoch, in a background thread."""
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
    """Builds a `VideoBatch` for each step of a sampler."""

    dataset: Any
    sampler: BucketSampler
    autoencoder: Autoencoder
    text: TextEncoder
    flow: Flow
    config: FlowConfig
    seed: int
    device: torch.device
    agree: Callable[[list[int]], list[int]] | None = None
    """Maps the sample positions that this rank could read to those that all ranks with the same
    share could read; None if ranks do not share samples.
    """
    takes: frozenset[str] = frozenset()
    """Inputs of the model beyond the common ones."""

    @property
    def encoded(self) -> bool:
        return self.dataset.encoded

    @cached_property
    def masks(self) -> MaskStrategies:
        return MaskStrategies.of(self.config)

    def batches(self) -> Iterator[VideoBatch]:
        for step, clips, state in read_ahead(self.dataset, self.sampler, self.seed, self.device):
            yield self.make(step, clips, state)

    def make(self, step: Step, clips: ClipBatch, state: dict[str, Any]) -> VideoBatch:
        videos, captions, fps, kept, _ = clips
        if self.agree is not None:
            # A file may disappear after one rank has read it, and before another does.
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
        latents, captions, fps = self.shown(bucket, videos, captions, fps)
        kept = [0] if videos is None else kept
        shape = tuple(latents.shape[1:])
        timesteps, drop, generate = self._draws(step, shape[1])
        rows = torch.tensor([step.offset + position for position in kept]).clamp(max=step.total - 1)
        return VideoBatch(
            latents=latents,
            noise=self._noise(step, kept, shape).to(self.device),
            timesteps=timesteps[rows].to(self.device),
            drop_caption=drop[rows].to(self.device),
            generate=None if generate is None else generate[rows].to(self.device),
            fps=fps.to(self.device),
            total=step.total,
            skipped=len(step.indices) - (0 if videos is None else len(videos)),
            epoch=step.epoch,
            weight=0.0 if videos is None else 1.0,
            sampler_state=state,
            **self.conditions(bucket, captions),
        )

    def shown(
        self, bucket: Bucket, videos: Tensor | None, captions: list[str], fps: Tensor
    ) -> tuple[Tensor, list[str], Tensor]:
        """Returns latents, captions and frame rates; without clips, those of a zero sample."""
        if videos is None:
            shape = self.autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
            none = torch.zeros(1, *shape, device=self.device)
            return none, [OF_NO_SAMPLE], torch.full((1,), 8.0, device=self.device)
        videos = videos.to(self.device)
        return videos if self.encoded else self.autoencoder.encode(videos), captions, fps

    def conditions(self, bucket: Bucket, captions: list[str]) -> dict[str, Any]:
        y, mask = self.text.encode(captions)[:2]
        known = told(bucket, 0, torch.ones(len(captions), device=self.device))
        return {
            "captions": y.to(self.device),
            "caption_mask": mask.to(self.device),
            "height": known["height"],
            "width": known["width"],
            "more": {name: value for name, value in known.items() if name in self.takes},
        }

    def _noise(self, step: Step, kept: list[int], shape: tuple[int, ...]) -> Tensor:
        """Samples noise with a generator per sample, so that other samples do not affect it."""
        rows = []
        for position in kept:
            index = step.indices[position] if len(step.indices) else -1
            generator = torch.Generator().manual_seed(derive(self.seed, 1, step.epoch, int(index)))
            rows.append(torch.randn(shape, generator=generator))
        return torch.stack(rows)

    def _draws(self, step: Step, frames: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Samples noise levels [N], caption dropout [N] and masks [N, T] for all ranks."""
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
