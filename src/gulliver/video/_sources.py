"""Sources of a run: the data set, the order of its samples, and the autoencoder."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch

from gulliver.checkpoint import read_json, write_json
from gulliver.comm import World, barrier
from gulliver.data import Bucket, BucketConfig, BucketSampler, ClipTable
from gulliver.errors import GulliverError
from gulliver.jobs import Display, StopRequest, console, derive
from gulliver.models import Autoencoder, VideoAutoencoder
from gulliver.options import resolved
from gulliver.video._autoencoder_config import AutoencoderDataConfig, TrainAutoencoderConfig
from gulliver.video._autoencoder_training import save_autoencoder
from gulliver.video._config import AutoencoderConfig, DataConfig, TrainConfig, parse_shapes
from gulliver.video._digits import DIGITS, DIRECTIONS, MovingDigits
from gulliver.video._flow_config import FlowConfig
from gulliver.video._kept_latents import EncodedTable, KeptLatents
from gulliver.video._public_autoencoders import load_autoencoder
from gulliver.video._rectified_flow import RectifiedFlow
from gulliver.video._run import Run
from gulliver.video._words import words_of
from gulliver.video.autoencoders import (
    AutoencoderTrainer,
    Sources,
    build_autoencoder,
    make_sources,
)


def parse_held_out(texts: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Reads digit:direction pairs such as ``3:0`` (the digit 3 moving left)."""
    pairs = []
    for text in texts:
        digit, _, direction = text.partition(":")
        if digit not in DIGITS or direction not in map(str, range(len(DIRECTIONS))):
            raise GulliverError(f"held-out sentence {text!r} is not digit:direction, such as 3:0")
        pairs.append((int(digit), int(direction)))
    return tuple(pairs)


def make_dataset(
    config: DataConfig,
    words: int | None,
    show: bool = True,
    seed: int = 0,
    autoencoder: Autoencoder | None = None,
) -> MovingDigits | ClipTable:
    """Makes the data set: the moving digits, or the table that is named."""
    shapes = parse_shapes(config.shapes)
    if config.made:
        return MovingDigits(
            "train", config.clips, shapes=shapes, exclude=parse_held_out(config.held_out)
        )
    buckets = _buckets(config, tuple(shapes), autoencoder)
    table = None
    if config.table is not None:
        table = _open_table(config.table, buckets, config, show, derive(seed, 9))
    if config.encoded is not None:
        table = EncodedTable(KeptLatents(config.encoded), buckets, derive(seed, 9), table)
    assert table is not None, "the digits are made"
    if show:
        console().print(table.report())
    longest = max(len(words_of(row.text)) for row in table.rows)
    if words is not None and longest > words:
        raise GulliverError(
            f"the longest caption has {longest} words, the model reads {words}: "
            f"add --model.text-length {longest}"
        )
    return table


def _open_table(
    path: Path,
    buckets: BucketConfig | tuple[Bucket, ...],
    config: DataConfig,
    show: bool,
    seed: int,
) -> ClipTable:
    with Display("opening clips", 1, enabled=show) as display:

        def progress(done: int, total: int) -> None:
            display.total = total
            display.advance()

        told = config.scores, seed, config.windows
        return ClipTable(path, buckets, config.frame_interval, progress, *told)


def make_held_out(config: TrainConfig, dataset: Any) -> MovingDigits | ClipTable | None:
    """Makes the held-out clips of a run: rows that a table's training loses, or other handwriting.

    Raises:
        GulliverError: a share that holds no row out, or all.
    """
    validation, shapes = config.validation, dict.fromkeys(parse_shapes(config.data.shapes), 1.0)
    if isinstance(dataset, ClipTable):
        share = validation.share
        return dataset.hold_out(share, derive(config.seed, 10)) if share else None
    if not validation.every:
        return None
    return MovingDigits(
        "heldout",
        # Which shape a clip has is drawn: enough that each has its number.
        2 * validation.clips * len(shapes),
        derive(config.seed, 10),
        shapes,
        parse_held_out(config.data.held_out),
    )


def _buckets(
    config: DataConfig, shapes: tuple[Bucket, ...], autoencoder: Autoencoder | None = None
) -> BucketConfig | tuple[Bucket, ...]:
    """The buckets of a table's clips, which the autoencoder and the patches can divide."""
    compression = VideoAutoencoder.compression if autoencoder is None else autoencoder.compression
    unit = math.lcm(*compression[1:], 8)
    if config.buckets is not None:
        # Published sizes fit no unit: they are cut, by less than one.
        return BucketConfig.load(config.buckets, (compression[0], unit, unit))
    for bucket in shapes:
        if autoencoder is None or isinstance(autoencoder, VideoAutoencoder):
            _check_shape(bucket, unit)
        else:
            autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
    return shapes


