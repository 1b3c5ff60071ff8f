"""Sources of a run: dataset, initial weights, autoencoder, text encoder, and stored latents.

Settings of stored latents (shapes, windows, frame interval, scores, autoencoder, text encoder)
are inherited; explicit options must match them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver import models
from gulliver.checkpoint.files import read_json, write_json
from gulliver.checkpoint.huggingface import load_huggingface
from gulliver.comm.collectives import barrier, broadcast_object
from gulliver.comm.world import World
from gulliver.data.buckets import BucketConfig
from gulliver.data.clips import Bucket
from gulliver.data.sampler import BucketSampler
from gulliver.data.table import ClipTable
from gulliver.errors import GulliverError, UsageError, check_known
from gulliver.jobs.display import Display, console
from gulliver.jobs.log import derive
from gulliver.jobs.stop import StopRequest
from gulliver.models.autoencoder import VideoAutoencoder
from gulliver.models.autoencoders import Autoencoder
from gulliver.models.configurations import CONFIGURATIONS
from gulliver.models.stdit import STDIT3_SIZES, STDiT2
from gulliver.options import resolved
from gulliver.video.autoencoder_config import AutoencoderDataConfig, TrainAutoencoderConfig
from gulliver.video.autoencoders.clips import Sources, make_sources
from gulliver.video.autoencoders.trainer import AutoencoderTrainer, build_autoencoder
from gulliver.video.batches import OF_NO_SAMPLE
from gulliver.video.config import (
    AutoencoderConfig,
    DataConfig,
    FlowConfig,
    TrainConfig,
    parse_shapes,
)
from gulliver.video.digits import DIGITS, DIRECTIONS, MovingDigits
from gulliver.video.flows import IDDPM, RectifiedFlow
from gulliver.video.kept_latents import (
    AGAIN,
    TEXTS,
    EncodedTable,
    LatentCache,
    folder_digest,
    weights_digest,
)
from gulliver.video.public_models import (
    GUIDED,
    Flow,
    check_latents,
    fields_of_files,
    load_autoencoder,
    outline_model,
    save_autoencoder,
    text_size,
)
from gulliver.video.run import Run
from gulliver.video.text_encoders import (
    CachedTextEncoder,
    TextEncoder,
    WordEncoder,
    load_text_encoder,
    look_at_encoder,
    words_of,
)

SETTLED = ("frame_interval", "windows", "scores")


def with_encoded(config: TrainConfig) -> TrainConfig:
    if config.data.encoded is None:
        return config
    kept = LatentCache(config.data.encoded)
    model, path = config.model, config.autoencoder.path
    if path is None and not (config.resume and own_autoencoder(Run(config.out)) is not None):
        path = _recorded(kept.content["autoencoder"], "--autoencoder.path")
    if model.weights is not None and model.text_encoder is None and kept.text is not None:
        named = _recorded(kept.text.path, "--model.text-encoder")
        model = replace(model, text_encoder=named)
    return replace(
        config,
        data=_with_data(config.data, kept),
        autoencoder=replace(config.autoencoder, path=path),
        model=model,
    )


def _with_data(data: DataConfig, kept: LatentCache) -> DataConfig:
    default = DataConfig()
    asked = {
        name: getattr(data, name)
        for name in SETTLED
        if getattr(data, name) != getattr(default, name)
    }
    kept.refuse_differences(asked)
    shapes, buckets = data.shapes, data.buckets
    if shapes == default.shapes and buckets is None:
        shapes, buckets = tuple(kept.content["shapes"]) or shapes, kept.buckets_path
    settings = kept.settings
    return replace(
        data,
        shapes=shapes,
        buckets=buckets,
        frame_interval=settings.frame_interval,
        windows=settings.windows,
        scores=kept.content["scores"],
    )


def _recorded(path: str, option: str) -> Path:
    if not Path(path).exists():
        raise GulliverError(
            f"{path}, which encoded the latents, no longer exists; set {option} to its new path"
        )
    return Path(path)


def refuse_other_autoencoder(config: TrainConfig, run: Run) -> None:
    if config.data.encoded is None:
        return
    path = config.autoencoder.path
    used = load_autoencoder(path, dtype=torch.float32) if path else own_autoencoder(run)
    asked = weights_digest(used)
    LatentCache(config.data.encoded).refuse_differences({"autoencoder": asked})


def encoded_texts(
    config: TrainConfig, channels: int, max_length: int, captions: list[str]
) -> CachedTextEncoder | None:
    """Returns the caption embeddings stored with the latents of a run; None if there are none."""
    folder = config.data.encoded
    text = None if folder is None else LatentCache(folder).text
    if folder is None or text is None:
        return None
    named = config.model.text_encoder
    assert named is not None, "otherwise words are used"
    if folder_digest(named) != text.files:
        raise GulliverError(
            f"--data.encoded {folder} does not match: this run's text_encoder {named} has "
            f"different files than {text.path}, which encoded the captions; set text_encoder to it"
        )
    if text.channels != channels or text.max_length > max_length:
        raise GulliverError(
            f"--data.encoded {folder} does not match: its captions have up to {text.max_length} "
            f"vectors of width {text.channels}, but the model needs {max_length} of {channels}; "
            f"{AGAIN} with its encoder and --text-length {max_length}"
        )
    kept = CachedTextEncoder.of_folder(folder / TEXTS, text.fingerprint, channels, max_length)
    missing = kept.missing(captions)
    if missing:
        raise GulliverError(
            f"--data.encoded {folder} lacks the caption {missing[0][:60]!r} and "
            f"{len(missing) - 1} others; {AGAIN}"
        )
    return kept


# The model of a run: a named size, a public model, or initial weights; and its text encoder.
#
# Initial weights are read once at the start; ``model.json`` in the run's folder then describes
# them, so resuming and generation do not need them.


TRAINED = ("STDiT2", "STDiT3")
"""Model classes that the training loop supports."""


def check_start(config: TrainConfig) -> None:
    model = config.model
    if model.weights is None:
        sizes = [*STDIT3_SIZES, *CONFIGURATIONS]
        check_known("model size", model.size, sizes)
        kind = CONFIGURATIONS[model.size].kind if model.size in CONFIGURATIONS else "STDiT3"
    else:
        if config.autoencoder.path is None or model.text_encoder is None:
            raise GulliverError(
                f"--model.weights {model.weights} needs the matching --autoencoder.path and "
                "--model.text-encoder"
            )
        begun = Run(config.out).model_path
        resumed = config.resume and begun.is_file()
        kind = read_json(begun)["kind"] if resumed else fields_of_files(model.weights)[0]
    if kind not in TRAINED:
        raise GulliverError(
            f"{model.weights or model.size} has class {kind}, which cannot be trained here; use "
            f"one of {' or '.join(TRAINED)}"
        )
    if kind != "STDiT3" and config.ranks_of_a_model > 1:
        raise GulliverError(
            f"--tp-size, --sp-size and --pp-size only support an STDiT3, not an {kind}; omit them "
            "to use data parallelism"
        )
    mode, degree = config.sequence_parallelism_mode, config.planner.degree
    if kind != "STDiT3" and (mode is not None or degree not in (None, 1)):
        option = "--planner.degree" if mode is None else "--sequence-parallelism-mode"
        raise GulliverError(
            f"{option} needs ranks that share a clip, which an {kind} does not support; omit it"
        )
    if model.weights is not None and model.text_encoder is not None:
        width, read = look_at_encoder(model.text_encoder).channels, text_size(outline_of(config))[0]
        if width != read:
            raise GulliverError(
                f"--model.text-encoder {model.text_encoder} has width {width}, but the model of "
                f"--model.weights needs width {read}; use its own text encoder"
            )


def outline_of(config: TrainConfig) -> Any:
    """Builds the transformer of a run on meta, from headers or from the resumed run."""
    begun = Run(config.out).model_path
    if not (config.resume and begun.is_file()):
        assert config.model.weights is not None, "of a run with weights"
        return outline_model(config.model.weights, torch.float32)
    found = read_json(begun)
    with torch.device("meta"):
        return getattr(models, found["kind"])(**found["fields"])


def describe_start(config: TrainConfig, run: Run) -> None:
    """Records the initial weights of a run; called on one rank."""
    if config.model.weights is None:
        return
    kind, fields = fields_of_files(config.model.weights)
    write_json(run.model_path, {"kind": kind, "fields": fields})


def build_model(
    config: TrainConfig, autoencoder: Autoencoder, run: Run | None = None, begin: bool = False
) -> Any:
    torch.manual_seed(derive(config.seed, 0))
    if config.model.weights is not None:
        assert run is not None, "a run with weights has a folder"
        found = read_json(run.model_path)
        # The batch determines the dropped captions.
        fields = {**found["fields"], "class_dropout_prob": 0.0}
        model = getattr(models, found["kind"])(**fields)
        check_latents(model, autoencoder)
        if begin:
            load_huggingface(model, config.model.weights)
        return _frozen(model)
    named = config.model.size in CONFIGURATIONS
    kind = CONFIGURATIONS[config.model.size].kind if named else "STDiT3"
    known = CONFIGURATIONS[config.model.size].fields if named else STDIT3_SIZES[config.model.size]
    fields = {
        **known,
        "in_channels": autoencoder.latent_channels,
        "caption_channels": _width(config),
        "class_dropout_prob": 0.0,
        "model_max_length": config.model.text_length,
        "input_sq_size": 32 if config.data.made else 512,
    }
    if kind == "STDiT3":
        fields["zero_init_temporal"] = config.model.zero_init_temporal
        fields["temporal_positions"] = config.model.temporal_positions
    return _frozen(getattr(models, kind)(**fields))


def _width(config: TrainConfig) -> int:
    folder = config.model.text_encoder
    return config.model.text_channels if folder is None else look_at_encoder(folder).channels


def _frozen(model: nn.Module) -> nn.Module:
    """Freezes parameters that models with given frames among the latents do not use."""
    for name in ("x_embedder_cond", "x_embedder_cond_mask"):
        embedder = getattr(model, name, None)
        if embedder is not None:
            embedder.requires_grad_(False)
    return model


def flow_of(model: nn.Module, otherwise: RectifiedFlow) -> Flow:
    """Returns the diffusion process that a model is trained with, usually `otherwise`."""
    return IDDPM(guided_channels=GUIDED) if isinstance(model, STDiT2) else otherwise


def make_text(config: TrainConfig, model: nn.Module) -> TextEncoder:
    folder = config.model.text_encoder
    if folder is None:
        return WordEncoder(config.model.text_channels, config.model.text_length)
    return load_text_encoder(folder, text_size(model)[1])


def ready_texts(
    config: TrainConfig, run: Run, model: nn.Module, datasets: Sequence[Any], world: World
) -> TextEncoder:
    """Returns the run's text encoder; one rank caches the embeddings of the tables' captions."""
    if config.model.text_encoder is None:
        return make_text(config, model)
    folder, captions = run.folder / "texts", _captions(datasets)
    ready = encoded_texts(config, *text_size(model), captions)
    if ready is not None:
        return ready
    kept: CachedTextEncoder | None = None
    if world.is_main:
        kept = CachedTextEncoder(make_text(config, model), folder)
        with Display("encoding captions", len(captions)) as display:
            for caption in captions:
                kept.encode([caption])
                display.advance()
        kept.encoder = None
    fingerprint = broadcast_object(kept.fingerprint if kept else None)
    return kept or CachedTextEncoder.of_folder(folder, fingerprint, *text_size(model))


def _captions(datasets: Sequence[Any]) -> list[str]:
    datasets = [dataset for dataset in datasets if dataset is not None]
    if any(not isinstance(dataset, ClipTable) for dataset in datasets):
        raise GulliverError(
            "--model.text-encoder needs a --data.table; the moving digits use a word encoder"
        )
    return sorted({row.text for dataset in datasets for row in dataset.rows} | {OF_NO_SAMPLE})


# Data sources of a run: the data set, the order of its samples, and the autoencoder.


def parse_held_out(texts: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """Parses digit:direction pairs such as ``3:0`` (the digit 3 moving left)."""
    pairs = []
    for text in texts:
        digit, _, direction = text.partition(":")
        if digit not in DIGITS or direction not in map(str, range(len(DIRECTIONS))):
            raise GulliverError(
                f"held-out sentence {text!r} is not digit:direction; use for example 3:0"
            )
        pairs.append((int(digit), int(direction)))
    return tuple(pairs)


def make_dataset(
    config: DataConfig,
    words: int | None,
    show: bool = True,
    seed: int = 0,
    autoencoder: Autoencoder | None = None,
) -> MovingDigits | ClipTable:
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
        table = EncodedTable(LatentCache(config.encoded), buckets, derive(seed, 9), table)
    assert table is not None, "the digits are generated"
    if show:
        console().print(table.report())
    longest = max(len(words_of(row.text)) for row in table.rows)
    if words is not None and longest > words:
        raise GulliverError(
            f"the longest caption has {longest} words, but the model accepts {words}; add "
            f"--model.text-length {longest}"
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
    """Creates the held-out clips of a run: rows of the table, or other handwriting."""
    validation, shapes = config.validation, dict.fromkeys(parse_shapes(config.data.shapes), 1.0)
    if isinstance(dataset, ClipTable):
        share = validation.share
        return dataset.hold_out(share, derive(config.seed, 10)) if share else None
    if not validation.every:
        return None
    return MovingDigits(
        "heldout",
        # The shape of a clip is random: draw enough for each shape.
        2 * validation.clips * len(shapes),
        derive(config.seed, 10),
        shapes,
        parse_held_out(config.data.held_out),
    )


def _buckets(
    config: DataConfig, shapes: tuple[Bucket, ...], autoencoder: Autoencoder | None = None
) -> BucketConfig | tuple[Bucket, ...]:
    """Returns a table's buckets; shapes must be divisible by the autoencoder and the patches."""
    compression = VideoAutoencoder.compression if autoencoder is None else autoencoder.compression
    unit = math.lcm(*compression[1:], 8)
    if config.buckets is not None:
        # Published sizes may not be divisible: they are cropped by less than one unit.
        return BucketConfig.load(config.buckets, (compression[0], unit, unit))
    for bucket in shapes:
        if autoencoder is None or isinstance(autoencoder, VideoAutoencoder):
            _check_shape(bucket, unit)
        else:
            autoencoder.latent_shape(bucket.frames, bucket.height, bucket.width)
    return shapes


