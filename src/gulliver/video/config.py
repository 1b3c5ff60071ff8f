"""Options of the video commands. Does not import torch, because `--help` reads this module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gulliver.errors import GulliverError
from gulliver.options import (
    AT_LEAST_0,
    AT_LEAST_1,
    GUIDANCE,
    POSITIVE,
    RANKS,
    RATE,
    SEED,
    SHARE,
    Options,
    Range,
    Size,
    Tracker,
    check_needs,
)

if TYPE_CHECKING:
    from gulliver.data.clips import Bucket


@dataclass(frozen=True)
class FlowConfig(Options):
    """Rectified flow: how noise and data are mixed in training."""

    timesteps: Literal["uniform", "logit-normal"] = "logit-normal"
    """Distribution of the noise level."""
    shift: Annotated[float, Range(0, 1000, open_below=True)] = 3.0
    """Factor of the noise level's odds; above 1 trains more at high noise."""
    shift_by_size: bool = False
    """Also multiply the odds by a ratio that depends on the clip size."""
    shift_rule: Literal["latent", "1.2", "1.3", "2.0"] = "latent"
    """Rule for that ratio: roots of area over 512x512 and of latent frames, or a published one."""
    drop_caption: Annotated[float, SHARE] = 0.1
    """Fraction of captions dropped, for classifier-free guidance."""
    masks: tuple[str, ...] = ("image_head:0.15", "extend:0.1")
    """Mask strategies as name:fraction, such as image_head:0.2 quarter_tail:0.05 random:0.1."""


# Options of data-centric steps, and their conflicts with other options.
#
# Nothing here imports torch: `gulliver train --help` reads this module.


@dataclass(frozen=True)
class PlannerConfig(Options):
    """Options of --data-centric: budget of a step, and decisions of the planner."""

    tokens: Annotated[int | None, Range(1, 2**40)] = None
    """Tokens per optimizer step, instead of --data.batch-size samples."""
    seconds: Annotated[float | None, POSITIVE] = None
    """Maximum predicted seconds per optimizer step, instead of --data.batch-size samples."""
    window: Annotated[int | None, Range(1, 2**24)] = None
    """Samples to look ahead; default: 16 steps."""
    intra: bool = True
    """Choose the number of ranks that share a clip; --planner.no-intra uses --planner.degree."""
    degree: Annotated[int | None, Range(1, 4096)] = None
    """Number of ranks that share a clip, with --planner.no-intra."""
    inter: bool = True
    """Run several micro-batches per group and step; --planner.no-inter runs one."""
    pac: bool = True
    """Keep activations in spare memory; --planner.no-pac recomputes every block."""
    unfit: Literal["refuse", "skip"] = "refuse"
    """Whether to refuse or to skip clips that do not fit in memory at any degree."""
    costs: Path | None = None
    """Cost file of a run on the same hardware; default: measured at the start of the run, and saved
    in its folder as costs.json.
    """
    memory_limit: Annotated[str | None, Size()] = None
    """Memory per rank, such as 20GiB; default: 90% of a GPU, or 10% of the host's memory."""


NAMES = tuple(field.name for field in fields(PlannerConfig))
PLANS_MAY_CHANGE = frozenset(
    f"planner.{name}" for name in ("intra", "degree", "inter", "pac", "costs", "memory_limit")
)
"""Options that affect where samples run, but not which samples a step has."""


