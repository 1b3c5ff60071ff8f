"""`FlowConfig`: the options of rectified flow. Imports no torch: `--help` reads it."""

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
    check_needs,
)

if TYPE_CHECKING:
    from gulliver.data.clips import Bucket


@dataclass(frozen=True)
class FlowConfig(Options):
    """Rectified flow: how noise and data are mixed in training."""

    timesteps: Literal["uniform", "logit-normal"] = "logit-normal"
    """Law of the noise level."""
    shift: Annotated[float, Range(0, 1000, open_below=True)] = 3.0
    """Factor of the noise level's odds; more than 1 trains more at high noise."""
    shift_by_size: bool = False
    """Multiply the odds by a ratio of the clip's size too."""
    shift_rule: Literal["latent", "1.2", "1.3", "2.0"] = "latent"
    """Ratio of a size: roots of the area over 512x512 and the latent frames, or as published."""
    drop_caption: Annotated[float, SHARE] = 0.1
    """Share of captions hidden, for classifier-free guidance."""
    masks: tuple[str, ...] = ("image_head:0.15", "extend:0.1")
    """Mask strategies as name:share, such as image_head:0.2 quarter_tail:0.05 random:0.1."""


# Options of data-centric steps, and which other options they exclude.
#
# Nothing here imports torch: `gulliver train --help` reads this module.


@dataclass(frozen=True)
class PlannerConfig(Options):
    """Steps of --data-centric: what each of them takes, and what is chosen for it."""

    tokens: Annotated[int | None, Range(1, 2**40)] = None
    """Tokens of an optimizer step, in place of --data.batch-size samples."""
    seconds: Annotated[float | None, POSITIVE] = None
    """Most predicted seconds of an optimizer step, in place of --data.batch-size samples."""
    window: Annotated[int | None, Range(1, 2**24)] = None
    """Samples that are looked at ahead; by default 16 steps' worth."""
    intra: bool = True
    """Groups of ranks choose how many share a clip; with --planner.no-intra all have
    --planner.degree."""
    degree: Annotated[int | None, Range(1, 4096)] = None
    """Ranks that share a clip, with --planner.no-intra."""
    inter: bool = True
    """Groups run several micro-batches in a step; with --planner.no-inter one each."""
    pac: bool = True
    """Memory that is left keeps activations; with --planner.no-pac every block is computed
    again."""
    unfit: Literal["refuse", "skip"] = "refuse"
    """What becomes of clips that fit at no degree."""
    costs: Path | None = None
    """File of costs that a run on such machines has kept; by default measured when the run begins,
    and kept in its folder as costs.json."""
    memory_limit: str | None = None
    """Memory of a rank, such as 20GiB; by default 90% of a GPU, or 10% of the machine's memory."""


NAMES = tuple(field.name for field in fields(PlannerConfig))
PLANS_MAY_CHANGE = frozenset(
    f"planner.{name}" for name in ("intra", "degree", "inter", "pac", "costs", "memory_limit")
)
"""Options that change who runs a sample, and not which samples there are."""


def planner_needs(config: Any) -> dict[str, tuple[bool, str]]:
    """Lists what the options need to have an effect, for `check_needs`."""
    centric, planner = config.data_centric, config.planner
    need = centric, "add --data-centric, which it is for"
    other = planner.tokens is None and planner.seconds is None
    needs: dict[str, tuple[bool, str]] = {f"planner.{name}": need for name in NAMES}
    budget = "leave it out, --planner.tokens or --planner.seconds say what a step takes"
    needs["data.batch_size"] = other, budget
    stages = centric and config.pp_size > 1
    if stages:
        why = "leave it out: stages of a pipeline need several micro-batches a group"
        needs["planner.inter"] = False, why
    told = "leave it out with --data-centric: "
    for name, why in {
        "plugin": f"{told}its steps need ZeRO",
        "sp_size": f"{told}each step chooses how many ranks share a clip, or --planner.degree does",
        "accumulate": f"{told}each step has the micro-batches that its plan says",
        "autoencoder.share": f"{told}each rank encodes the clips of its group",
        "data.bucket_ranks": f"{told}a step is of --data.batch-size samples, of any buckets",
    }.items():
        needs[name] = not centric, why
    return needs


