"""Checks that parts belong together: a transformer, its autoencoder, its text encoders.

Nothing here has to be filled: a transformer may be on meta, folders are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gulliver.errors import GulliverError
from gulliver.models import CONFIGS, CONFIGURATIONS, Autoencoder, MMDiT
from gulliver.video._releases import release_of
from gulliver.video._text_encoders import (
    ClipTextEncoder,
    TextEncoder,
    TextPair,
    load_text_encoder,
    look_at_encoder,
)

CLIP_LENGTH = 77
"""Tokens that the CLIP of the public models reads; what is longer is cut, as in their training."""


def latent_channels_of(model: Any) -> int:
    """Returns the channels of the latents that a model is made for."""
    return model.in_channels // (model.patch_size**2 if isinstance(model, MMDiT) else 1)


def compressions_of(model: nn.Module) -> set[tuple[int, int, int]]:
    """Returns the compressions of autoencoders that models of this class and width go with."""
    # Empty for a width that was never published: any autoencoder may be its own.
    return {
        one.compression
        for one in CONFIGURATIONS.values()
        if one.kind == type(model).__name__
        and one.fields.get("in_channels", CONFIGS[one.kind].in_channels) == model.in_channels
    }


def text_size(outline: Any) -> tuple[int, int]:
    """Returns width and greatest number of the token vectors that a transformer reads."""
    if isinstance(outline, MMDiT):
        return outline.context_in_dim, outline.model_max_length
    length, width = outline.y_embedder.y_embedding.shape
    return width, length


def text_reader(
    outline: Any, folder: Path | str, clip: Path | str | None, dtype: torch.dtype
) -> Callable[[torch.device], TextEncoder]:
    """Returns a function that loads the text encoder of a transformer on a device."""
    width, length = text_size(outline)
    whole, single = release_of(outline).whole, getattr(outline, "vec_in_dim", None)
    look = look_at_encoder(folder)
    if look.channels != width:
        raise GulliverError(
            f"{folder} holds a {look.kind} whose vectors are {look.channels} wide, this "
            f"{type(outline).__name__} reads {width}: take the encoder that it was trained with"
        )
    if single is None and clip is not None:
        raise GulliverError(
            f"this {type(outline).__name__} reads no vector of a CLIP: leave {clip} out"
        )
    if single is not None:
        _check_clip_folder(clip, single)

    def read(device: torch.device) -> TextEncoder:
        tokens = load_text_encoder(folder, length, device, dtype, whole=whole)
        if clip is None:
            return tokens
        most = min(look_at_encoder(clip).longest or CLIP_LENGTH, CLIP_LENGTH)
        second = load_text_encoder(clip, most, device, dtype, cut=True, whole=whole)
        assert isinstance(second, ClipTextEncoder), "checked"
        return TextPair(tokens, second)

    return read


def _check_clip_folder(clip: Path | str | None, width: int) -> None:
    if clip is None:
        raise GulliverError(
            f"an MMDiT reads a CLIP's single vector, {width} wide, besides the T5: name the folder "
            "of a CLIP, with clip= or --clip"
        )
    look = look_at_encoder(clip)
    if look.kind != "CLIP" or look.channels != width:
        raise GulliverError(
            f"{clip} holds a {look.kind} whose vectors are {look.channels} wide: this MMDiT reads "
            f"that of a CLIP, {width} wide"
        )


def check_latents(outline: Any, autoencoder: Autoencoder) -> None:
    """Refuses an autoencoder that a transformer was not trained with."""
    wanted, found = latent_channels_of(outline), autoencoder.latent_channels
    name = f"this {type(outline).__name__} of {release_of(outline).name}"
    if wanted != found:
        raise GulliverError(
            f"the autoencoder's latents have {found} channels, {name} reads {wanted}: take the "
            "autoencoder that it was trained with"
        )
    known = compressions_of(outline)
    if known and tuple(autoencoder.compression) not in known:
        told_as = " or ".join("x".join(map(str, one)) for one in sorted(known))
        blocks = "x".join(map(str, autoencoder.compression))
        raise GulliverError(
            f"a latent of this autoencoder stands for {blocks} pixels, one of {name} for {told_as} "
            "(frames x rows x columns): take the autoencoder that it was trained with"
        )