def _check_shape(bucket: Bucket, unit: int) -> None:
    if (bucket.frames - 1) % VideoAutoencoder.compression[0] or any(
        side % unit for side in (bucket.height, bucket.width)
    ):
        frames = -(-(bucket.frames - 1) // 4) * 4 + 1  # rounded up: 4 must not become a still
        sides = [max(unit, round(side / unit) * unit) for side in (bucket.height, bucket.width)]
        raise UsageError(
            f"--data.shapes {bucket} does not fit; frames must be 4 k + 1, height and width "
            f"multiples of {unit}, such as {frames}x{sides[0]}x{sides[1]}"
        )


def make_sampler(config: TrainConfig, dataset: Any, place: tuple[int, int]) -> BucketSampler:
    seed = derive(config.seed, 6)
    if isinstance(dataset, ClipTable) and isinstance(dataset.buckets, BucketConfig):
        sizes = dataset.buckets.batch_sizes(config.data.bucket_ranks)
        return BucketSampler(dataset.assign, sizes, *place, seed)
    buckets = [dataset.bucket_of(index) for index in range(len(dataset))]
    return BucketSampler(buckets, config.data.batch_size, *place, seed)


def make_flow(config: FlowConfig, autoencoder: Autoencoder) -> RectifiedFlow:
    return RectifiedFlow(
        sample_method=config.timesteps,
        shift=config.shift,
        use_timestep_transform=config.shift_by_size,
        transform=config.shift_rule,
        # A token is 2x2 latents in every model size.
        token_area=4 * math.prod(autoencoder.compression[1:]),
    )


def own_autoencoder(run: Run) -> Autoencoder | None:
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
    """Trains an autoencoder from scratch on all ranks, with the defaults of `train-autoencoder`."""
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
    if world.is_main:  # left by an interrupted run
        shutil.rmtree(folder, ignore_errors=True)
    barrier()
    # All clips of a table train the diffusion model: none is held out from either of them.
    whole = Sources(dataset, dataset, "the table itself")
    sources = whole if isinstance(dataset, ClipTable) else make_sources(dataset, data, seed)
    model = build_autoencoder(options).to(world.device)
    trainer = AutoencoderTrainer(options, model, sources, world)
    trainer.start(None, options=resolved(options))
    trainer.train(StopRequest())
    return trainer.finish()


def ready_autoencoder(config: TrainConfig, run: Run, dataset: Any, world: World) -> Autoencoder:
    """Returns the run's autoencoder: from its folder, from the options, or trained now."""
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
            console().print(f"autoencoder: {figures['psnr']:.1f} dB on {figures['clips']}")
    barrier()
    if world.is_main and isinstance(autoencoder, VideoAutoencoder):
        save_autoencoder(run.autoencoder_path, autoencoder, figures)
    elif world.is_main:
        # A public autoencoder is not copied.
        write_json(run.named_autoencoder_path, {"path": str(config.autoencoder.path)})
    barrier()
    return autoencoder