def check_planner(config: Any) -> None:
    """Refuses budgets and degrees that exclude each other."""
    planner = config.planner
    if planner.tokens is not None and planner.seconds is not None:
        raise GulliverError(
            f"--planner.tokens {planner.tokens} and --planner.seconds {planner.seconds:g} exclude "
            "each other: give one budget of a step"
        )
    if planner.intra and planner.degree is not None:
        raise GulliverError(
            f"--planner.degree {planner.degree} is of all groups: add --planner.no-intra"
        )
    if not planner.intra and planner.degree is None:
        raise GulliverError("--planner.no-intra needs a --planner.degree, that of all groups")


# Options of a training run: frozen dataclasses, one per part, which are also the command line.
#
# `TrainConfig` holds all of them. What a checkpoint depends on, and what may change between a run
# and its resumption, is told apart by `differences`.


# Nothing here imports torch at the top, nor may it: `gulliver train --help` reads this module.

SENTENCES_NEVER_TRAINED = tuple(f"{digit}:{digit % 4}" for digit in range(10))
"""One sentence of each digit that the demonstration keeps from training, as digit:direction."""


WEIGHT = Range(0, 1e6, open_below=True)
LONGEST_SIDE = 65535
MOST_PIXELS = 64 * 2048 * 2048


@dataclass(frozen=True)
class DataConfig(Options):
    """Clips to learn from."""

    table: Path | None = None
    """CSV or Parquet table of clips (columns path, text), or a folder of clips whose names are
    their captions; without one, the moving digits."""
    shapes: tuple[str, ...] = ("13x32x32:5", "9x24x40:1.5", "17x40x24:1", "1x32x32:1.5")
    """Clip shapes as frames x height x width, with a weight after the colon (digits only)."""
    batch_size: Annotated[int, AT_LEAST_1] = 32
    """Global batch size: samples of one optimizer step, all ranks together."""
    buckets: Path | None = None
    """Bucket configuration of a public trainer, in place of shapes and batch size (tables only)."""
    bucket_ranks: Annotated[int, AT_LEAST_1] = 1
    """Number of ranks that the batch sizes of --data.buckets are for, each."""
    scores: Literal["none", "1.2", "1.3", "2.0"] = "none"
    """Put the table's scores into captions: 1.2 numbers and 1.3 words (columns aes, flow, cmotion),
    2.0 a motion score (column motion_score)."""
    clips: Annotated[int, Range(1, 100_000_000)] = 40_000
    """Length of an epoch of the moving digits."""
    held_out: tuple[str, ...] = ()
    """Sentences kept from training, as digit:direction with directions 0 to 3 (digits only)."""
    frame_interval: Annotated[int, Range(1, 10_000)] = 1
    """Take every n-th frame of a video (tables only)."""
    unreadable_limit: Annotated[float, SHARE] = 0.1
    """Stop when a larger share of an epoch's clips cannot be read (tables only)."""
    windows: Annotated[int, Range(0, 10_000)] = 0
    """Windows of a longer clip, evenly spread; an epoch takes one of them; 0: any (tables only)."""
    encoded: Path | None = None
    """Folder of `gulliver data encode`: latents of the clips, in place of or beside a table."""

    @property
    def made(self) -> bool:
        """Whether the clips are the moving digits, which are made."""
        return self.table is None and self.encoded is None


