"""What a training run is told: frozen dataclasses, one per part, which are also the command line.

`TrainConfig` is the whole of it. `resolved` turns it into plain JSON for the run folder,
`from_plain` turns that back and refuses keys it does not know. What a checkpoint depends on, and
what may change between a run and its resumption, is told apart by `differences`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gulliver.data import Bucket
from gulliver.errors import GulliverError, nearest
from gulliver.models import STDIT3_SIZES

SENTENCES_NEVER_TRAINED = tuple(f"{digit}:{digit % 4}" for digit in range(10))
"""One sentence of each digit that the demonstration keeps from training, as digit:direction."""


@dataclass(frozen=True)
class DataConfig:
    """Which clips to learn from."""

    table: Path | None = None
    """CSV or Parquet table of clips (columns path, text); without one, the moving digits."""
    shapes: tuple[str, ...] = ("13x32x32:5", "9x24x40:1.5", "17x40x24:1", "1x32x32:1.5")
    """Clip shapes as frames x height x width, with a weight after the colon (digits only)."""
    batch_size: int = 32
    """Samples of one optimizer step, all ranks together."""
    clips: int = 40_000
    """Length of an epoch of the moving digits."""
    held_out: tuple[str, ...] = ()
    """Sentences kept from training, as digit:direction with directions 0 to 3 (digits only)."""
    frame_interval: int = 1
    """Take every n-th frame of a video (tables only)."""
    unreadable_limit: float = 0.1
    """Stop when a larger share of an epoch's clips cannot be read (tables only)."""


@dataclass(frozen=True)
class AutoencoderConfig:
    """The video autoencoder: given, or trained first on the same clips."""

    path: Path | None = None
    """A trained autoencoder (.safetensors); without one, it is trained before the model."""
    steps: int = 700
    """Steps of its training."""
    batch_size: int = 16
    """Clips of one of its steps."""
    learning_rate: float = 3e-3
    """Peak of its one-cycle learning rate."""


@dataclass(frozen=True)
class ModelConfig:
    """The diffusion transformer."""

    size: str = "tiny"
    """A name of `gulliver.models.STDIT3_SIZES`."""
    text_channels: int = 64
    """Width of the frozen word vectors."""
    text_length: int = 8
    """Longest caption in words."""
    zero_init_temporal: bool = False
    """Start the temporal blocks as identities: for weights that come from an image model."""
    temporal_positions: bool = True
    """Tell frames apart by a code of their own: from scratch, directions are learnt far sooner."""


