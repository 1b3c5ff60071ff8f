"""Configurations of published models, and quirks that their weights depend on.

By default every model enables the quirks of its release, so that published weights behave as they
were trained; ``compat=()`` disables them for training from scratch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from gulliver.errors import GulliverError, check_known, nearest
from gulliver.options import AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE, Options, Range

if TYPE_CHECKING:
    from torch import nn


QUIRKS = {
    "final_norm_twice": (
        "the final layer normalizes given frames after their first modulation instead of before, "
        "because the public training code overwrote its input"
    ),
    "first_clip_scale": (
        "height and width of the first clip determine the position scale of the whole batch, "
        "because batches in the public training have a single size"
    ),
    "final_size_of_given": (
        "the final layer adds size and aspect ratio to the noise level of given frames only, "
        "because the public code passed it two different embeddings"
    ),
    "rotate_before_norm": (
        "queries and keys are rotated before their norm, so that its learned scale applies to "
        "rotated channels; later releases normalize first"
    ),
    "null_text_cut": (
        "the null text for given frames is truncated to the length of the clip's own caption, "
        "because the public code has a single list of lengths"
    ),
    "micro_frames": (
        "a clip is encoded and decoded in independent pieces of 17 frames, because public models "
        "were trained on such latents, including the seams; in 1.3 pieces share a frame, which "
        "decodes to the mean"
    ),
    "raster_causal_attention": (
        "tokens of the middle block attend to earlier tokens in raster order instead of to their "
        "whole frame, because the public code used plain causal attention over the flattened clip"
    ),
}
"""Quirks of published weights, and why the weights need them."""

QUIRKS_OF = {
    "STDiT": (),
    "STDiT2": (
        "final_norm_twice",
        "first_clip_scale",
        "final_size_of_given",
        "rotate_before_norm",
    ),
    "STDiT3": ("final_norm_twice", "first_clip_scale", "null_text_cut"),
    "MMDiT": (),
    "PipelineAutoencoder": ("micro_frames",),
    "CausalAutoencoder": ("micro_frames", "raster_causal_attention"),
}
"""Quirks of each model class; its published weights need all of them."""


def checked_quirks(model: str, compat: Collection[str] | None) -> frozenset[str]:
    """Returns the enabled quirks of a model, validated."""
    having = QUIRKS_OF[model]
    if isinstance(compat, str):
        compat = (compat,)
    for name in compat or ():
        if name not in having:
            known = nearest(name, having) if having else "it has none"
            raise GulliverError(f"{model} has no quirk {name!r}; {known}")
    return frozenset(having if compat is None else compat)


# Configurations of the transformers, with the public field names, and model construction.
#
# Nothing here imports torch.


T = TypeVar("T")
Config = TypeVar("Config", bound="TransformerConfig")
Size = Annotated[int, AT_LEAST_1]

REFUSED_WHEN_SET = {
    "enable_flash_attn": "attention always uses torch's scaled_dot_product_attention",
    "enable_flashattn": "attention always uses torch's scaled_dot_product_attention",
    "enable_layernorm_kernel": "layer norms always use torch",
    "enable_sequence_parallelism": "models have no parallelism",
    "skip_y_embedder": "captions are always embedded by the model",
    "skip_temporal": "a model without temporal blocks is not supported",
    "drop_path": "stochastic depth is not supported",
    "no_temporal_pos_emb": "frames are always distinguished as in the public weights",
    "freeze": "call requires_grad_(False) on the parameters to freeze",
    "grad_ckpt_settings": "the booster recomputes activations, not the model",
}
"""Fields of published configurations that have no effect here or are not supported."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Options):
    """Fields of every transformer."""

    hidden_size: Size
    """Width C."""
    depth: Size
    """Number of blocks; in an STDiT3, pairs of blocks; in an MMDiT, double blocks."""
    num_heads: Size
    """Attention heads."""
    mlp_ratio: Annotated[float, POSITIVE] = 4.0
    """Hidden width of the MLPs relative to C."""
    compat: Collection[str] | None = None
    """Names of enabled `QUIRKS`; None for those of the published weights."""


@dataclass(frozen=True, kw_only=True)
class STDiTConfig(TransformerConfig):
    """Fields of an `STDiT`, the first version."""

    input_size: tuple[Size | None, ...] = (1, 32, 32)
    """Latent frames, rows and columns of every clip; STDiT2 and STDiT3 accept any size."""
    in_channels: Size = 4
    """Channels of the latent."""
    patch_size: tuple[Size, Size, Size] = (1, 2, 2)
    """Latent frames, rows and columns per token."""
    hidden_size: Size = 1152
    depth: Size = 28
    num_heads: Size = 16
    class_dropout_prob: Annotated[float, SHARE] = 0.1
    """Fraction of captions replaced by the null caption in training."""
    pred_sigma: bool = True
    """Predict noise and variance in twice the channels; rectified flow uses the first half."""
    caption_channels: Size = 4096
    """Width of the text encoder's output."""
    model_max_length: Size = 120
    """Maximum caption length in tokens."""
    space_scale: Annotated[float, POSITIVE] = 1.0
    """Position scale of rows and columns: resolution relative to unscaled positions."""
    time_scale: Annotated[float, POSITIVE] = 1.0
    """Frames per unit of the temporal code."""