@dataclass(frozen=True)
class AutoencoderConfig(Options):
    """The video autoencoder: given, or trained first on the same clips."""

    path: Path | None = None
    """A trained autoencoder (.safetensors); without one, it is trained before the model."""
    steps: Annotated[int, AT_LEAST_1] = 700
    """Steps of its training."""
    batch_size: Annotated[int, AT_LEAST_1] = 16
    """Clips of one of its steps."""
    learning_rate: Annotated[float, RATE] = 3e-3
    """Peak of its one-cycle learning rate."""
    share: Literal["auto", "samples", "height", "width", "time", "off"] = "auto"
    """Dim of clips that the ranks of one model cut to encode together; off: every rank all."""


@dataclass(frozen=True)
class ModelConfig(Options):
    """The diffusion transformer."""

    size: str = "tiny"
    """A name of `STDIT3_SIZES`, or of an STDiT2 or STDiT3 in `gulliver models`."""
    weights: Path | None = None
    """Public STDiT2 or STDiT3 to go on from, a folder or a file; its size is read off it."""
    text_encoder: Path | None = None
    """Folder of a T5 that reads captions; without one, words have frozen random vectors."""
    text_channels: Annotated[int, Range(2, 65536)] = 64
    """Width of the frozen word vectors."""
    text_length: Annotated[int, Range(1, 4096)] = 8
    """Longest caption in words, or in tokens of --model.text-encoder; weights have their own."""
    zero_init_temporal: bool = False
    """Start the temporal blocks as identities: for weights that come from an image model."""
    temporal_positions: bool = True
    """Add a code to each frame: from scratch, directions are learnt far sooner."""

    @property
    def public(self) -> bool:
        """Whether its parts are public ones, which a `VideoPipeline` samples."""
        return self.weights is not None or self.text_encoder is not None


@dataclass(frozen=True)
class ValidationConfig(Options):
    """Loss of held-out clips at fixed noise levels, by bucket."""

    every: Annotated[int, AT_LEAST_0] = 0
    """Steps between validations, one is at the end too; 0: none."""
    share: Annotated[float, SHARE] = 0.0
    """Share of a table's rows that is held out of training, by a hash of their paths."""
    clips: Annotated[int, AT_LEAST_1] = 32
    """Most held-out clips of a bucket."""
    levels: Annotated[int, Range(1, 1000)] = 5
    """Number of noise levels, evenly between none and all."""


@dataclass(frozen=True)
class SamplesConfig(Options):
    """Clips that the averaged weights make while they learn, kept in the run's folder samples."""

    every: Annotated[int, AT_LEAST_0] = 0
    """Steps between samples, with a checkpoint each; some are made at the end too; 0: none."""
    prompt_file: Path | None = None
    """Text file with a prompt on each line; by default captions of (held-out) clips."""
    clips: Annotated[int, Range(1, 64)] = 4
    """Number of captions that are taken without --samples.prompt-file."""
    shape: str | None = None
    """Shape that is trained, frames x height x width; by default the first, or the most usual."""
    seed: Annotated[int, SEED] = 0
    """Noise of the first clip; the next clips take the next seeds."""
    steps: Annotated[int | None, Range(1, 100_000)] = None
    """Sampling steps; by default those of `gulliver generate`."""
    guidance: Annotated[float | None, GUIDANCE] = None
    """Weight of the sentence; by default that of `gulliver generate`."""


@dataclass(frozen=True)
class OptimizerConfig(Options):
    """AdamW with linear warm-up, cosine decay, clipping and an average of the weights."""

    learning_rate: Annotated[float, RATE] = 3e-3
    """Peak learning rate."""
    final_fraction: Annotated[float, SHARE] = 0.02
    """The last learning rate as a fraction of the peak."""
    warmup: Annotated[int, AT_LEAST_0] = 50
    """Steps of warm-up."""
    weight_decay: Annotated[float, SHARE] = 0.01
    """Decoupled weight decay."""
    beta2: Annotated[float, Range(0, 1, open_above=True)] = 0.98
    """Decay of the second moment."""
    clip: Annotated[float, AT_LEAST_0] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    ema: Annotated[float, SHARE] = 0.995
    """Decay of the averaged weights that generation uses."""