def _check_shape(bucket: Bucket, unit: int) -> None:
    """Refuses what the autoencoder and the patches cannot divide, before clips are opened."""
    if (bucket.frames - 1) % VideoAutoencoder.compression[0] or any(
        side % unit for side in (bucket.height, bucket.width)
    ):
        frames = -(-(bucket.frames - 1) // 4) * 4 + 1  # the next: 4 is not to become a still
        sides = [max(unit, round(side / unit) * unit) for side in (bucket.height, bucket.width)]
        raise GulliverError(
            f"--data.shapes {bucket}: frames must be 4 k + 1, height and width multiples of "
            f"{unit}, such as {frames}x{sides[0]}x{sides[1]}"
        )


def make_sampler(config: TrainConfig, dataset: Any, place: tuple[int, int]) -> BucketSampler:
    """Makes the sampler: the order of the samples, and this rank's share of each batch."""
    seed = derive(config.seed, 6)
    if isinstance(dataset, ClipTable) and isinstance(dataset.buckets, BucketConfig):
        sizes = dataset.buckets.batch_sizes(config.data.bucket_ranks)
        return BucketSampler(dataset.deal, sizes, *place, seed)
    buckets = [dataset.bucket_of(index) for index in range(len(dataset))]
    return BucketSampler(buckets, config.data.batch_size, *place, seed)


def make_flow(config: FlowConfig, autoencoder: Autoencoder) -> RectifiedFlow:
    """Makes the rectified flow of a run, the same for training and for sampling."""
    return RectifiedFlow(
        sample_method=config.timesteps,
        shift=config.shift,
        use_timestep_transform=config.shift_by_size,
        transform=config.shift_rule,
        # A token is 2x2 latents in every size of the model.
        token_area=4 * math.prod(autoencoder.compression[1:]),
    )


def vocabulary(config: TrainConfig) -> frozenset[str] | None:
    """The words that the model was trained on, where they are known."""
    return MovingDigits.vocabulary if config.data.made else None


def own_autoencoder(run: Run) -> Autoencoder | None:
    """Loads the autoencoder of a run: the one in its folder, or the public one that it names."""
    if run.autoencoder_path.is_file():
        return load_autoencoder(run.autoencoder_path)
    if run.named_autoencoder_path.is_file():
        named = read_json(run.named_autoencoder_path)["path"]
        return load_autoencoder(named, dtype=torch.float32)
    return None


def train_autoencoder(
    config: AutoencoderConfig,
    dataset: Any,
    world: World,
    seed: int,
    folder: Path,
    unreadable_limit: float = 0.1,
) -> tuple[VideoAutoencoder, dict[str, Any]]:
    """Trains from scratch on all ranks together, with the defaults of `train-autoencoder`.

    `folder` keeps its log. Returns the autoencoder with the statistics of its latents, and figures:
    psnr in dB and ssim on held-out handwriting (on the training clips themselves for tables) and
    what they were measured on.
    """
    data = AutoencoderDataConfig(batch_size=config.batch_size, unreadable_limit=unreadable_limit)
    options = TrainAutoencoderConfig(
        out=folder,
        steps=config.steps,
        learning_rate=config.learning_rate,
        seed=seed,
        save_every=config.steps,
        log_every=1,
        report_every=config.steps,
        data=data,
    )
    if world.is_main:  # of a run that was stopped before
        shutil.rmtree(folder, ignore_errors=True)
    barrier()
    # All clips of a table are for the diffusion model: none is held out from either of them.
    whole = Sources(dataset, dataset, "the table itself")
    sources = whole if isinstance(dataset, ClipTable) else make_sources(dataset, data, seed)
    model = build_autoencoder(options).to(world.device)
    trainer = AutoencoderTrainer(options, model, sources, world)
    trainer.start(None, options=resolved(options))
    trainer.train(StopRequest())
    return trainer.finish()


def ready_autoencoder(config: TrainConfig, run: Run, dataset: Any, world: World) -> Autoencoder:
    """The run's autoencoder: the one in its folder, the one that is named, or one trained now."""
    kept = own_autoencoder(run) if config.resume else None
    if kept is not None:
        return kept
    autoencoder: Autoencoder
    if config.autoencoder.path is not None:
        autoencoder = load_autoencoder(config.autoencoder.path, dtype=torch.float32)
        figures: dict[str, float] = {}
    else:
        autoencoder, figures = train_autoencoder(
            config.autoencoder,
            dataset,
            world,
            derive(config.seed, 7),
            run.folder / "autoencoder",
            config.data.unreadable_limit,
        )
        if world.is_main:
            console().print(f"autoencoder: {figures['psnr']:.1f} dB on clips of {figures['clips']}")
    barrier()
    if world.is_main and isinstance(autoencoder, VideoAutoencoder):
        save_autoencoder(run.autoencoder_path, autoencoder, figures)
    elif world.is_main:
        # A public one stays where it is.
        write_json(run.named_autoencoder_path, {"path": str(config.autoencoder.path)})
    barrier()
    return autoencoder
