"""What an autoencoder's networks are called, and where time lies.

An autoencoder is asked for `stream_encoder` and `stream_decoder`, functions from whole to whole;
one without has `encoder` and `decoder`, perhaps with `quant_conv` and `post_quant_conv`, as
diffusers' have. Their own `encode` is not used: it cuts long clips into tiles and blends them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gulliver.errors import GulliverError


def encoder_of(autoencoder: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the function from videos to latents, or to their moments.

    Raises:
        GulliverError: there is no encoder.
    """
    own = getattr(autoencoder, "stream_encoder", None)
    if own is not None:
        return own
    return _Chain(_part(autoencoder, "encoder"), getattr(autoencoder, "quant_conv", None))


def decoder_of(autoencoder: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the function from latents to videos.

    Raises:
        GulliverError: there is no decoder.
    """
    own = getattr(autoencoder, "stream_decoder", None)
    if own is not None:
        return own
    return _Chain(getattr(autoencoder, "post_quant_conv", None), _part(autoencoder, "decoder"))


def time_dim(autoencoder: nn.Module) -> int:
    """Returns the dim of time of videos and latents."""
    return 2


class _Chain(nn.Module):
    """Modules called one after the other."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for part in parts if part is not None)

    def forward(self, x: Tensor) -> Tensor:
        """Calls them."""
        for part in self.parts:
            x = part(x)
        return x


def _part(autoencoder: nn.Module, name: str) -> nn.Module:
    part = getattr(autoencoder, name, None)
    if not isinstance(part, nn.Module):
        raise GulliverError(
            f"{type(autoencoder).__name__} has no module {name!r}: give one with encoder and "
            "decoder, or stream_module its network"
        )
    return part