def planner_needs(config: Any) -> dict[str, tuple[bool, str]]:
    centric, planner = config.data_centric, config.planner
    need = centric, "it needs --data-centric"
    other = planner.tokens is None and planner.seconds is None
    needs: dict[str, tuple[bool, str]] = {f"planner.{name}": need for name in NAMES}
    budget = "omit it: --planner.tokens or --planner.seconds define a step"
    needs["data.batch_size"] = other, budget
    stages = centric and config.pp_size > 1
    if stages:
        why = "omit it: pipeline stages need several micro-batches per group"
        needs["planner.inter"] = False, why
    told = "omit it with --data-centric: "
    for name, why in {
        "plugin": f"{told}its steps need ZeRO",
        "sp_size": f"{told}each step chooses how many ranks share a clip, or --planner.degree does",
        "accumulate": f"{told}each step has the micro-batches of its plan",
        "autoencoder.share": f"{told}each rank encodes the clips of its group",
        "data.bucket_ranks": f"{told}a step has --data.batch-size samples from any buckets",
    }.items():
        needs[name] = not centric, why
    return needs


def check_planner(config: Any) -> None:
    planner = config.planner
    if planner.tokens is not None and planner.seconds is not None:
        raise GulliverError(
            f"--planner.tokens {planner.tokens} and --planner.seconds {planner.seconds:g} cannot "
            "be combined; set only one of them"
        )
    if planner.intra and planner.degree is not None:
        raise GulliverError(
            f"--planner.degree {planner.degree} fixes the degree of all groups; add "
            "--planner.no-intra"
        )
    if not planner.intra and planner.degree is None:
        raise GulliverError("--planner.no-intra needs --planner.degree, the degree of all groups")


# Options of a training run: frozen dataclasses, one per part, that also define the command line.
#
# `TrainConfig` contains all of them. `differences` compares the options that must not change on
# resume.


# Nothing here may import torch at the top: `gulliver train --help` reads this module.

SENTENCES_NEVER_TRAINED = tuple(f"{digit}:{digit % 4}" for digit in range(10))
"""One sentence per digit that the demo holds out from training, as digit:direction."""


WEIGHT = Range(0, 1e6, open_below=True)
LONGEST_SIDE = 65535
MOST_PIXELS = 64 * 2048 * 2048


@dataclass(frozen=True)
class DataConfig(Options):
    """Training clips."""

    table: Path | None = None
    """CSV or Parquet table of clips (columns path, text), or a folder of clips with captions as
    file names; default: the moving digits.
    """
    shapes: tuple[str, ...] = ("13x32x32:5", "9x24x40:1.5", "17x40x24:1", "1x32x32:1.5")
    """Clip shapes as frames x height x width, with a weight after the colon (digits only)."""
    batch_size: Annotated[int, AT_LEAST_1] = 32
    """Global batch size in samples."""
    buckets: Path | None = None
    """Bucket configuration of a public trainer, instead of shapes and batch size (tables only)."""
    bucket_ranks: Annotated[int, AT_LEAST_1] = 1
    """Number of ranks for which each batch size of --data.buckets is meant."""
    scores: Literal["none", "1.2", "1.3", "2.0"] = "none"
    """Append the table's scores to captions: 1.2 as numbers and 1.3 as words (columns aes, flow,
    cmotion), 2.0 as a motion score (column motion_score).
    """
    clips: Annotated[int, Range(1, 100_000_000)] = 40_000
    """Samples per epoch of the moving digits."""
    held_out: tuple[str, ...] = ()
    """Sentences held out from training, as digit:direction with directions 0 to 3 (digits only)."""
    frame_interval: Annotated[int, Range(1, 10_000)] = 1
    """Use every n-th frame of a video (tables only)."""
    unreadable_limit: Annotated[float, SHARE] = 0.1
    """Stop if a larger fraction of an epoch's clips is unreadable (tables only)."""
    windows: Annotated[int, Range(0, 10_000)] = 0
    """Number of evenly spaced windows of a longer clip, one per epoch; 0: any (tables only)."""
    encoded: Path | None = None
    """Folder of latents from `gulliver data encode`, with or without a table."""

    @property
    def made(self) -> bool:
        """Whether the clips are the generated moving digits."""
        return self.table is None and self.encoded is None


