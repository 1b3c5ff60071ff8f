"""Tells from names and shapes of tensors which autoencoder they are of, and how it is configured.

Groups of norms leave no trace: 32 are taken, as all public ones have.
"""

from __future__ import annotations

import re
from typing import Any

from gulliver.errors import GulliverError
from gulliver.models._identify import Look, Shapes, count_of, look_of

AUTOENCODER_LOOKS = (
    Look("PipelineAutoencoder", "the autoencoder of Open-Sora 1.2", r"temporal_vae\.encoder\."),
    Look("", "the picture half of Open-Sora 1.2's autoencoder", r"spatial_vae\."),
    Look(
        "CausalAutoencoder",
        "the autoencoder of Open-Sora 1.3",
        r"encoder\.mid\.attn_1\.q\.conv\.",
    ),
    Look("", "a picture autoencoder in its first layout, not diffusers'", r"encoder\.mid\.attn_1"),
    Look(
        "",
        "HunyuanVideo's or CogVideoX's",
        r"encoder\.down_blocks\.\d+\.resnets\.\d+\.conv1\.conv\.",
    ),
    Look("FrameAutoencoder", "diffusers' AutoencoderKL", r"encoder\.down_blocks\.\d+\.resnets"),
    Look("", "Wan's autoencoder", r"encoder\.conv_in\.weight"),
)
"""Looks, the more particular ones first."""

RENAMED = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Names of an attention in files of early versions of diffusers."""


def autoencoder_fields_of(shapes: Shapes) -> tuple[str, dict[str, Any]]:
    """Returns the class of a state dict, and its configuration as far as shapes tell it."""
    look = next(
        (o for o in AUTOENCODER_LOOKS if any(re.match(o.mark, n) for n in shapes)), look_of(shapes)
    )
    if look is None or look.kind not in FIELDS:
        found = look.told if look else "nothing known"
        right = "AutoencoderKL, or an autoencoder of Open-Sora 1.2 or 1.3"
        if look in AUTOENCODER_LOOKS:
            right += "; of a class of diffusers give the folder with its config.json"
        raise GulliverError(f"no video autoencoder: it looks like {found}; expected {right}")
    try:
        return look.kind, FIELDS[look.kind](shapes)
    except KeyError as error:
        raise GulliverError(
            f"no whole video autoencoder: it looks like {look.told}, but lacks {error}: get the "
            "files again"
        ) from None


def public_name(name: str) -> str:
    """Returns the present name of a tensor of an early file."""
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
"""Functions that read the configuration off shapes, by class."""
