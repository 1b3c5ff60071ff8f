"""The autoencoders of ``gulliver models``: sizes, and the memory to decode a clip, predicted.

The decoder is followed through fake tensors: over the whole clip as one, and over what a stream of
it computes at a time. Classes of diffusers, an extra, are listed with what the table says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gulliver.cli._options import ModelsConfig
from gulliver.errors import GulliverError
from gulliver.memory import activation_peak
from gulliver.models import AUTOENCODERS, build_autoencoder
from gulliver.options import size_text


@dataclass(frozen=True)
class CoderNeeds:
    """Sizes of an autoencoder; bytes are those of weights and activations."""

    release: str
    # Frames, rows and columns of pixels that a latent stands for.
    compression: tuple[int, int, int]
    latent_channels: int
    # Frames, height and width of the clip that is decoded.
    clip: tuple[int, int, int]
    # Number of parameters; None for classes of diffusers.
    parameters: int | None = None
    # Bytes to decode the clip as one.
    decode: int | None = None
    # Bytes to decode it piece by piece.
    stream: int | None = None


def coder_needs(name: str, config: ModelsConfig) -> CoderNeeds:
    """Predicts the memory to decode a clip; nothing of its size is allocated."""
    known = AUTOENCODERS[name]
    asked = (config.frames, config.height, config.width)
    frames, height, width = (u if a is None else a for u, a in zip(known.clip, asked, strict=True))
    told = (known.release, known.compression, known.latent_channels, (frames, height, width))
    if known.of_diffusers:
        return CoderNeeds(*told)
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    # As one: without the quirk of pieces, where there is one.
    plain = {} if known.compression[0] == 1 else {"compat": ()}
    with torch.device("meta"):
        whole: Any = build_autoencoder(name, **plain).to(dtype).eval()
        pieces: Any = build_autoencoder(name)
    latents = whole.latent_shape(frames, height, width)
    step = pieces.latent_shape(min(frames, getattr(pieces, "micro_frames", 1)), height, width)
    count = sum(p.numel() for p in whole.parameters())
    weights = count * dtype.itemsize
    peaks = [
        weights + _decode_peak(name, whole, config.batch, shape, dtype) for shape in (latents, step)
    ]
    return CoderNeeds(*told, count, *peaks)


class _Decoding(nn.Module):
    """A decoder that keeps nothing for backward."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    @torch.no_grad()
    def forward(self, latents: Tensor) -> Tensor:
        """Decodes."""
        return self.decoder(latents)


def _decode_peak(
    name: str, model: Any, batch: int, shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    decoder = model.networks["decoder"] if hasattr(model, "networks") else model.decoder
    latents = torch.empty(batch, *shape, dtype=dtype, device="meta")
    found = activation_peak(_Decoding(decoder).requires_grad_(False).eval(), (latents,))
    if found.bytes is None:
        raise GulliverError(f"{name} cannot be followed: {found.reason}")
    return found.bytes


def show_coders(found: Mapping[str, CoderNeeds], config: ModelsConfig, room: int) -> None:
    """Prints a line for each autoencoder."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 120
    table = Table()
    figures = ("parameters", "compression", "channels", "clip", "decode", "streamed")
    for name in ("", "used by", *figures):
        left = name not in figures
        table.add_column(name, justify="left" if left else "right", overflow="fold")

    def shown(nbytes: int | None) -> str:
        return "-" if nbytes is None else f"{size_text(nbytes)}{'' if nbytes <= room else ' !'}"

    for name, one in found.items():
        count = "-" if one.parameters is None else f"{one.parameters / 1e6:.0f} M"
        sizes = ("x".join(map(str, one.compression)), str(one.latent_channels))
        clip = "x".join(map(str, one.clip))
        table.add_row(name, one.release, count, *sizes, clip, shown(one.decode), shown(one.stream))
    console.print(table)
    console.print(
        f"{config.precision}, batch {config.batch}; decode: the clip as one, streamed: piece by "
        "piece; -: a class of diffusers, an extra"
    )