@dataclass(frozen=True)
class AutoencoderConfig(Options):
    """The video autoencoder: existing, or trained first on the same clips."""

    path: Path | None = None
    """Trained autoencoder (.safetensors); without it, one is trained before the model."""
    steps: Annotated[int, AT_LEAST_1] = 700
    """Training steps."""
    batch_size: Annotated[int, AT_LEAST_1] = 16
    """Global batch size in clips."""
    learning_rate: Annotated[float, RATE] = 3e-3
    """Peak learning rate of the one-cycle schedule."""
    share: Literal["auto", "samples", "height", "width", "time", "off"] = "auto"
    """Dim of clips that the ranks of one model split for encoding; off: every rank encodes all."""


@dataclass(frozen=True)
class ModelConfig(Options):
    """The diffusion transformer."""

    size: str = "tiny"
    """Name in `STDIT3_SIZES`, or of an STDiT2 or STDiT3 listed by `gulliver models`."""
    weights: Path | None = None
    """Public STDiT2 or STDiT3 to start from, a folder or a file; determines the size."""
    text_encoder: Path | None = None
    """Folder of a T5 text encoder; default: frozen random word vectors."""
    text_channels: Annotated[int, Range(2, 65536)] = 64
    """Width of the frozen word vectors."""
    text_length: Annotated[int, Range(1, 4096)] = 8
    """Maximum caption length in words or tokens; --model.weights define their own."""
    zero_init_temporal: bool = False
    """Initialize the temporal blocks as identities, for weights of an image model."""
    temporal_positions: bool = True
    """Add a position code to each frame, so that training from scratch learns motion sooner."""

    @property
    def public(self) -> bool:
        """Whether the run trains a published model, which is sampled with `VideoPipeline`."""
        return self.weights is not None or self.text_encoder is not None


@dataclass(frozen=True)
class ValidationConfig(Options):
    """Loss of held-out clips at fixed noise levels, per bucket."""

    every: Annotated[int, AT_LEAST_0] = 0
    """Steps between validations, with one at the end; 0: none."""
    share: Annotated[float, SHARE] = 0.0
    """Fraction of a table's rows held out from training, selected by a hash of their paths."""
    clips: Annotated[int, AT_LEAST_1] = 32
    """Maximum held-out clips per bucket."""
    levels: Annotated[int, Range(1, 1000)] = 5
    """Number of evenly spaced noise levels."""


@dataclass(frozen=True)
class SamplesConfig(Options):
    """Clips sampled from the averaged weights during training, in the run's folder samples."""

    every: Annotated[int, AT_LEAST_0] = 0
    """Steps between samples, with some at the end, each with a checkpoint; 0: none."""
    prompt_file: Path | None = None
    """Text file with a prompt per line; default: captions of (held-out) clips."""
    clips: Annotated[int, Range(1, 64)] = 4
    """Number of captions to use without --samples.prompt-file."""
    shape: str | None = None
    """Trained shape, frames x height x width; default: the first, or the most common."""
    seed: Annotated[int, SEED] = 0
    """Seed of the first clip; the next clips use the next seeds."""
    steps: Annotated[int | None, Range(1, 100_000)] = None
    """Sampling steps; default: as for `gulliver generate`."""
    guidance: Annotated[float | None, GUIDANCE] = None
    """Guidance scale; default: as for `gulliver generate`."""


@dataclass(frozen=True)
class OptimizerConfig(Options):
    """AdamW with linear warm-up, cosine decay, clipping and averaged weights."""

    learning_rate: Annotated[float, RATE] = 3e-3
    """Peak learning rate."""
    final_fraction: Annotated[float, SHARE] = 0.02
    """Final learning rate as a fraction of the peak."""
    warmup: Annotated[int, AT_LEAST_0] = 50
    """Warm-up steps."""
    weight_decay: Annotated[float, SHARE] = 0.01
    """Decoupled weight decay."""
    beta2: Annotated[float, Range(0, 1, open_above=True)] = 0.98
    """Adam beta2."""
    clip: Annotated[float, AT_LEAST_0] = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    ema: Annotated[float, SHARE] = 0.995
    """Decay of the averaged weights, which generation uses."""


