"""Identifies models and their configuration by the names and shapes of their tensors.

`look_of` recognizes any known state dict, including unsupported ones for better error messages;
`fields_of` infers the configuration of supported ones from shapes, for files without a
``config.json``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gulliver.errors import GulliverError

Shapes = Mapping[str, tuple[int, ...]]


class StateDictKind(NamedTuple):
    """A recognized kind of state dict."""

    # Class in `gulliver.models`; empty if unsupported.
    kind: str
    told: str
    # Pattern of a tensor name that identifies it.
    mark: str


LOOKS = (
    StateDictKind("STDiT3", "an STDiT3 of Open-Sora 1.3", r"x_embedder_cond\."),
    StateDictKind(
        "STDiT3", "an STDiT3 of Open-Sora 1.2", r"temporal_blocks\.\d+\.scale_shift_table"
    ),
    StateDictKind(
        "STDiT2", "an STDiT2 of Open-Sora 1.1", r"blocks\.\d+\.scale_shift_table_temporal"
    ),
    StateDictKind("STDiT", "an STDiT of Open-Sora 1.0", r"blocks\.\d+\.attn_temp\."),
    StateDictKind("", "a PixArt picture model", r"blocks\.\d+\.scale_shift_table"),
    StateDictKind("MMDiT", "an MMDiT of Open-Sora 2.0", r"cond_in\."),
    StateDictKind("MMDiT", "a FLUX.1 model", r"double_blocks\.\d+\.img_attn\."),
    StateDictKind("", "a model in the layout of diffusers", r"(single_)?transformer_blocks\.\d+\."),
    StateDictKind("", "a video autoencoder of Open-Sora 1.2", r"(spatial_vae|temporal_vae)\."),
    StateDictKind("", "an autoencoder", r"(encoder|decoder)\.(conv_in|down_blocks|mid|up)"),
    StateDictKind("", "a T5 text encoder", r"encoder\.block\.\d+\."),
    StateDictKind("", "a CLIP model", r"text_model\."),
)
"""Known state dicts, from most to least specific."""


def look_of(names: Iterable[str]) -> StateDictKind | None:
    """Returns the kind of state dict that has these tensor names; None if unknown."""
    listed = list(names)
    for look in LOOKS:
        if any(re.match(look.mark, name) for name in listed):
            return look
    return None


def fields_of(shapes: Shapes) -> tuple[str, dict[str, Any]]:
    """Returns the class of a state dict, and the configuration fields inferred from its shapes."""
    look = look_of(shapes)
    if look is None or not look.kind:
        found = f"looks like {look.told}" if look else "is not recognized"
        raise GulliverError(
            f"the state dict {found}; expected the tensor names of STDiT, STDiT2, STDiT3 or MMDiT"
        )
    try:
        return look.kind, (_mmdit if look.kind == "MMDiT" else _stdit)(shapes, look)
    except (KeyError, ValueError) as error:
        raise GulliverError(
            f"the state dict looks like {look.told}, but lacks {error}; download the files again"
        ) from None


def count_of(shapes: Shapes, prefix: str) -> int:
    found = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in shapes)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def _stdit(shapes: Shapes, look: StateDictKind) -> dict[str, Any]:
    hidden, channels, *patch = shapes["x_embedder.proj.weight"]
    length, captions = shapes["y_embedder.y_embedding"]
    blocks = "spatial_blocks" if look.kind == "STDiT3" else "blocks"
    outputs = shapes["final_layer.linear.weight"][0]
    fields: dict[str, Any] = {
        "in_channels": channels,
        "patch_size": tuple(patch),
        "hidden_size": hidden,
        "depth": count_of(shapes, blocks),
        "mlp_ratio": shapes[f"{blocks}.0.mlp.fc1.weight"][0] / hidden,
        "pred_sigma": outputs == 2 * channels * patch[0] * patch[1] * patch[2],
        "caption_channels": captions,
        "model_max_length": length,
    }
    if look.kind == "STDiT":
        # The number of heads is not visible here; all public models have head size 72.
        return {**fields, "num_heads": max(1, hidden // 72), **_square(shapes, patch)}
    windows = "1.3" in look.told
    head = 2 * shapes["rope.freqs"][0]
    fields["qk_norm"] = f"{blocks}.0.attn.q_norm.weight" in shapes
    if fields["qk_norm"]:
        (whole,) = shapes[f"{blocks}.0.attn.q_norm.weight"]
        # A rotary code of one axis rotates the whole head.
        windows, head = windows and whole != head, whole
    elif windows:
        head *= 3
    fields["num_heads"] = hidden // head
    if "1.3" in look.told:
        fields["image_conditioning"] = True
        if windows:
            fields |= {"kernel_size": (8, 8, -1), "use_spatial_rope": True}
    return fields


def _square(shapes: Shapes, patch: Sequence[int]) -> dict[str, Any]:
    """Returns the clip size for which positions were built, if its frames are square."""
    frames, tokens = (shapes[name][1] for name in ("pos_embed_temporal", "pos_embed"))
    side = math.isqrt(tokens)
    if side**2 != tokens:
        return {}
    return {"input_size": (frames * patch[0], side * patch[1], side * patch[2])}


def _mmdit(shapes: Shapes, look: StateDictKind) -> dict[str, Any]:
    hidden, channels = shapes["img_in.weight"]
    fused = "double_blocks.0.img_attn.qkv.weight" in shapes
    first = "qkv" if fused else "q_proj"
    (head,) = shapes["double_blocks.0.img_attn.norm.query_norm.scale"]
    fields: dict[str, Any] = {
        "in_channels": channels,
        "vec_in_dim": shapes["vector_in.in_layer.weight"][1],
        "context_in_dim": shapes["txt_in.weight"][1],
        "hidden_size": hidden,
        "mlp_ratio": shapes["double_blocks.0.img_mlp.0.weight"][0] / hidden,
        "num_heads": hidden // head,
        "depth": count_of(shapes, "double_blocks"),
        "depth_single_blocks": count_of(shapes, "single_blocks"),
        "qkv_bias": f"double_blocks.0.img_attn.{first}.bias" in shapes,
        "guidance_embed": "guidance_in.in_layer.weight" in shapes,
        "cond_embed": "cond_in.weight" in shapes,
        "fused_qkv": fused,
        # Public weights with three matrices were trained with pairs half a head apart.
        "use_liger_rope": not fused,
    }
    if head != 128:
        eighth = head // 16 * 2
        fields["axes_dim"] = (eighth, (head - eighth) // 2, (head - eighth) // 2)
    if fields["cond_embed"]:
        fields["patch_size"] = round((shapes["cond_in.weight"][1] - channels) ** 0.5)
    return fields


# Identifies autoencoders and their configuration from names and shapes of tensors.
#
# The number of groups is not visible: 32 is assumed, as in all public ones.


AUTOENCODER_LOOKS = (
    StateDictKind(
        "PipelineAutoencoder", "the autoencoder of Open-Sora 1.2", r"temporal_vae\.encoder\."
    ),
    StateDictKind("", "the picture half of Open-Sora 1.2's autoencoder", r"spatial_vae\."),
    StateDictKind(
        "CausalAutoencoder",
        "the autoencoder of Open-Sora 1.3",
        r"encoder\.mid\.attn_1\.q\.conv\.",
    ),
    StateDictKind(
        "", "a picture autoencoder in its first layout, not diffusers'", r"encoder\.mid\.attn_1"
    ),
    StateDictKind(
        "",
        "HunyuanVideo's or CogVideoX's",
        r"encoder\.down_blocks\.\d+\.resnets\.\d+\.conv1\.conv\.",
    ),
    StateDictKind(
        "FrameAutoencoder", "diffusers' AutoencoderKL", r"encoder\.down_blocks\.\d+\.resnets"
    ),
    StateDictKind("", "Wan's autoencoder", r"encoder\.conv_in\.weight"),
)
RENAMED = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Attention weights that early diffusers versions named differently."""


