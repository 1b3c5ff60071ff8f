"""Conversion between clips and STDiT tokens, and shape checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.models.blocks import Grid, JointBlock, spatial_positions


def check_heads(hidden_size: int, num_heads: int) -> None:
    if hidden_size % num_heads or hidden_size % 4 or (hidden_size // num_heads) % 2:
        raise GulliverError(
            f"hidden_size={hidden_size} must be a multiple of 4 and of num_heads={num_heads}, "
            "with an even head size"
        )


def check_inputs(
    x: Tensor,
    y: Tensor,
    mask: Tensor | None,
    x_mask: Tensor | None,
    patch_size: Sequence[int],
) -> None:
    if y.ndim != 4 or len(y) != len(x) or y.shape[1] != 1:
        raise GulliverError(f"y has shape {tuple(y.shape)}; expected [{len(x)}, 1, L, channels]")
    if mask is not None:
        if mask.shape != (len(x), y.shape[2]):
            raise GulliverError(
                f"mask has shape {tuple(mask.shape)}; expected {(len(x), y.shape[2])}"
            )
        if not mask.is_meta and not bool(mask.any(dim=1).all()):
            raise GulliverError("the mask of a caption excludes all tokens; keep at least one")
    if x_mask is not None:
        if x_mask.shape != (len(x), x.shape[2]):
            raise GulliverError(
                f"x_mask has shape {tuple(x_mask.shape)}; expected {(len(x), x.shape[2])}"
            )
        if patch_size[0] != 1:
            raise GulliverError("x_mask needs patches of one frame; use patch_size=(1, h, w)")


def needed(model: str, **given: Tensor | None) -> None:
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise GulliverError(f"{model} needs {' and '.join(missing)}; pass a tensor of shape [B]")


def caption_mask(mask: Tensor | None) -> Tensor | None:
    """Returns the attention mask of caption tokens [B, 1, 1, L]; None if all are valid."""
    # Without a mask, scaled_dot_product_attention can use its fastest kernel.
    if mask is None or bool(mask.all()):
        return None
    return mask.bool()[:, None, None]


class PatchEmbedder(nn.Module):
    """Embeds latents as tokens; pads with zeros at the end to complete patches."""

    def __init__(self, channels: int, hidden_size: int, patch_size: Sequence[int]) -> None:
        super().__init__()
        size = tuple(patch_size)
        self.patch_size = size
        self.proj = nn.Conv3d(channels, hidden_size, size, size)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Embeds latents [B, channels, ...] as tokens [B, T, S, C]; also returns the token grid."""
        padding = [
            (-size) % patch for size, patch in zip(x.shape[2:], self.patch_size, strict=True)
        ]
        if any(padding):
            x = F.pad(x, (0, padding[2], 0, padding[1], 0, padding[0]))
        x = self.proj(x)
        frames, rows, columns = x.shape[2:]
        return x.flatten(3).permute(0, 2, 3, 1), Grid(frames, rows * columns, rows, columns)


def join_patches(
    tokens: Tensor, grid: Grid, patch_size: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """Joins patches [B, T, S, pt * ph * pw * channels] to [B, channels, *sizes], cropped."""
    channels = tokens.shape[-1] // math.prod(patch_size)
    counts = (grid.frames, grid.rows, grid.columns)
    split = tokens.view(len(tokens), *counts, *patch_size, channels)
    whole = [n * p for n, p in zip(counts, patch_size, strict=True)]
    joined = split.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(len(tokens), channels, *whole)
    return joined[:, :, : sizes[0], : sizes[1], : sizes[2]]


def clip_scales(height: Any, width: Any, count: int, unscaled: float) -> list[float]:
    """Returns the position scale of each clip, or only one scale if all are equal."""
    scales = [math.sqrt(float(height[n]) * float(width[n])) / unscaled for n in range(count)]
    return scales[:1] if len(set(scales)) == 1 else scales


def grid_positions(grid: Grid, scales: Sequence[float], like: Tensor) -> Tensor:
    """Returns position codes for the tokens of a frame, per scale: [scales, S, C]."""
    size = (grid.rows, grid.columns, like.shape[-1])
    return torch.stack(
        [spatial_positions(*size, scale, like.device, like.dtype) for scale in scales]
    )


def as_exact(out: Tensor) -> Tensor:
    """Casts a model's output to float32, except for float64 models."""
    return out if out.dtype.itemsize == 8 else out.float()


def initialise_linears(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


def initialise_as_pixart(model: nn.Module, projections: Sequence[str]) -> None:
    """Initializes STDiT and STDiT2 so that they start as an image model."""
    initialise_linears(model)
    patches = model.get_parameter("x_embedder.proj.weight")
    nn.init.xavier_uniform_(patches.view(len(patches), -1))
    drawn = [
        "t_embedder.mlp.0",
        "t_embedder.mlp.2",
        "y_embedder.y_proj.fc1",
        "y_embedder.y_proj.fc2",
    ]
    for name in (*drawn, *(f"{projection}.1" for projection in projections)):
        nn.init.normal_(model.get_parameter(f"{name}.weight"), std=0.02)
    zeroed = [model.get_submodule("final_layer.linear")]
    for block in model.modules():
        if isinstance(block, JointBlock):
            zeroed += [block.cross_attn.proj, block.attn_temp.proj]
    for linear in zeroed:
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)


# Packs latents into MMDiT tokens and back: squares of rows and columns, stacked by channel.


def pack_latents(x: Tensor, patch_size: int = 2) -> Tensor:
    """Packs squares of latents into tokens, frame by frame and row by row.

    Args:
        x: latents [B, C, T, H, W].
        patch_size: rows and columns of a square.

    Returns:
        [B, T * H * W / patch_size^2, C * patch_size^2].

    Raises:
        GulliverError: rows or columns are not divisible by `patch_size`.
    """
    _, _, _, height, width = x.shape
    if height % patch_size or width % patch_size:
        raise GulliverError(
            f"latents of {height} x {width} are not divisible by patch_size={patch_size}; use "
            "another height and width"
        )
    squares = x.unflatten(4, (-1, patch_size)).unflatten(3, (-1, patch_size))
    return squares.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def unpack_latents(tokens: Tensor, sizes: Sequence[int], patch_size: int = 2) -> Tensor:
    """Inverts `pack_latents`: tokens to latents [B, C, T, H, W]."""
    frames, height, width = sizes
    counts = (frames, height // patch_size, width // patch_size)
    squares = tokens.unflatten(1, counts).unflatten(-1, (-1, patch_size, patch_size))
    return squares.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)


def token_positions(
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