@dataclass(frozen=True)
class TrainConfig(Options):
    """Trains a text-to-video model."""

    out: Path = Path("runs/video")
    """Run folder for config, plan, log and checkpoints."""
    steps: Annotated[int, AT_LEAST_1] = 1500
    """Optimizer steps of the whole run."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU, or those of one model. Ignored under torchrun."""
    resume: bool = False
    """Resume from the newest checkpoint of the run folder; results are bitwise identical. More
    --steps extend the run, and the learning rate follows the new length.
    """
    resume_step: Annotated[int | None, AT_LEAST_0] = None
    """Resume from this step's checkpoint; later ones are abandoned."""
    seed: Annotated[int, SEED] = 0
    """Random seed."""
    plugin: Literal["zero", "ddp"] = "zero"
    """Data parallelism: ZeRO, or plain DDP with the whole optimizer on every rank."""
    stage: Literal[1, 2] = 1
    """ZeRO stage: 1 shards the optimizer, 2 also the gradients."""
    tp_size: Annotated[int, Range(1, 65536)] = 1
    """Tensor parallel size."""
    sp_size: Annotated[int, Range(1, 65536)] = 1
    """Sequence parallel size."""
    pp_size: Annotated[int, Range(1, 65536)] = 1
    """Pipeline parallel size; batches run in micro-batches."""
    sequence_parallelism_mode: Literal["all_to_all", "ring_attn"] | None = None
    """Sequence parallel mode; default: all_to_all. Needs --sp-size or --data-centric."""
    data_centric: bool = False
    """Plan each step from its clips: which ranks share a clip, and how many clips run at once."""
    accumulate: Annotated[int, AT_LEAST_1] = 1
    """Micro-batches per optimizer step; with a pipeline at least two per stage."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes under autocast, with float32 weights; leave it at fp32 on CPUs."""
    save_every: Annotated[int, AT_LEAST_1] = 200
    """Steps between checkpoints."""
    keep: Annotated[int, AT_LEAST_1] = 3
    """Number of checkpoints to keep."""
    async_save: bool = True
    """Write checkpoints asynchronously; otherwise training waits for each of them."""
    log_every: Annotated[int, AT_LEAST_1] = 10
    """Steps between log lines."""
    report_to: tuple[Tracker, ...] = ("tensorboard",)
    """Experiment trackers that get losses and samples."""
    data: DataConfig = field(default_factory=DataConfig)
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def ranks_of_a_model(self) -> int:
        """Number of ranks that hold one model and read the same clips."""
        return self.tp_size * self.sp_size * self.pp_size

    @property
    def micro_batches(self) -> int:
        return max(self.accumulate, 2 * self.pp_size)


@dataclass(frozen=True)
class SamplingConfig(Options):
    """Sampling options."""

    steps: Annotated[int, Range(1, 100_000)] = 24
    """Number of Euler steps from noise to clip."""
    guidance: Annotated[float, GUIDANCE] = 2.0
    """Guidance scale of the prompt; 1 disables guidance."""
    guidance_oscillation: Annotated[int | None, AT_LEAST_0] = None
    """Steps after which every second one has guidance 1, against oversaturation; published: 10."""
    guidance_image: Annotated[float, GUIDANCE] = 1.0
    """Guidance scale of the given frames, a third model call per step; 1 disables it."""
    guidance_image_oscillation: Annotated[int | None, AT_LEAST_0] = None
    """Steps after which every second one has image guidance 1; published: 10."""
    guidance_image_decay: bool = False
    """Decrease image guidance to 1 over the steps, and increase it from 1 over the frames."""
    guidance_rescale: Annotated[float, SHARE] = 0.0
    """Weight of restoring the velocity's standard deviation after guidance; published: 0.7."""
    batch_size: Annotated[int, AT_LEAST_1] = 40
    """Number of clips sampled together."""
    step_cache: str = "none"
    """Cache between steps: broadcast or first-block, see `cache_blocks`."""