@dataclass(frozen=True, kw_only=True)
class _LaterSTDiTConfig(STDiTConfig):
    """Fields that STDiT2 and STDiT3 share."""

    input_size: tuple[Size | None, ...] = (None, None, None)
    input_sq_size: Size = 512
    """Side in pixels of the resolution with unscaled positions."""
    qk_norm: bool = True
    """RMS norm of queries and keys."""


@dataclass(frozen=True, kw_only=True)
class STDiT2Config(_LaterSTDiTConfig):
    """Fields of an `STDiT2`; its width must be a multiple of 3."""

    model_max_length: Size = 200
    qk_norm_legacy: bool | None = None
    """Apply rotary codes before the norm, as in published configurations; None: as in `compat`."""


@dataclass(frozen=True, kw_only=True)
class STDiT3Config(_LaterSTDiTConfig):
    """Fields of an `STDiT3`."""

    model_max_length: Size = 300
    only_train_temporal: bool = False
    """Freeze all parameters except the temporal blocks."""
    freeze_y_embedder: bool = False
    """Freeze the caption embedder."""
    zero_init_temporal: bool = True
    """Initialize temporal blocks as identities, for training that starts from an image model."""
    temporal_positions: bool = False
    """Add a sinusoidal frame code to the tokens, as in STDiT. The published STDiT3 has none: its
    rotary code only distinguishes frames by content, so the direction of motion is learned late.
    """
    kernel_size: tuple[Annotated[int, Range(-1)], ...] | None = None
    """Rows, columns and frames of the temporal blocks' attention windows, -1 for all, with a rotary
    code of three axes; None: attention along time only.
    """
    use_spatial_rope: bool = False
    """Also use rotary codes of rows and columns in the spatial blocks."""
    image_conditioning: bool = False
    """Embed given frames and their mask in addition to the noisy latents."""


@dataclass(frozen=True, kw_only=True)
class MMDiTConfig(TransformerConfig):
    """Fields of an `MMDiT`."""

    in_channels: Size = 64
    """Width of a packed latent: channels times the square of `patch_size`."""
    vec_in_dim: Size = 768
    """Width of the text encoder's pooled vector."""
    context_in_dim: Size = 4096
    """Width of the text encoder's token vectors."""
    hidden_size: Size = 3072
    num_heads: Size = 24
    depth: Size = 19
    depth_single_blocks: Annotated[int, AT_LEAST_0] = 38
    """Number of single blocks."""
    axes_dim: tuple[Size, ...] = (16, 56, 56)
    """Widths of a head rotated by frame, row and column; they add up to the head size."""
    theta: Annotated[float, POSITIVE] = 10_000
    """Base of the rotary frequencies."""
    qkv_bias: bool = True
    """Whether queries, keys and values of the double blocks have biases."""
    guidance_embed: bool = False
    """Whether the model is conditioned on the guidance scale that it was distilled for."""
    cond_embed: bool = False
    """Whether given frames and their mask are packed and added to the video tokens."""
    fused_qkv: bool = True
    """Whether queries, keys and values share one matrix."""
    use_liger_rope: bool = False
    """Whether the two elements of a rotary pair are half a head apart."""
    patch_size: Size = 2
    """Rows and columns of a packed latent."""
    model_max_length: Size = 512
    """Maximum text length in tokens."""


CONFIGS = {
    "STDiT": STDiTConfig,
    "STDiT2": STDiT2Config,
    "STDiT3": STDiT3Config,
    "MMDiT": MMDiTConfig,
}


def config_of(kind: type[Config], config: Config | None, fields: Mapping[str, Any]) -> Config:
    known = [field.name for field in dataclasses.fields(kind)]
    for name, value in fields.items():
        if name not in known and name not in REFUSED_WHEN_SET:
            model, right = kind.__name__.removesuffix("Config"), [*known, *REFUSED_WHEN_SET]
            raise GulliverError(f"{model} has no field {name!r}: {nearest(name, right)}")
        if name in REFUSED_WHEN_SET and value:
            raise GulliverError(f"{name}={value!r} is not supported; {REFUSED_WHEN_SET[name]}")
    own = {name: value for name, value in fields.items() if name in known}
    return kind(**own) if config is None else dataclasses.replace(config, **own)


def make_of_fields(kind: type[T], fields: Mapping[str, Any], where: object = None) -> T:
    told = "" if where is None else f"{where}: "
    try:
        return kind(**fields)
    except GulliverError as error:
        raise GulliverError(f"{told}{error}") from None
    except (TypeError, ValueError, IndexError, RuntimeError, ZeroDivisionError) as error:
        line = str(error).strip().split("\n")[0]
        raise GulliverError(f"{told}a {kind.__name__} cannot have these fields: {line}") from error


# The table of public models: name, release, class, fields and latent sizes.
#
# `build` creates one of them. The documentation, `gulliver models` and the tests read this table.
# Nothing here imports torch.


