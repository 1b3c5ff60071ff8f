"""Latents as the tokens of an MMDiT, and back: squares of rows and columns, packed by channel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gulliver.errors import GulliverError


def pack_latents(x: Tensor, patch_size: int = 2) -> Tensor:
    """Packs squares of latents into tokens, frame by frame and row by row.

    Args:
        x: latents [B, C, T, H, W].
        patch_size: rows and columns of a square.

    Returns:
        [B, T * H * W / patch_size^2, C * patch_size^2].

    Raises:
        GulliverError: rows or columns do not divide.
    """
    _, _, _, height, width = x.shape
    if height % patch_size or width % patch_size:
        raise GulliverError(
            f"latents of {height} x {width} do not divide by patch_size {patch_size}: take a clip "
            "whose height and width do"
        )
    squares = x.unflatten(4, (-1, patch_size)).unflatten(3, (-1, patch_size))
    return squares.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def unpack_latents(tokens: Tensor, sizes: Sequence[int], patch_size: int = 2) -> Tensor:
    """Undoes `pack_latents`: tokens of latents of T, H and W to [B, C, T, H, W]."""
    frames, height, width = sizes
    counts = (frames, height // patch_size, width // patch_size)
    squares = tokens.unflatten(1, counts).unflatten(-1, (-1, patch_size, patch_size))
    return squares.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)


def places_of(
    count: int, sizes: Sequence[int], patch_size: int = 2, device: torch.device | None = None
) -> Tensor:
    """Returns frame, row and column of each token of packed latents, [count, N, 3].

    Args:
        count: number of clips.
        sizes: latent frames, rows and columns.
        patch_size: rows and columns of a square.
        device: device of the result.
    """
    frames, height, width = sizes
    axes = [
        torch.arange(size, device=device)
        for size in (frames, height // patch_size, width // patch_size)
    ]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    return places.flatten(0, 2).expand(count, -1, -1)