@dataclass(frozen=True)
class DemoConfig(Options):
    """Trains, generates and evaluates a small model, and shows the result."""

    out: Path = Path("out/demo")
    """Folder for the results; an interrupted run in it is continued."""
    ranks: Annotated[int, RANKS] = 0
    """Processes; 0: one per GPU, two on a machine without GPUs."""
    steps: Annotated[int, AT_LEAST_1] = 1700
    """Training steps of the model."""
    autoencoder_steps: Annotated[int, AT_LEAST_1] = 500
    """Training steps of the autoencoder before it."""
    samples: Annotated[int, Range(1, 1_000_000)] = 200
    """Number of prompts to evaluate."""


MAY_CHANGE = frozenset(
    {"steps"}
    | {
        "out",
        "ranks",
        "resume",
        "resume_step",
        "plugin",
        "stage",
        "save_every",
        "keep",
        "log_every",
    }
    | {"tp_size", "sp_size", "pp_size", "sequence_parallelism_mode"}
    | {"async_save", "report_to"}
    | {"autoencoder.path", "autoencoder.share", "data.unreadable_limit", "data.encoded"}
    | {"validation.every", "validation.clips", "validation.levels"}
    | {f"samples.{field.name}" for field in fields(SamplesConfig)}
    | {"model.weights", "model.text_encoder"}
    | PLANS_MAY_CHANGE
)
"""Options that may change on resume: where, how and how long a run trains."""


def check_config(config: TrainConfig) -> TrainConfig:
    if config.model.text_channels % 2:
        raise GulliverError(f"--model.text-channels {config.model.text_channels} must be even")
    check_needs(config, planner_needs(config))
    check_needs(config, table_needs(config.data, "buckets", "scores") | _needs(config))
    check_planner(config)
    alone = config.samples.prompt_file is None, "omit it: --samples.prompt-file lists them all"
    check_needs(config, {"samples.clips": alone})
    weighted = [shape for shape in config.data.shapes if ":" in shape]
    if not config.data.made and weighted and config.data.shapes != DataConfig().shapes:
        raise GulliverError(
            f"--data.shapes {weighted[0]}: weights only apply to the moving digits, because clips "
            "of a table have fixed shapes; omit the colon and the weight"
        )
    share, every = config.validation.share, config.validation.every
    if not config.data.made and every and not share:
        raise GulliverError(
            f"--validation.every {every} needs held-out clips; add a --validation.share, such as "
            "0.05"
        )
    if config.resume_step is not None and not config.resume:
        raise GulliverError(f"--resume-step {config.resume_step} needs --resume")
    _check_flow(config.flow, parse_shapes(config.data.shapes))
    _check_sizes(config)
    return config


def table_needs(data: DataConfig, *more: str) -> dict[str, tuple[bool, str]]:
    need = not data.made, "it needs a --data.table"
    return {f"data.{name}": need for name in ("frame_interval", "windows", *more)}


OF_DIGITS = "it applies to the moving digits; omit it with a table or latents"
SAMPLED = "add --samples.every, such as 200"


def _needs(config: TrainConfig) -> dict[str, tuple[bool, str]]:
    return {
        "data.clips": (config.data.made, OF_DIGITS),
        "data.held_out": (config.data.made, OF_DIGITS),
        "data.bucket_ranks": (config.data.buckets is not None, "add --data.buckets"),
        "data.shapes": (config.data.buckets is None, "omit it: --data.buckets defines it"),
        "data.batch_size": (
            config.data.buckets is None or config.data_centric,
            "omit it: --data.buckets defines them",
        ),
        **{f"samples.{f.name}": (config.samples.every > 0, SAMPLED) for f in fields(SamplesConfig)},
        "flow.shift_rule": (config.flow.shift_by_size, "it needs --flow.shift-by-size"),
        "validation.share": (
            not config.data.made,
            "it needs a --data.table; the moving digits have held-out handwriting",
        ),
    }