XL = {"hidden_size": 1152, "depth": 28, "num_heads": 16}
THREE_B = {"hidden_size": 1872, "depth": 28, "num_heads": 26}
T5 = "t5-v1_1-xxl"


@dataclass(frozen=True)
class Configuration:
    """Configuration of a public model."""

    release: str
    # Name of its class in `gulliver.models`.
    kind: str
    fields: Mapping[str, Any]
    # Frames, rows and columns of pixels per latent.
    compression: tuple[int, int, int]
    # Frames, height and width of a typical clip, in pixels.
    clip: tuple[int, int, int]
    # Frames per piece of its autoencoder, each with its own first latent.
    chunk: int | None = None
    # Text encoders that it uses.
    text: tuple[str, ...] = (T5,)
    # Conditioning in addition to text.
    conditions: tuple[str, ...] = ()
    note: str = ""

    def latent(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        time, *space = self.compression
        whole, rest = divmod(frames, self.chunk or max(frames, 1))
        parts = [self.chunk or frames] * whole + ([rest] if rest else [])
        rows, columns = (
            -(-size // step) for size, step in zip((height, width), space, strict=True)
        )
        return sum(-(-part // time) for part in parts), rows, columns


IMAGE = {"image_conditioning": True, "kernel_size": (8, 8, -1), "use_spatial_rope": True}
V1_3 = {"in_channels": 16, **IMAGE}
MODERN = {"fused_qkv": False, "use_liger_rope": True, "cond_embed": True}
GIVEN = ("frames at noise 0 (x_mask)",)
WITH_CLIP = (T5, "clip-vit-large-patch14")

OPEN_SORA_1_0 = Configuration(
    "Open-Sora 1.0",
    "STDiT",
    {**XL, "input_size": (16, 32, 32), "space_scale": 0.5},
    (1, 8, 8),
    (16, 256, 256),
    note="fixed clip size; positions are buffers of the weights",
)
OPEN_SORA_1_1 = Configuration(
    "Open-Sora 1.1",
    "STDiT2",
    XL,
    (1, 8, 8),
    (16, 240, 426),
    conditions=GIVEN,
    note="conditioned on height, width, aspect ratio, number of frames and fps",
)
OPEN_SORA_1_2 = Configuration(
    "Open-Sora 1.2",
    "STDiT3",
    XL,
    (4, 8, 8),
    (51, 240, 426),
    chunk=17,
    conditions=GIVEN,
    note="conditioned on fps; alternating spatial and temporal blocks",
)
OPEN_SORA_1_3 = Configuration(
    "Open-Sora 1.3",
    "STDiT3",
    {**XL, **V1_3},
    (4, 8, 8),
    (113, 360, 640),
    conditions=(*GIVEN, "latents of given frames (cond)"),
    note="temporal blocks attend in windows of 8 x 8 x all frames",
)
OPEN_SORA_2_0 = Configuration(
    "Open-Sora 2.0",
    "MMDiT",
    MODERN,
    (4, 8, 8),
    (129, 192, 336),
    text=WITH_CLIP,
    conditions=("mask and latents of given frames (cond)",),
    note="19 double and 38 single blocks; latents of HunyuanVideo's autoencoder",
)
FLUX_1 = Configuration(
    "FLUX.1",
    "MMDiT",
    {"guidance_embed": True},
    (1, 8, 8),
    (1, 768, 768),
    text=WITH_CLIP,
    note="the picture model that 2.0 starts from and takes first frames from",
)

CONFIGURATIONS: dict[str, Configuration] = {
    "STDiT-XL/2": OPEN_SORA_1_0,
    "STDiT-XL/2-512": replace(
        OPEN_SORA_1_0, fields={**XL, "input_size": (16, 64, 64)}, clip=(16, 512, 512)
    ),
    "STDiT2-XL/2": OPEN_SORA_1_1,
    "STDiT3-XL/2": OPEN_SORA_1_2,
    "STDiT3-3B/2": replace(OPEN_SORA_1_2, fields=THREE_B),
    "STDiT3-XL/2-v1.3": OPEN_SORA_1_3,
    "STDiT3-3B/2-v1.3": replace(OPEN_SORA_1_3, fields={**THREE_B, **V1_3}),
    "MMDiT-11B": OPEN_SORA_2_0,
    "MMDiT-11B-DC": replace(
        OPEN_SORA_2_0,
        fields={**MODERN, "in_channels": 128, "patch_size": 1},
        compression=(4, 32, 32),
        clip=(128, 768, 768),
        note="the same, on latents of the deep-compression autoencoder",
    ),
    "FLUX.1-dev": FLUX_1,
}
"""Public models by name."""


def build(name: str, **overrides: Any) -> nn.Module:
    """Builds a public model with optional changes to its configuration.

    Args:
        name: name in `CONFIGURATIONS`.
        overrides: arguments of its class.

    Raises:
        GulliverError: the name or a field is unknown, or a field has an invalid value.
    """
    check_known("model", name, CONFIGURATIONS)
    from gulliver import models

    configuration = CONFIGURATIONS[name]
    kind = getattr(models, configuration.kind)
    return make_of_fields(kind, {**configuration.fields, **overrides})
