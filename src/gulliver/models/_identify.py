"""Tells from names and shapes of tensors which model they are of, and how it is configured.

`look_of` names any state dict, also one that is none of ours, for errors; `fields_of` reads the
configuration of a known one off its shapes, for files that come without a ``config.json``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gulliver.errors import GulliverError

Shapes = Mapping[str, tuple[int, ...]]


class Look(NamedTuple):
    """What a state dict looks like."""

    # Class of `gulliver.models`; empty for what is none of them.
    kind: str
    told: str
    # Name of a tensor by which it is known, as a pattern.
    mark: str


LOOKS = (
    Look("STDiT3", "an STDiT3 of Open-Sora 1.3", r"x_embedder_cond\."),
    Look("STDiT3", "an STDiT3 of Open-Sora 1.2", r"temporal_blocks\.\d+\.scale_shift_table"),
    Look("STDiT2", "an STDiT2 of Open-Sora 1.1", r"blocks\.\d+\.scale_shift_table_temporal"),
    Look("STDiT", "an STDiT of Open-Sora 1.0", r"blocks\.\d+\.attn_temp\."),
    Look("", "a PixArt picture model", r"blocks\.\d+\.scale_shift_table"),
    Look("MMDiT", "an MMDiT of Open-Sora 2.0", r"cond_in\."),
    Look("MMDiT", "a FLUX.1 model", r"double_blocks\.\d+\.img_attn\."),
    Look("", "a model in the layout of diffusers", r"(single_)?transformer_blocks\.\d+\."),
    Look("", "a video autoencoder of Open-Sora 1.2", r"(spatial_vae|temporal_vae)\."),
    Look("", "an autoencoder", r"(encoder|decoder)\.(conv_in|down_blocks|mid|up)"),
    Look("", "a T5 text encoder", r"encoder\.block\.\d+\."),
    Look("", "a CLIP model", r"text_model\."),
)
"""Looks, the more particular ones first."""


def look_of(names: Iterable[str]) -> Look | None:
    """Returns what tensors of these names look like; None for nothing known."""
    listed = list(names)
    for look in LOOKS:
        if any(re.match(look.mark, name) for name in listed):
            return look
    return None


def fields_of(shapes: Shapes) -> tuple[str, dict[str, Any]]:
    """Returns the class of a state dict, and its configuration as far as shapes tell it."""
    look = look_of(shapes)
    if look is None or not look.kind:
        found = f"looks like {look.told}" if look else "looks like nothing known"
        raise GulliverError(
            f"the state dict {found}: expected one of STDiT, STDiT2, STDiT3 or MMDiT by the names "
            "of its tensors"
        )
    try:
        return look.kind, (_mmdit if look.kind == "MMDiT" else _stdit)(shapes, look)
    except (KeyError, ValueError) as error:
        raise GulliverError(
            f"the state dict looks like {look.told}, but lacks {error}: get the files again"
        ) from None


def count_of(shapes: Shapes, prefix: str) -> int:
    """Returns the number of modules in a list, by the highest number after its name."""
    found = (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in shapes)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def _stdit(shapes: Shapes, look: Look) -> dict[str, Any]:
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
        # Heads leave no trace here; those of every public model are 72 wide.
        return {**fields, "num_heads": max(1, hidden // 72), **_square(shapes, patch)}
    windows = "1.3" in look.told
    head = 2 * shapes["rope.freqs"][0]
    fields["qk_norm"] = f"{blocks}.0.attn.q_norm.weight" in shapes
    if fields["qk_norm"]:
        (whole,) = shapes[f"{blocks}.0.attn.q_norm.weight"]
        # A rotary code of one axis turns the whole head.
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
    """The size of clip that fixed positions are of, where its frames are square."""
    frames, tokens = (shapes[name][1] for name in ("pos_embed_temporal", "pos_embed"))
    side = math.isqrt(tokens)
    if side**2 != tokens:
        return {}
    return {"input_size": (frames * patch[0], side * patch[1], side * patch[2])}


def _mmdit(shapes: Shapes, look: Look) -> dict[str, Any]:
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
        # Public weights with three matrices are those that were trained with halves apart.
        "use_liger_rope": not fused,
    }
    if head != 128:
        eighth = head // 16 * 2
        fields["axes_dim"] = (eighth, (head - eighth) // 2, (head - eighth) // 2)
    if fields["cond_embed"]:
        fields["patch_size"] = round((shapes["cond_in.weight"][1] - channels) ** 0.5)
    return fields
