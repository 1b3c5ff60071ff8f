"""Configurations of the transformers, named as in the public ones, and models built of them.

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from gulliver.errors import GulliverError, nearest
from gulliver.options import AT_LEAST_0, AT_LEAST_1, POSITIVE, SHARE, Options, Range

T = TypeVar("T")
Config = TypeVar("Config", bound="TransformerConfig")
Size = Annotated[int, AT_LEAST_1]

REFUSED_WHEN_SET = {
    "enable_flash_attn": "attention always runs through torch's scaled_dot_product_attention",
    "enable_flashattn": "attention always runs through torch's scaled_dot_product_attention",
    "enable_layernorm_kernel": "layer norms always run through torch",
    "enable_sequence_parallelism": "models know nothing of parallelism",
    "skip_y_embedder": "captions are always embedded by the model",
    "skip_temporal": "a model without temporal blocks is not supported",
    "drop_path": "stochastic depth is not supported",
    "no_temporal_pos_emb": "frames are always told apart as the public weights do it",
    "freeze": "use requires_grad_ on the parameters to freeze",
    "grad_ckpt_settings": "activations are recomputed by the booster, not by the model",
}
"""Fields of public configurations that change nothing here, or what is not supported."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Options):
    """Fields of every transformer."""

    hidden_size: Size
    """Width C."""
    depth: Size
    """Number of blocks; of an STDiT3 pairs of a spatial and a temporal one, of an MMDiT double
    ones."""
    num_heads: Size
    """Attention heads."""
    mlp_ratio: Annotated[float, POSITIVE] = 4.0
    """Hidden width of the MLPs over C."""
    compat: Collection[str] | None = None
    """Names of `QUIRKS` that the model shall have; None for those of its public weights."""


@dataclass(frozen=True, kw_only=True)
class STDiTConfig(TransformerConfig):
    """Fields of an `STDiT`, the first form."""

    input_size: tuple[Size | None, ...] = (1, 32, 32)
    """Latent frames, rows and columns of every clip; later forms read sizes off each input."""
    in_channels: Size = 4
    """Channels of the latent."""
    patch_size: tuple[Size, Size, Size] = (1, 2, 2)
    """Latent frames, rows and columns of a token."""
    hidden_size: Size = 1152
    depth: Size = 28
    num_heads: Size = 16
    class_dropout_prob: Annotated[float, SHARE] = 0.1
    """Share of captions replaced by the null caption in training."""
    pred_sigma: bool = True
    """Twice the output channels: noise and its variance; rectified flow uses the first half."""
    caption_channels: Size = 4096
    """Width of the text encoder's vectors."""
    model_max_length: Size = 120
    """Longest caption in tokens."""
    space_scale: Annotated[float, POSITIVE] = 1.0
    """Resolution over the one at which positions are unscaled."""
    time_scale: Annotated[float, POSITIVE] = 1.0
    """Frames per unit of the temporal code."""


@dataclass(frozen=True, kw_only=True)
class _LaterSTDiTConfig(STDiTConfig):
    """Fields of the second and the third form."""

    input_size: tuple[Size | None, ...] = (None, None, None)
    input_sq_size: Size = 512
    """Side in pixels of the resolution at which positions are unscaled."""
    qk_norm: bool = True
    """RMS norm of queries and keys."""


@dataclass(frozen=True, kw_only=True)
class STDiT2Config(_LaterSTDiTConfig):
    """Fields of an `STDiT2`; its width is a multiple of 3."""

    model_max_length: Size = 200
    qk_norm_legacy: bool | None = None
    """Rotation before the norm, as public configurations say it; None leaves it to `compat`."""


