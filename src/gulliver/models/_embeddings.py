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
    """A two-layer MLP over the sinusoids of scalars: [B] or [B, n] to [B, n * hidden_size]."""

    CHANNELS = 256

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(self.CHANNELS, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )

    def forward(self, values: Tensor) -> Tensor:
        dtype = next(self.mlp.parameters()).dtype
        codes = self.mlp(sinusoid(values.flatten(), self.CHANNELS, dtype))
        return codes.view(len(values), -1)


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
        """Embeds captions."""
        if y.shape[2] != self.y_embedding.shape[1]:
            raise GulliverError(
                f"captions are {y.shape[2]} wide, the model was made for caption_channels = "
                f"{self.y_embedding.shape[1]}: take the text encoder that it was trained with"
            )
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


def sines(places: Tensor, channels: int) -> Tensor:
    """Returns sin | cos of `places` [N] at channels / 2 frequencies: [N, channels]."""
    half = channels // 2
    steps = torch.arange(half, dtype=places.dtype, device=places.device) / half
    angles = places[:, None] * 10_000.0**-steps
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def spatial_positions(
    height: int,
    width: int,
    channels: int,
    scale: float,
    device: torch.device,
    dtype: torch.dtype,
    square: bool = True,
) -> Tensor:
    """Sinusoidal codes of a height x width grid, row by row: [height * width, channels]."""
    # The first half of the channels encodes the column, the second the row, each as sin | cos. The
    # grid is stretched to the square of equal area and divided by `scale`, so that the codes span
    # the same range over resolutions and aspect ratios.
    precision = working_precision(dtype)
    side = round(math.sqrt(height * width))

    def codes(count: int) -> Tensor:
        places = torch.arange(count, dtype=precision, device=device) / scale
        return sines(places * (side / count) if square else places, channels // 2)

    columns = codes(width)[None].expand(height, -1, -1)
    rows = codes(height)[:, None].expand(-1, width, -1)
    return torch.cat([columns, rows], dim=-1).reshape(height * width, channels).to(dtype)


Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles by which queries and keys turn, each [..., N, head size / 2]."""


def rotation_of(places: Tensor, frequencies: Tensor) -> Rotation:
    """Returns cosine and sine of each place's angles, for places [...]: [..., frequencies]."""
    precision = working_precision(frequencies.dtype)
    angles = places.to(precision)[..., None] * frequencies.to(precision)
    return angles.cos(), angles.sin()


def rotary_frequencies(
    size: int,
    theta: float = 10_000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Returns the size / 2 frequencies of a rotary code, 1 to nearly 1 / theta."""
    return theta ** -(torch.arange(0, size, 2, dtype=dtype, device=device) / size)


class RotaryFrequencies(nn.Module):
    """Frequencies of the rotary embedding, theta 10000."""

    # `freqs` [head_size / 2] is a parameter without a gradient because the public weights hold it
    # as one. Source: Su et al., RoFormer, 2021 (arXiv 2104.09864).

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(rotary_frequencies(head_size), requires_grad=False)

    def forward(self, count: int, scale: float = 1.0) -> Rotation:
        """Returns cosine and sine of each place's angles along an axis, each [count, freqs]."""
        precision = working_precision(self.freqs.dtype)
        places = torch.arange(count, device=self.freqs.device, dtype=precision)
        return rotation_of(places / scale, self.freqs)

    def box(self, frames: int, rows: int, columns: int, scale: float) -> Rotation:
        """Returns cosine and sine of a box of tokens, each [frames, rows, columns, 3 * freqs]."""
        # The first third of a head turns by the frame, the second by the row and the last by the
        # column; rows and columns are divided by `scale`.
        axes = (self(frames), self(rows, scale), self(columns, scale))

        def joined(which: int) -> Tensor:
            parts = []
            for axis, one in enumerate(axes):
                shape = [1, 1, 1, -1]
                shape[axis] = len(one[which])
                parts.append(one[which].view(shape).expand(frames, rows, columns, -1))
            return torch.cat(parts, dim=-1)

        return joined(0), joined(1)


def rotate(x: Tensor, rotation: Rotation, halves: bool = False) -> Tensor:
    """Rotates pairs of the last dim of `x` [..., N, D] by the angles of its place."""
    cos, sin = rotation
    exact = x.to(cos.dtype)
    pairs = exact.unflatten(-1, (2, -1)).unbind(-2) if halves else _neighbours(exact)
    first, second = pairs[0], pairs[1]
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)
    return out.to(x.dtype)


def _neighbours(x: Tensor) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (-1, 2)).unbind(-1)