@dataclass(frozen=True)
class TrainConfig(Options):
    """Trains a text-to-video model."""

    out: Path = Path("runs/video")
    """The run folder: config, plan, log, checkpoints."""
    steps: Annotated[int, AT_LEAST_1] = 1500
    """Optimizer steps of the whole run."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU, or one model's. Ignored under torchrun."""
    resume: bool = False
    """Continue from the newest checkpoint of the run folder, bit for bit; more --steps extend the
    run, and the learning rate follows its new length."""
    resume_step: Annotated[int | None, AT_LEAST_0] = None
    """Continue from this step's checkpoint; later ones become a branch that was left."""
    seed: Annotated[int, SEED] = 0
    """Seed of everything random."""
    plugin: Literal["zero", "ddp"] = "zero"
    """Data parallelism: ZeRO, or plain DDP with the whole optimizer on every rank."""
    stage: Literal[1, 2] = 1
    """ZeRO stage: 1 shards the optimizer, 2 the gradients as well."""
    tp_size: Annotated[int, Range(1, 65536)] = 1
    """Ranks that share each layer's tensors."""
    sp_size: Annotated[int, Range(1, 65536)] = 1
    """Ranks that share each clip's tokens."""
    pp_size: Annotated[int, Range(1, 65536)] = 1
    """Pipeline stages that the blocks are cut into; a batch runs in micro-batches."""
    sequence_parallelism_mode: Literal["all_to_all", "ring_attn"] | None = None
    """How ranks share a clip's tokens; by default all_to_all. It needs ranks that share."""
    data_centric: bool = False
    """Plan each step from the clips that it has: who shares one, and runs how many at once."""
    accumulate: Annotated[int, AT_LEAST_1] = 1
    """Micro-batches of one optimizer step; with pipeline stages at least two per stage."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes under autocast, with float32 weights; leave it at fp32 on CPUs."""
    save_every: Annotated[int, AT_LEAST_1] = 200
    """Steps between checkpoints."""
    keep: Annotated[int, AT_LEAST_1] = 3
    """Number of newest checkpoints kept."""
    async_save: bool = True
    """Write checkpoints while training goes on; off: training waits until each is on the disk."""
    log_every: Annotated[int, AT_LEAST_1] = 10
    """Steps between lines of the log."""
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
        """Ranks that hold one model together, and read the same clips."""
        return self.tp_size * self.sp_size * self.pp_size

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a pipeline."""
        return max(self.accumulate, 2 * self.pp_size)


@dataclass(frozen=True)
class SamplingConfig(Options):
    """How clips are sampled."""

    steps: Annotated[int, Range(1, 100_000)] = 24
    """Euler steps from noise to clip."""
    guidance: Annotated[float, GUIDANCE] = 2.0
    """Weight of the sentence; 1 turns guidance off."""
    guidance_oscillation: Annotated[int | None, AT_LEAST_0] = None
    """Steps after which every second has guidance 1, against loud colours; published: 10."""
    guidance_image: Annotated[float, GUIDANCE] = 1.0
    """Weight of the given frames, a third run of the model per step; 1 turns it off."""
    guidance_image_oscillation: Annotated[int | None, AT_LEAST_0] = None
    """Steps after which every second has image guidance 1; published: 10."""
    guidance_image_decay: bool = False
    """Let image guidance fall to 1 over the steps, and rise from 1 over the frames."""
    guidance_rescale: Annotated[float, SHARE] = 0.0
    """Share by which guidance keeps the velocity's standard deviation; published: 0.7."""
    batch_size: Annotated[int, AT_LEAST_1] = 40
    """Clips sampled together."""
    step_cache: str = "none"
    """What is re-used from step to step: broadcast or first-block, see `cache_blocks`."""