def autoencoder_fields_of(shapes: Shapes) -> tuple[str, dict[str, Any]]:
    """Returns the class of an autoencoder's state dict, and its configuration fields."""
    look = next(
        (o for o in AUTOENCODER_LOOKS if any(re.match(o.mark, n) for n in shapes)), look_of(shapes)
    )
    if look is None or look.kind not in FIELDS:
        found = look.told if look else "an unknown model"
        right = "AutoencoderKL, or an autoencoder of Open-Sora 1.2 or 1.3"
        if look in AUTOENCODER_LOOKS:
            right += "; for diffusers classes give the folder with its config.json"
        raise GulliverError(
            f"the state dict is not a video autoencoder: it looks like {found}; expected {right}"
        )
    try:
        return look.kind, FIELDS[look.kind](shapes)
    except KeyError as error:
        raise GulliverError(
            f"the weights look like {look.told}, but lack {error}; download the files again"
        ) from None


def public_name(name: str) -> str:
    """Returns the current name of a tensor that early files name differently."""
    for old, new in RENAMED.items():
        name = re.sub(rf"(attentions\.\d+)\.{old}\.", rf"\1.{new}.", name)
    return name


def _frames(shapes: Shapes, prefix: str = "") -> dict[str, Any]:
    levels = count_of(shapes, f"{prefix}encoder.down_blocks")
    first = [
        shapes[f"{prefix}encoder.down_blocks.{n}.resnets.0.conv1.weight"] for n in range(levels)
    ]
    return {
        "latent_channels": shapes[f"{prefix}decoder.conv_in.weight"][1],
        "block_out_channels": tuple(shape[0] for shape in first),
        "layers_per_block": count_of(shapes, f"{prefix}encoder.down_blocks.0.resnets"),
        "in_channels": shapes[f"{prefix}encoder.conv_in.weight"][1],
        "out_channels": shapes[f"{prefix}decoder.conv_out.weight"][0],
        "use_quant_conv": f"{prefix}quant_conv.weight" in shapes,
        "use_post_quant_conv": f"{prefix}post_quant_conv.weight" in shapes,
        "mid_block_add_attention": count_of(shapes, f"{prefix}encoder.mid_block.attentions") > 0,
    }