def _check_flow(flow: FlowConfig, shapes: Iterable[Bucket]) -> None:
    from gulliver.models.autoencoder import VideoAutoencoder
    from gulliver.video.batches import MaskStrategies
    from gulliver.video.flows import RULES, ClipSize

    MaskStrategies.of(flow)
    for bucket in shapes if flow.shift_by_size else ():
        frames = (bucket.frames - 1) // VideoAutoencoder.compression[0] + 1
        RULES[flow.shift_rule](ClipSize(bucket.height, bucket.width, frames))


def _check_sizes(config: TrainConfig) -> None:
    from gulliver.models.stdit import STDIT3_SIZES

    sizes = STDIT3_SIZES.get(config.model.size, {})
    blocks = 2 * sizes.get("depth", config.pp_size)
    if config.pp_size > blocks:
        raise GulliverError(
            f"--pp-size {config.pp_size} exceeds the {blocks} blocks of model "
            f"{config.model.size!r}; use at most {blocks}"
        )
    heads = sizes.get("num_heads", config.tp_size)
    if config.tp_size > heads:
        # Boost checks it too, but only after the autoencoder has been trained.
        raise GulliverError(
            f"--tp-size {config.tp_size} exceeds the {heads} heads of model "
            f"{config.model.size!r}; use at most {heads}"
        )
    if config.ranks_of_a_model > 1 and config.plugin == "ddp":
        raise GulliverError(
            "--plugin ddp keeps the whole model on every rank; omit it for --tp-size "
            f"{config.tp_size} --sp-size {config.sp_size} --pp-size {config.pp_size}"
        )
    shared = config.sp_size > 1 or config.data_centric
    if config.sequence_parallelism_mode is not None and not shared:
        raise GulliverError(
            f"--sequence-parallelism-mode {config.sequence_parallelism_mode} needs --sp-size 2 or "
            "more, or --data-centric"
        )


def parse_shapes(texts: tuple[str, ...]) -> dict[Bucket, float]:
    """Parses shapes such as ``13x32x32:6`` into buckets and weights."""
    from gulliver.data.clips import Bucket

    shapes: dict[Bucket, float] = {}
    for text in texts:
        shape, _, weight = text.partition(":")
        try:
            frames, height, width = (int(part) for part in shape.split("x"))
            bucket, share = Bucket(frames, height, width), float(weight or 1)
        except ValueError:
            raise GulliverError(
                f"shape {text!r} is not frames x height x width; use for example 13x32x32 or "
                "13x32x32:6"
            ) from None
        if share not in WEIGHT or bucket in shapes:
            problem = "it occurs twice" if bucket in shapes else f"a weight must be {WEIGHT}"
            raise GulliverError(f"--data.shapes {text!r} is invalid: {problem}")
        check_clip(frames, height, width)
        shapes[bucket] = share
    if not shapes:
        raise GulliverError("--data.shapes is empty; set at least one shape, such as 13x32x32")
    return shapes


def check_clip(frames: int, height: int, width: int, scale: int = 1) -> None:
    """Raises an error for clips too large for any machine, before anything is loaded."""
    for name, value in (("frames", frames), ("height", height), ("width", width)):
        if not 1 <= value <= LONGEST_SIDE:
            raise GulliverError(
                f"a clip of {frames}x{height}x{width} is too large or empty; {name} must be "
                f"between 1 and {LONGEST_SIDE}"
            )
    pixels = frames * height * width * scale**2
    if pixels > MOST_PIXELS:
        scaled = f" at scale {scale}" if scale > 1 else ""
        raise GulliverError(
            f"a clip of {frames}x{height}x{width}{scaled} has {pixels:.1e} pixels; the maximum is "
            f"{MOST_PIXELS:.1e}, such as 64 frames of 2048x2048"
        )