@dataclass(frozen=True)
class DemoConfig(Options):
    """Trains, generates and judges, and shows the result."""

    out: Path = Path("out/demo")
    """Folder for the results; what an earlier call began is continued."""
    ranks: Annotated[int, RANKS] = 0
    """Processes; 0: one per GPU, two on a machine without."""
    steps: Annotated[int, AT_LEAST_1] = 2400
    """Training steps of the model."""
    autoencoder_steps: Annotated[int, AT_LEAST_1] = 700
    """Training steps of the autoencoder before it."""
    samples: Annotated[int, Range(1, 1_000_000)] = 200
    """Number of prompts that are judged."""


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
    | {"async_save"}
    | {"autoencoder.path", "autoencoder.share", "data.unreadable_limit", "data.encoded"}
    | {"validation.every", "validation.clips", "validation.levels"}
    | {f"samples.{field.name}" for field in fields(SamplesConfig)}
    | {"model.weights", "model.text_encoder"}
    | PLANS_MAY_CHANGE
)
"""Options that may differ between a run and its resumption: where, how, and how long."""


def check_config(config: TrainConfig) -> TrainConfig:
    """Refuses values that no run could use."""
    if config.model.text_channels % 2:
        raise GulliverError(
            f"--model.text-channels is {config.model.text_channels}: it must be even"
        )
    check_needs(config, planner_needs(config))
    check_needs(config, table_needs(config.data, "buckets", "scores") | _needs(config))
    check_planner(config)
    alone = (
        config.samples.prompt_file is None,
        "leave it out, --samples.prompt-file names all of them",
    )
    check_needs(config, {"samples.clips": alone})
    weighted = [shape for shape in config.data.shapes if ":" in shape]
    if not config.data.made and weighted and config.data.shapes != DataConfig().shapes:
        raise GulliverError(
            f"--data.shapes {weighted[0]}: weights are for the moving digits, each clip of a table "
            "goes to the shape that it fills: leave the colon and what follows out"
        )
    share, every = config.validation.share, config.validation.every
    if not config.data.made and every and not share:
        raise GulliverError(
            f"--validation.every {every} needs held-out clips: add a --validation.share, such as "
            "0.05"
        )
    if config.resume_step is not None and not config.resume:
        raise GulliverError(
            f"--resume-step {config.resume_step} says where to continue: add --resume"
        )
    _check_flow(config.flow, parse_shapes(config.data.shapes))
    _check_sizes(config)
    return config


def table_needs(data: DataConfig, *more: str) -> dict[str, tuple[bool, str]]:
    """Lists options that only clips of a table can have, for `check_needs`."""
    need = not data.made, "it is for the clips of a --data.table"
    return {f"data.{name}": need for name in ("frame_interval", "windows", *more)}


OF_DIGITS = "it is for the moving digits, leave it out with a table or latents"
SAMPLED = "add --samples.every, such as 200"


def _needs(config: TrainConfig) -> dict[str, tuple[bool, str]]:
    """Lists what the other options need to have an effect."""
    return {
        "data.clips": (config.data.made, OF_DIGITS),
        "data.held_out": (config.data.made, OF_DIGITS),
        "data.bucket_ranks": (config.data.buckets is not None, "add --data.buckets"),
        "data.shapes": (config.data.buckets is None, "leave it out, --data.buckets has its own"),
        "data.batch_size": (
            config.data.buckets is None or config.data_centric,
            "leave it out, --data.buckets has them",
        ),
        **{f"samples.{f.name}": (config.samples.every > 0, SAMPLED) for f in fields(SamplesConfig)},
        "flow.shift_rule": (config.flow.shift_by_size, "add --flow.shift-by-size, which it is for"),
        "validation.share": (
            not config.data.made,
            "it is for the clips of a --data.table, the moving digits have held-out handwriting",
        ),
    }