def _pipeline(shapes: Shapes) -> dict[str, Any]:
    encoder = "temporal_vae.encoder"
    filters = shapes[f"{encoder}.conv_in.conv.weight"][0]
    levels = count_of(shapes, f"{encoder}.block_res_blocks")
    widths = [
        shapes[f"{encoder}.block_res_blocks.{n}.0.conv2.conv.weight"][0] for n in range(levels)
    ]
    temporal = {
        "channels": shapes[f"{encoder}.conv_in.conv.weight"][1],
        "latent_channels": shapes["temporal_vae.post_quant_conv.conv.weight"][0],
        "filters": filters,
        "channel_multipliers": tuple(width // filters for width in widths),
        "num_res_blocks": count_of(shapes, f"{encoder}.res_blocks"),
        "temporal_downsample": tuple(
            f"{encoder}.conv_blocks.{n}.conv.weight" in shapes for n in range(levels - 1)
        ),
    }
    return {"spatial": _frames(shapes, "spatial_vae.module."), "temporal": temporal}


def _causal(shapes: Shapes) -> dict[str, Any]:
    channels = shapes["encoder.conv_in.conv.weight"][0]
    levels = count_of(shapes, "encoder.down")
    widths = [shapes[f"encoder.down.{n}.block.0.conv2.conv.weight"][0] for n in range(levels)]
    in_time = [f"encoder.down.{n}.downsample.conv.conv.weight" in shapes for n in range(levels)]
    return {
        "latent_channels": shapes["decoder.conv_in.conv.weight"][1],
        "channels": channels,
        "channel_multipliers": tuple(width // channels for width in widths),
        "num_res_blocks": count_of(shapes, "encoder.down.0.block"),
        "temporal_downsamples": sum(in_time),
    }


FIELDS = {
    "FrameAutoencoder": _frames,
    "PipelineAutoencoder": _pipeline,
    "CausalAutoencoder": _causal,
}
