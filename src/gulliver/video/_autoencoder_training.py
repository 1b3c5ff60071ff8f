"""Trains the small autoencoder, and keeps it as one file.

The loss is the mean square error of pixels; a little noise on the latents and a weak pull towards
zero make neighbouring latents decode to neighbouring clips, which the diffusion model needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.checkpoint import read_metadata, read_tensors, write_tensors
from gulliver.comm import World, all_reduce, gather_objects
from gulliver.data import BucketSampler, Step, collate
from gulliver.errors import GulliverError
from gulliver.jobs import console, derive
from gulliver.models import VideoAutoencoder
from gulliver.video._config import AutoencoderConfig
from gulliver.video._digits import MovingDigits
from gulliver.video._skipped import SkippedClips, listing

LATENT_NOISE = 0.15
LATENT_PULL = 1e-4
LARGEST_NORM = 0.05
"""Largest gradient norm: unclipped, the high learning rate diverges at times, at several dB."""
STATISTICS_BATCHES = 24
KIND = "gulliver video autoencoder"


def train_autoencoder(
    config: AutoencoderConfig,
    dataset: Any,
    world: World,
    seed: int,
    report: Callable[[float], None],
    unreadable_limit: float = 0.1,
) -> tuple[VideoAutoencoder, dict[str, Any]]:
    """Trains on all ranks together.

    Args:
        config: steps, batch size and learning rate.
        dataset: data set of clips.
        world: ranks that train together.
        seed: seed of weights, order and noise.
        report: function that is called with the loss after every step.
        unreadable_limit: share of an epoch's clips that may be skipped.

    Returns:
        The autoencoder with the statistics of its latents, and figures: psnr in dB on held-out
        handwriting (on the training clips themselves for tables) and what it was measured on.

    Raises:
        GulliverError: more clips than that could not be read.
    """
    torch.manual_seed(seed)
    model = VideoAutoencoder().to(world.device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=0.01, betas=(0.9, 0.98)
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.steps + 1, pct_start=0.1
    )
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, chunk_mb=1.0, verbose=False))
    _, boosted, *_ = booster.boost(model, optimizer)
    sampler = _sampler(config, dataset, world.rank, world.size, seed)
    skipped = SkippedClips(sampler.samples, len(sampler), unreadable_limit)
    done = 0
    for step in _endless(sampler):
        videos, count = _read(dataset, step, seed, skipped, world)
        if skipped.problem is not None:
            _refuse_lost_data(skipped.problem, dataset, world)
        if not count:
            continue
        loss = _loss(model, videos, count, step, seed, world)
        booster.backward(loss, boosted)
        boosted.clip_grad_by_norm(LARGEST_NORM)
        boosted.step()
        scheduler.step()
        boosted.zero_grad()
        total = loss.detach() / world.size
        all_reduce(total)
        report(float(total))
        done += 1
        if done == config.steps:
            break
    _measure_latents(model, _sampler(config, dataset, 0, 1, seed), dataset, world.device)
    psnr, measured_on = _psnr(model, dataset, world.device)
    return model, {"psnr": psnr, "clips": measured_on, "steps": config.steps}


def _sampler(
    config: AutoencoderConfig, dataset: Any, rank: int, size: int, seed: int
) -> BucketSampler:
    buckets = [dataset.bucket_of(index) for index in range(len(dataset))]
    return BucketSampler(buckets, config.batch_size, rank, size, seed)


def _endless(sampler: BucketSampler) -> Iterator[Step]:
    while True:
        yield from sampler


def _read(
    dataset: Any, step: Step, seed: int, skipped: SkippedClips, world: World
) -> tuple[Tensor | None, int]:
    """Reads this rank's clips of a step, and counts those of all ranks."""
    windows = [derive(seed, 1, step.epoch, index) for index in step.indices]
    videos = collate(dataset, step.indices, windows).videos
    read = 0 if videos is None else len(videos)
    counts = torch.tensor([read, len(step.indices) - read], device=world.device)
    all_reduce(counts)
    skipped.count(step.epoch, int(counts[0]), int(counts[1]))
    return videos, int(counts[0])


