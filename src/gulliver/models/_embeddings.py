"""Embeddings of positions, noise levels, frame rates and captions.

Angles are computed in float32 or wider, whatever the model's dtype: in bfloat16 neighbouring
positions beyond 256 would round to the same angle. They are cast when they meet the tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.errors import GulliverError


def working_precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype of angles and statistics: float64 for float64 models, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sinusoid(values: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Returns cos | sin of `values` [B] at channels / 2 frequencies, 1 to 1/10000: [B, channels].

    Source: Vaswani et al., 2017 (arXiv 1706.03762), in the order of DiT (Peebles and Xie, 2022).
    """
    precision = working_precision(dtype)
    half = channels // 2
    exponents = torch.arange(half, dtype=precision, device=values.device) / half
    angles = values.to(precision)[:, None] * torch.exp(-math.log(10_000.0) * exponents)
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


class ScalarEmbedder(nn.Module):
    """A two-layer MLP over the sinusoids of a scalar: [B] to [B, hidden_size]."""

    CHANNELS = 256

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(self.CHANNELS, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, values: Tensor) -> Tensor:
        dtype = next(self.mlp.parameters()).dtype
        return self.mlp(sinusoid(values, self.CHANNELS, dtype))


class Mlp(nn.Module):
    """Linear, GELU in its tanh form, Linear: [..., inputs] to [..., outputs]."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Projects captions to the model's width; dropped ones become the null caption `y_embedding`.

    Dropping trains the unconditional model that classifier-free guidance needs (Ho and Salimans,
    2022, arXiv 2207.12598).

    Args:
        channels: width of the text encoder's vectors.
        hidden_size: width of the model.
        drop: probability that a caption is dropped in training.
        length: longest caption, in tokens.
    """

    # A buffer, as in the public weights: the null caption is drawn once and not trained.
    y_embedding: Tensor

    def __init__(self, channels: int, hidden_size: int, drop: float, length: int) -> None:
        super().__init__()
        self.register_buffer("y_embedding", torch.randn(length, channels) / channels**0.5)
        self.y_proj = Mlp(channels, hidden_size, hidden_size)
        self.drop = drop

    def forward(self, y: Tensor, drop_caption: Tensor | None) -> Tensor:
        """Embeds captions.

        Args:
            y: caption vectors [B, L, channels].
            drop_caption: whether to drop each caption, [B] bool; None: drawn in training, none is
                dropped in evaluation. Ranks that share a sample must be given the same.

        Returns:
            Caption tokens [B, L, hidden_size].

        Raises:
            GulliverError: captions are longer than the null caption.
        """
        if y.shape[1] > len(self.y_embedding):
            raise GulliverError(
                f"a caption of {y.shape[1]} tokens is longer than model_max_length = "
                f"{len(self.y_embedding)}: cut it, or build the model longer"
            )
        if drop_caption is None and self.training and self.drop > 0:
            drop_caption = torch.rand(len(y), device=y.device) < self.drop
        if drop_caption is not None:
            y = torch.where(drop_caption[:, None, None], self.y_embedding[: y.shape[1]], y)
        return self.y_proj(y)


def spatial_positions(
    height: int, width: int, channels: int, scale: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Sinusoidal codes of a height x width grid, row by row: [height * width, channels].

    The first half of the channels encodes the column, the second the row, each as sin | cos. The
    grid is stretched to the square of equal area and divided by `scale`, so that the codes span the
    same range over resolutions and aspect ratios.

    Args:
        height: rows of the grid, in tokens.
        width: columns of the grid, in tokens.
        channels: width of the codes, a multiple of 4.
        scale: resolution over the resolution at which positions are unscaled.
        device: device of the result.
        dtype: dtype of the result.
    """
    precision = working_precision(dtype)
    quarter = channels // 4
    steps = torch.arange(quarter, dtype=precision, device=device) / quarter
    frequencies = 10_000.0**-steps
    side = round(math.sqrt(height * width))

    def codes(count: int) -> Tensor:
        places = torch.arange(count, dtype=precision, device=device) / scale * (side / count)
        angles = places[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    columns = codes(width)[None].expand(height, -1, -1)
    rows = codes(height)[:, None].expand(-1, width, -1)
    return torch.cat([columns, rows], dim=-1).reshape(height * width, channels).to(dtype)


class RotaryFrequencies(nn.Module):
    """Frequencies of the rotary embedding along time, theta 10000.

    `freqs` [head_size / 2] is a parameter without a gradient because the public weights hold it as
    one. Source: Su et al., RoFormer, 2021 (arXiv 2104.09864).
    """

    def __init__(self, head_size: int) -> None:
        super().__init__()
        exponents = torch.arange(0, head_size, 2).float() / head_size
        self.freqs = nn.Parameter(10_000.0**-exponents, requires_grad=False)

    def forward(self, frames: int) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine of each frame's angles, each [frames, head_size / 2]."""
        frequencies = self.freqs.to(working_precision(self.freqs.dtype))
        places = torch.arange(frames, device=frequencies.device, dtype=frequencies.dtype)
        angles = places[:, None] * frequencies
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates neighbouring pairs of the last dim of `x` [..., T, D] by the angles of its frame.

    Args:
        x: queries or keys, D even.
        cos_sin: cosine and sine, each [T, D / 2].
    """
    # Pairs (0, 1), (2, 3), ... as the public weights have it, not halves as Llama's rotate_half.
    cos, sin = cos_sin
    even, odd = x.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(x.dtype)