def _check_flow(flow: FlowConfig, shapes: Iterable[Bucket]) -> None:
    """Refuses masks that cannot be, and shapes that the timestep warp has no ratio for."""
    from gulliver.models.autoencoder import VideoAutoencoder
    from gulliver.video.batches import MaskStrategies
    from gulliver.video.flows import RULES, ClipSize

    MaskStrategies.of(flow)
    for bucket in shapes if flow.shift_by_size else ():
        frames = (bucket.frames - 1) // VideoAutoencoder.compression[0] + 1
        RULES[flow.shift_rule](ClipSize(bucket.height, bucket.width, frames))


def _check_sizes(config: TrainConfig) -> None:
    """Refuses ways to share one model between ranks that this loop does not have."""
    from gulliver.models.stdit import STDIT3_SIZES

    sizes = STDIT3_SIZES.get(config.model.size, {})
    blocks = 2 * sizes.get("depth", config.pp_size)
    if config.pp_size > blocks:
        raise GulliverError(
            f"--pp-size is {config.pp_size}: model {config.model.size!r} has {blocks} blocks, and "
            f"each stage needs one: at most {blocks}"
        )
    heads = sizes.get("num_heads", config.tp_size)
    if config.tp_size > heads:
        # Boost refuses it too, but that is after the autoencoder has been trained.
        raise GulliverError(
            f"--tp-size is {config.tp_size}: model {config.model.size!r} has {heads} heads, and "
            f"each rank needs one: at most {heads}"
        )
    if config.ranks_of_a_model > 1 and config.plugin == "ddp":
        raise GulliverError(
            f"--plugin ddp keeps the whole model on every rank: leave it out for --tp-size "
            f"{config.tp_size} --sp-size {config.sp_size} --pp-size {config.pp_size}"
        )
    shared = config.sp_size > 1 or config.data_centric
    if config.sequence_parallelism_mode is not None and not shared:
        raise GulliverError(
            f"--sequence-parallelism-mode {config.sequence_parallelism_mode} needs an --sp-size of "
            "at least 2, the ranks that share a clip, or --data-centric"
        )


def parse_shapes(texts: tuple[str, ...]) -> dict[Bucket, float]:
    """Reads shapes such as ``13x32x32:6`` into buckets and weights."""
    from gulliver.data.clips import Bucket

    shapes: dict[Bucket, float] = {}
    for text in texts:
        shape, _, weight = text.partition(":")
        try:
            frames, height, width = (int(part) for part in shape.split("x"))
            bucket, share = Bucket(frames, height, width), float(weight or 1)
        except ValueError:
            raise GulliverError(
                f"shape {text!r} is not frames x height x width, such as 13x32x32 or 13x32x32:6"
            ) from None
        if share not in WEIGHT or bucket in shapes:
            problem = "it is named twice" if bucket in shapes else f"a weight must be {WEIGHT}"
            raise GulliverError(f"--data.shapes: {text!r}: {problem}")
        check_clip(frames, height, width)
        shapes[bucket] = share
    if not shapes:
        raise GulliverError("--data.shapes needs at least one shape, such as 13x32x32")
    return shapes


def check_clip(frames: int, height: int, width: int, scale: int = 1) -> None:
    """Refuses clips that no machine holds, before anything is loaded."""
    for name, value in (("frames", frames), ("height", height), ("width", width)):
        if not 1 <= value <= LONGEST_SIDE:
            raise GulliverError(
                f"a clip of {frames}x{height}x{width}: {name} must be between 1 and {LONGEST_SIDE}"
            )
    pixels = frames * height * width * scale**2
    if pixels > MOST_PIXELS:
        scaled = f" at scale {scale}" if scale > 1 else ""
        raise GulliverError(
            f"a clip of {frames}x{height}x{width}{scaled} has {pixels:.1e} pixels: at most "
            f"{MOST_PIXELS:.1e}, such as 64 frames of 2048x2048"
        )