# Options of `gulliver data encode`: a frozen dataclass that also defines the command line.
#
# Nothing here may import torch at the top: ``--help`` reads this module.


@dataclass(frozen=True)
class EncodeConfig(Options):
    """Stores latents and caption embeddings of a table's clips for training."""

    table: tyro.conf.Positional[Path]
    """CSV or Parquet table of clips (columns path, text), or a folder of clips."""
    autoencoder: Path
    """Folder or file of the autoencoder."""
    out: Path
    """Folder for the latents; an interrupted call is continued."""
    text_encoder: Path | None = None
    """Folder of a T5 text encoder; without it no caption embeddings are stored."""
    text_length: Annotated[int, Range(1, 4096)] = 300
    """Maximum caption length in tokens of --text-encoder."""
    shapes: tuple[str, ...] = ()
    """Clip shapes as frames x height x width, such as 17x64x64; instead of --buckets."""
    buckets: Path | None = None
    """Bucket configuration of a public trainer; a clip is stored for each bucket that it fits."""
    frame_interval: Annotated[int, Range(1, 10_000)] = 1
    """Use every n-th frame of a video."""
    windows: Annotated[int, Range(1, 10_000)] = 1
    """Number of evenly spaced windows of a longer clip, of which an epoch uses one."""
    scores: Literal["none", "1.2", "1.3", "2.0"] = "none"
    """Append the table's scores to captions, as `gulliver train --data.scores`."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the stored latents; float32 trains as on pixels, the others take half the space."""
    shard_clips: Annotated[int, AT_LEAST_1] = 32
    """Windows per file; an interruption loses at most one file per rank."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU. Ignored under torchrun."""


# Options for cutting clips; read before torch is imported.


THRESHOLDS = {"adaptive": 3.0, "content": 27.0}
"""Default thresholds of the detectors, as in PySceneDetect."""


@dataclass(frozen=True, kw_only=True)
class CutSettings(Options):
    """How scenes are detected, and how their clips are written."""

    detector: Literal["adaptive", "content", "none"] = "adaptive"
    """Scene detector of PySceneDetect: adaptive (relative change), content (absolute change), or
    none: each file is one scene.
    """
    threshold: Annotated[float | None, POSITIVE] = None
    """Cut threshold: multiple of the surrounding changes (adaptive; default 3), or mean pixel
    change in levels of 255 (content; default 27).
    """
    least_change: Annotated[float, Range(0, 255)] = 15.0
    """Minimum mean pixel change of a cut, in levels of 255 (adaptive)."""
    window: Annotated[int, Range(1, 100)] = 2
    """Number of frames before and after a frame to compare it with (adaptive)."""
    min_seconds: Annotated[float, Range(0, 1e6)] = 0.5
    """Minimum length of a clip; shorter scenes are skipped and listed."""
    max_seconds: Annotated[float, Range(0, 1e6, open_below=True)] = 20.0
    """Maximum length of a clip; longer scenes are divided evenly."""
    fps: Annotated[float | None, Range(0.1, 1000)] = None
    """Frames per second of the clips; default: the file's rate, or if that is variable, a rate that
    shows every frame, up to 120.
    """
    shorter_side: Annotated[int | None, Range(2, 2**14)] = None
    """Maximum pixels of the shorter side; larger pictures are scaled down."""
    codec: Literal["h264", "ffv1"] = "h264"
    """Codec of the clips: H.264 in mp4 files, or lossless FFV1 in mkv files."""
    crf: Annotated[int, Range(0, 51)] = 18
    """H.264 quality (CRF): 0 is nearly lossless, 51 the worst."""
    preset: Literal["ultrafast", "veryfast", "faster", "fast", "medium", "slow"] = "veryfast"
    """H.264 preset: slower ones make smaller files."""