@dataclass(frozen=True)
class FlowConfig:
    """Rectified flow: how noise and data are mixed in training."""

    timesteps: Literal["uniform", "logit-normal"] = "logit-normal"
    """Law of the noise level."""
    shift: float = 3.0
    """The noise's odds are multiplied by this: at high noise it is decided what is shown."""
    shift_by_size: bool = False
    """Multiply them by the roots of the clip's area over 512x512 and of its latent length too."""
    drop_caption: float = 0.1
    """Share of captions hidden, for classifier-free guidance."""
    mask_first: float = 0.15
    """Share of clips whose first latent frame is given: image-to-video."""
    mask_head: float = 0.1
    """Share of clips whose first quarter is given: extension."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay, clipping and an average of the weights."""

    learning_rate: float = 3e-3
    """Peak learning rate."""
    final_fraction: float = 0.02
    """The last learning rate as a fraction of the peak."""
    warmup: int = 50
    """Steps of warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    beta2: float = 0.98
    """Decay of the second moment."""
    clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    ema: float = 0.995
    """Decay of the averaged weights that generation uses."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    out: Path = Path("runs/video")
    """The run folder: config, plan, log, checkpoints."""
    steps: int = 1500
    """Optimizer steps of the whole run."""
    ranks: int = 0
    """Processes on this machine; 0: one per GPU, or one model's. Ignored under torchrun."""
    resume: bool = False
    """Continue from the newest checkpoint of the run folder, bit for bit."""
    seed: int = 0
    """Seed of everything random."""
    plugin: Literal["zero", "ddp"] = "zero"
    """How the ranks share the work."""
    stage: Literal[1, 2] = 1
    """ZeRO stage: 1 shards the optimizer, 2 the gradients as well."""
    tp_size: int = 1
    """Ranks that share each layer's tensors."""
    sp_size: int = 1
    """Ranks that share each clip's tokens."""
    pp_size: int = 1
    """Stages of a pipeline: this loop runs without one, so 1."""
    sequence_parallelism_mode: Literal["all_to_all", "ring_attn"] | None = None
    """How they share them; without one, all_to_all. It needs an sp_size."""
    accumulate: int = 1
    """Micro-batches of one optimizer step."""
    mixed_precision: Literal["none", "bf16"] = "none"
    """bf16 autocast; leave it off on CPUs, where it is slower."""
    save_every: int = 200
    """Steps between checkpoints."""
    keep: int = 3
    """Checkpoints kept."""
    async_save: bool = True
    """Write checkpoints while training goes on; off: training waits until each is on the disk."""
    log_every: int = 10
    """Steps between lines of the log."""
    data: DataConfig = field(default_factory=DataConfig)
    autoencoder: AutoencoderConfig = field(default_factory=AutoencoderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def ranks_of_a_model(self) -> int:
        """Ranks that hold one model together, and read the same clips."""
        return self.tp_size * self.sp_size


MAY_CHANGE = frozenset(
    {"out", "ranks", "resume", "plugin", "stage", "save_every", "keep", "log_every"}
    | {"tp_size", "sp_size", "pp_size", "sequence_parallelism_mode"}
    | {"async_save"}
    | {"autoencoder.path", "data.unreadable_limit"}
)
"""What may differ between a run and its resumption: it changes where and how, not what."""


def check_config(config: TrainConfig) -> TrainConfig:
    """Refuses values that no run could use.

    Raises:
        GulliverError: naming the field, its value and what would be right.
    """
    positive = {
        "--steps": config.steps,
        "--accumulate": config.accumulate,
        "--save-every": config.save_every,
        "--keep": config.keep,
        "--log-every": config.log_every,
        "--data.batch-size": config.data.batch_size,
        "--data.clips": config.data.clips,
        "--data.frame-interval": config.data.frame_interval,
        "--autoencoder.steps": config.autoencoder.steps,
        "--autoencoder.batch-size": config.autoencoder.batch_size,
        "--optimizer.learning-rate": config.optimizer.learning_rate,
    }
    for name, value in positive.items():
        if value <= 0:
            raise GulliverError(f"{name} is {value}: it must be positive")
    shares = {
        "--flow.drop-caption": config.flow.drop_caption,
        "--flow.mask-first + --flow.mask-head": config.flow.mask_first + config.flow.mask_head,
        "--optimizer.ema": config.optimizer.ema,
        "--optimizer.beta2": config.optimizer.beta2,
    }
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise GulliverError(f"{name} is {value}: it must lie between 0 and 1")
    parse_shapes(config.data.shapes)
    _check_sizes(config)
    return config


def _check_sizes(config: TrainConfig) -> None:
    """Refuses ways to share one model between ranks that this loop does not have."""
    sizes = {"--tp-size": config.tp_size, "--sp-size": config.sp_size, "--pp-size": config.pp_size}
    for name, size in sizes.items():
        if size < 1:
            raise GulliverError(f"{name} is {size}: it must be at least 1")
    if config.pp_size > 1:
        raise GulliverError(
            f"--pp-size is {config.pp_size}: clips are trained without a pipeline, share the model "
            "by --tp-size and --sp-size; in a loop of your own Booster.execute_pipeline runs one"
        )
    heads = STDIT3_SIZES.get(config.model.size, {}).get("num_heads", config.tp_size)
    if config.tp_size > heads:
        # Boost refuses it too, but that is after the autoencoder has been trained.
        raise GulliverError(
            f"--tp-size is {config.tp_size}: model {config.model.size!r} has {heads} heads, and "
            f"each rank needs one: at most {heads}"
        )
    if config.ranks_of_a_model > 1 and config.plugin == "ddp":
        raise GulliverError(
            f"--plugin ddp keeps the whole model on every rank: leave it out for --tp-size "
            f"{config.tp_size} --sp-size {config.sp_size}"
        )
    if config.sequence_parallelism_mode is not None and config.sp_size == 1:
        raise GulliverError(
            f"--sequence-parallelism-mode {config.sequence_parallelism_mode} needs an --sp-size of "
            "at least 2: the ranks that share a clip"
        )


def parse_shapes(texts: tuple[str, ...]) -> dict[Bucket, float]:
    """Reads shapes such as ``13x32x32:6`` into buckets and weights."""
    shapes: dict[Bucket, float] = {}
    for text in texts:
        shape, _, weight = text.partition(":")
        try:
            frames, height, width = (int(part) for part in shape.split("x"))
            shapes[Bucket(frames, height, width)] = float(weight or 1)
        except ValueError:
            raise GulliverError(
                f"shape {text!r} is not frames x height x width, such as 13x32x32 or 13x32x32:6"
            ) from None
    if not shapes or any(weight <= 0 for weight in shapes.values()):
        raise GulliverError("--data.shapes needs at least one shape, each of positive weight")
    return shapes


def resolved(config: Any) -> dict[str, Any]:
    """The configuration as plain JSON values."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, Path) else value

    return plain(dataclasses.asdict(config))


def from_plain(values: dict[str, Any], kind: type = TrainConfig, prefix: str = "") -> Any:
    """Builds a configuration from plain values.

    Raises:
        GulliverError: for a key that `kind` does not have, naming the nearest.
    """
    if not isinstance(values, dict):
        raise GulliverError(f"config key {prefix.rstrip('.')!r} must hold a table of values")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise GulliverError(f"unknown config key {prefix + key!r}: {nearest(key, hints)}")
    built = {}
    for key, value in values.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            built[key] = from_plain(value, typing.cast(type, hint), f"{prefix}{key}.")
        else:
            built[key] = _typed(value, hint, prefix + key)
    return kind(**built)


def _typed(value: Any, hint: Any, name: str) -> Any:
    """`value` as the annotated type, or an error that names the key."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in arguments:
            choices = ", ".join(repr(choice) for choice in arguments)
            raise GulliverError(f"config key {name!r} is {value!r}: choose from {choices}")
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_typed(item, arguments[0], name) for item in value)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(value, arguments[0], name)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (
        isinstance(hint, type)
        and isinstance(value, hint)
        and (hint is bool) == (value in (True, False) and isinstance(value, bool))
    ):
        return value
    kind = getattr(hint, "__name__", str(hint))
    raise GulliverError(f"config key {name!r} is {value!r}: it must be of type {kind}")


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The keys in which two resolved configurations differ, those that may change left out."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        name = prefix + key
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, name + ".")
        elif before != after and name not in MAY_CHANGE:
            found.append(f"{name} was {before!r}, is {after!r}")
    return found