# Options of `gulliver data encode`: a frozen dataclass, which is also the command line.
#
# Nothing here imports torch at the top, nor may it: ``--help`` reads this module.


@dataclass(frozen=True)
class EncodeConfig(Options):
    """Keeps the latents of a table's clips, and what their captions say, for training."""

    table: tyro.conf.Positional[Path]
    """CSV or Parquet table of clips (columns path, text), or a folder of clips."""
    autoencoder: Path
    """Folder or file of the autoencoder."""
    out: Path
    """Folder for the latents; what an earlier call began there is continued."""
    text_encoder: Path | None = None
    """Folder of the T5 that reads captions; without one no texts are kept."""
    text_length: Annotated[int, Range(1, 4096)] = 300
    """Longest caption in tokens of --text-encoder."""
    shapes: tuple[str, ...] = ()
    """Clip shapes as frames x height x width, such as 17x64x64; in place of --buckets."""
    buckets: Path | None = None
    """Bucket configuration of a public trainer: every bucket that a clip may come to is kept."""
    frame_interval: Annotated[int, Range(1, 10_000)] = 1
    """Take every n-th frame of a video."""
    windows: Annotated[int, Range(1, 10_000)] = 1
    """Windows of each longer clip, evenly spread, one of which an epoch takes."""
    scores: Literal["none", "1.2", "1.3", "2.0"] = "none"
    """Put the table's scores into captions, as `gulliver train --data.scores`."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the kept latents; float32 trains as clips do, the others take half the disk."""
    shard_clips: Annotated[int, AT_LEAST_1] = 32
    """Windows of a file; what is killed loses at most one file per rank."""
    ranks: Annotated[int, RANKS] = 0
    """Processes on this machine; 0: one per GPU. Ignored under torchrun."""


# How clips are cut: options that are read before torch is imported.


THRESHOLDS = {"adaptive": 3.0, "content": 27.0}
"""Thresholds of the detectors where none is given: those of PySceneDetect."""


@dataclass(frozen=True, kw_only=True)
class CutSettings(Options):
    """How scenes are found, and how their clips are written."""

    detector: Literal["adaptive", "content", "none"] = "adaptive"
    """Way to find scenes, of PySceneDetect: a change that stands out from those around it, a change
    that is large, or none: each file is one scene."""
    threshold: Annotated[float | None, POSITIVE] = None
    """Threshold of a cut: how many times the changes around it (adaptive; by default 3), or mean
    change of a pixel in levels of 255 (content; by default 27)."""
    least_change: Annotated[float, Range(0, 255)] = 15.0
    """Mean change of a pixel, in levels of 255, below which nothing is a cut (adaptive)."""
    window: Annotated[int, Range(1, 100)] = 2
    """Frames before and after one that it is compared with (adaptive)."""
    min_seconds: Annotated[float, Range(0, 1e6)] = 0.5
    """Least length of a clip; shorter scenes are left out, and listed."""
    max_seconds: Annotated[float, Range(0, 1e6, open_below=True)] = 20.0
    """Most length of a clip; longer scenes are divided evenly."""
    fps: Annotated[float | None, Range(0.1, 1000)] = None
    """Frames per second of the clips, by the times of the frames; by default those of the file, and
    of a file of variable rate the one at which each frame is shown, up to 120."""
    shorter_side: Annotated[int | None, Range(2, 2**14)] = None
    """Pixels of the shorter side, for pictures that are larger."""
    codec: Literal["h264", "ffv1"] = "h264"
    """Codec of the clips: H.264 in mp4 files, or FFV1 in mkv files, which loses nothing."""
    crf: Annotated[int, Range(0, 51)] = 18
    """Quality of H.264: 0 loses next to nothing, 51 nearly all."""
    preset: Literal["ultrafast", "veryfast", "faster", "fast", "medium", "slow"] = "veryfast"
    """Effort of H.264: what is slower makes smaller files."""