def _refuse_lost_data(problem: str, dataset: Any, world: World) -> NoReturn:
    broken = {entry for part in gather_objects(dataset.broken) for entry in part}
    if world.is_main:
        console().print(listing(broken))
    raise GulliverError(f"{problem}: the autoencoder's training stopped, nothing is kept")


def _loss(
    model: VideoAutoencoder,
    videos: Tensor | None,
    count: int,
    step: Step,
    seed: int,
    world: World,
) -> Tensor:
    """This rank's part of the mean over `count` clips, times the ranks (gradients are averaged)."""
    if videos is None:
        # Zero gradients: the other ranks wait for this one in the reduction.
        return sum((p.sum() * 0 for p in model.parameters()), torch.zeros((), device=world.device))
    videos = videos.to(world.device)
    latents = model.encode_raw(videos)
    generator = torch.Generator().manual_seed(derive(seed, step.epoch, step.number))
    noise = torch.randn(step.total, *latents.shape[1:], generator=generator)
    noise = noise[step.offset : step.offset + len(latents)].to(world.device)
    decoded = model.decode_raw(latents + LATENT_NOISE * noise)
    loss = F.mse_loss(decoded, videos) + LATENT_PULL * latents.square().mean()
    return loss * (len(videos) * world.size / count)


@torch.no_grad()
def _measure_latents(
    model: VideoAutoencoder, sampler: BucketSampler, dataset: Any, device: torch.device
) -> None:
    """Stores mean and standard deviation of the latents of some training clips."""
    columns = []
    for step in islice(sampler, STATISTICS_BATCHES):
        videos = collate(dataset, step.indices).videos
        if videos is not None:
            latents = model.encode_raw(videos.to(device))
            columns.append(latents.transpose(0, 1).flatten(1).double())
    if not columns:
        raise GulliverError("no clip could be read any more: the latents could not be measured")
    values = torch.cat(columns, dim=1)
    model.mean.copy_(values.mean(dim=1))
    model.std.copy_(values.std(dim=1).clamp(min=1e-6))


@torch.no_grad()
def _psnr(model: VideoAutoencoder, dataset: Any, device: torch.device) -> tuple[float, str]:
    """Peak signal-to-noise ratio in dB of pixels in [0, 1], clamped as they are shown."""
    if isinstance(dataset, MovingDigits):
        shapes = dict.fromkeys(dataset.buckets, 1.0)
        dataset, name = MovingDigits("heldout", 256, shapes=shapes), "held-out handwriting"
    else:
        name = "the table itself"
    errors = []
    for index in range(min(256, len(dataset))):
        videos = collate(dataset, [index]).videos
        if videos is not None:
            decoded = model.decode(model.encode(videos.to(device))).clamp(-1, 1)
            errors.append(((decoded - videos.to(device)) / 2).square().mean().item())
    # All of these few may have gone since.
    mean = sum(errors) / len(errors) if errors else math.nan
    return -10 * math.log10(mean), name


def save_autoencoder(
    path: Path, autoencoder: VideoAutoencoder, figures: dict[str, Any] | None = None
) -> None:
    """Writes weights, statistics and configuration as one safetensors file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {
        "kind": KIND,
        "config": json.dumps(autoencoder.config),
        "figures": json.dumps(figures or {}),
    }
    write_tensors(path, autoencoder.state_dict(), metadata)


def load_autoencoder(path: Path) -> VideoAutoencoder:
    """Reads what `save_autoencoder` wrote.

    Raises:
        GulliverError: the file is missing, broken, or something else.
    """
    metadata = read_metadata(path)
    if metadata.get("kind") != KIND:
        raise GulliverError(f"{path} holds no video autoencoder of gulliver")
    autoencoder = VideoAutoencoder(**json.loads(metadata["config"]))
    autoencoder.load_state_dict(read_tensors(path))
    return autoencoder.eval()


def autoencoder_figures(path: Path) -> dict[str, Any]:
    """Reads what was measured when the autoencoder was trained."""
    return json.loads(read_metadata(path).get("figures", "{}"))