@dataclass(frozen=True, kw_only=True)
class STDiT3Config(_LaterSTDiTConfig):
    """Fields of an `STDiT3`."""

    model_max_length: Size = 300
    only_train_temporal: bool = False
    """Freeze all but the temporal blocks."""
    freeze_y_embedder: bool = False
    """Freeze the caption embedder."""
    zero_init_temporal: bool = True
    """Start the temporal blocks as identities, as a model that grows out of an image model should;
    from scratch on little data False learns faster."""
    temporal_positions: bool = False
    """Add a sinusoidal code of the frame to the tokens, as the first form did. The public third
    form has none: its rotary code tells frames apart only by what they show, so which way things
    move is learnt late."""
    kernel_size: tuple[Annotated[int, Range(-1)], ...] | None = None
    """Rows, columns and frames of the windows in which temporal blocks attend, -1 for all of them,
    with a rotary code of three axes; None: along time alone."""
    use_spatial_rope: bool = False
    """Rotary codes of rows and columns in the spatial blocks, too."""
    image_conditioning: bool = False
    """Embed given frames and their mask in addition to the noisy latents."""


@dataclass(frozen=True, kw_only=True)
class MMDiTConfig(TransformerConfig):
    """Fields of an `MMDiT`."""

    in_channels: Size = 64
    """Width of a packed latent: channels times the square of `patch_size`."""
    vec_in_dim: Size = 768
    """Width of the text encoder's single vector."""
    context_in_dim: Size = 4096
    """Width of the text encoder's token vectors."""
    hidden_size: Size = 3072
    num_heads: Size = 24
    depth: Size = 19
    depth_single_blocks: Annotated[int, AT_LEAST_0] = 38
    """Number of single blocks."""
    axes_dim: tuple[Size, ...] = (16, 56, 56)
    """Widths of a head that frame, row and column turn; their sum is a head."""
    theta: Annotated[float, POSITIVE] = 10_000
    """Base of the rotary frequencies."""
    qkv_bias: bool = True
    """Whether queries, keys and values of the double blocks have a bias."""
    guidance_embed: bool = False
    """Whether the model is told the strength of guidance that it was distilled to."""
    cond_embed: bool = False
    """Whether given frames and their mask are added, packed, to the video tokens."""
    fused_qkv: bool = True
    """Whether queries, keys and values are one matrix."""
    use_liger_rope: bool = False
    """Whether rotary pairs are half a head apart."""
    patch_size: Size = 2
    """Rows and columns of a packed latent."""
    model_max_length: Size = 512
    """Longest text in tokens."""


CONFIGS = {
    "STDiT": STDiTConfig,
    "STDiT2": STDiT2Config,
    "STDiT3": STDiT3Config,
    "MMDiT": MMDiTConfig,
}
"""Configurations by the class of the model."""


def config_of(kind: type[Config], config: Config | None, fields: Mapping[str, Any]) -> Config:
    """Returns the configuration of a model: the one given, with some fields changed."""
    known = [field.name for field in dataclasses.fields(kind)]
    for name, value in fields.items():
        if name not in known and name not in REFUSED_WHEN_SET:
            model, right = kind.__name__.removesuffix("Config"), [*known, *REFUSED_WHEN_SET]
            raise GulliverError(f"{model} has no field {name!r}: {nearest(name, right)}")
        if name in REFUSED_WHEN_SET and value:
            raise GulliverError(f"{name}={value!r} is refused: {REFUSED_WHEN_SET[name]}")
    own = {name: value for name, value in fields.items() if name in known}
    return kind(**own) if config is None else dataclasses.replace(config, **own)


def make_of_fields(kind: type[T], fields: Mapping[str, Any], where: object = None) -> T:
    """Builds a model; `where` says for the error what the fields are of."""
    told = "" if where is None else f"{where}: "
    try:
        return kind(**fields)
    except GulliverError as error:
        raise GulliverError(f"{told}{error}") from None
    except (TypeError, ValueError, IndexError, RuntimeError, ZeroDivisionError) as error:
        line = str(error).strip().split("\n")[0]
        raise GulliverError(f"{told}no {kind.__name__} has these fields: {line}") from error
