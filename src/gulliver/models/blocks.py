"""Layers and blocks of the STDiT transformers: attention, embeddings, rotary codes, modulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.errors import GulliverError

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention function of queries, keys and values, each [R, heads, N, head size]."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, with a learned scale."""

    # Statistics use float32 (float64 for float64 inputs): a bfloat16 sum of squares would lose most
    # of its digits. Source: Zhang and Sennrich, 2019 (arXiv 1910.07467).

    def __init__(self, size: int, eps: float = 1e-6, name: str = "weight") -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(torch.ones(size)))
        self.eps, self._name = eps, name

    def forward(self, x: Tensor) -> Tensor:
        precise = x.to(working_precision(x.dtype))
        normed = F.rms_norm(precise, x.shape[-1:], eps=self.eps).to(x.dtype)
        return getattr(self, self._name) * normed


class SelfAttention(nn.Module):
    """Multi-head attention among the tokens of each row of [R, N, C]."""

    def __init__(
        self, hidden_size: int, num_heads: int, qk_norm: bool, rotate_first: bool = False
    ) -> None:
        super().__init__()
        head_size = hidden_size // num_heads
        self.num_heads, self.rotate_first = num_heads, rotate_first
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.q_norm = RMSNorm(head_size) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_size) if qk_norm else nn.Identity()
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        mix: Mix = F.scaled_dot_product_attention,
    ) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        if rotation is not None and self.rotate_first:
            q, k = rotate(q, rotation), rotate(k, rotation)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None and not self.rotate_first:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return self.proj(mix(q, k, v).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Multi-head attention from a clip's tokens [B, N, C] to its caption's [B, L, C]."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_linear = nn.Linear(hidden_size, hidden_size)
        self.kv_linear = nn.Linear(hidden_size, 2 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        """Attends to the caption tokens that `mask` [B, 1, 1, L] allows; None allows all."""
        q = self.q_linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        pairs = self.kv_linear(y).unflatten(-1, (2, self.num_heads, -1))
        k, v = pairs.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))


# Embeddings of positions, noise levels, frame rates and captions.
#
# Angles are computed in float32 or higher, whatever the model's dtype: in bfloat16, adjacent
# positions beyond 256 would round to the same angle. They are cast when they are applied to the
# tokens.


def working_precision(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for angles and statistics: float64 for float64 models, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sinusoid(values: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Returns cos | sin of `values` [B] at channels / 2 frequencies, 1 to 1/10000: [B, channels].

    Source: Vaswani et al., 2017 (arXiv 1706.03762), with the channel order of DiT (Peebles and Xie,
    2022).
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
    """Linear, GELU (tanh approximation), Linear: [..., inputs] to [..., outputs]."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Projects captions to the model's width, and replaces dropped ones with the null caption.

    Dropping trains the unconditional model for classifier-free guidance (Ho and Salimans, 2022,
    arXiv 2207.12598).
    """

    # A buffer, as in the published weights: the null caption is random and not trained.
    y_embedding: Tensor

    def __init__(self, channels: int, hidden_size: int, drop: float, length: int) -> None:
        super().__init__()
        self.register_buffer("y_embedding", torch.randn(length, channels) / channels**0.5)
        self.y_proj = Mlp(channels, hidden_size, hidden_size)
        self.drop = drop

    def forward(self, y: Tensor, drop_caption: Tensor | None) -> Tensor:
        if y.shape[1] > len(self.y_embedding):
            raise GulliverError(
                f"a caption of {y.shape[1]} tokens exceeds "
                f"model_max_length={len(self.y_embedding)}; truncate it, or build the model with "
                "a larger limit"
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
    """Returns sinusoidal codes of a grid, row by row: [height * width, channels]."""
    # The first half of the channels encodes the column, the second the row, each as sin | cos. The
    # grid is scaled to the square of equal area and divided by `scale`, so that the codes have the
    # same range for all resolutions and aspect ratios.
    precision = working_precision(dtype)
    side = round(math.sqrt(height * width))

    def codes(count: int) -> Tensor:
        places = torch.arange(count, dtype=precision, device=device) / scale
        return sines(places * (side / count) if square else places, channels // 2)

    columns = codes(width)[None].expand(height, -1, -1)
    rows = codes(height)[:, None].expand(-1, width, -1)
    return torch.cat([columns, rows], dim=-1).reshape(height * width, channels).to(dtype)


Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles of queries and keys, each [..., N, head size / 2]."""


def rotation_of(places: Tensor, frequencies: Tensor) -> Rotation:
    """Returns cosine and sine of the angles at positions [...]: [..., frequencies]."""
    precision = working_precision(frequencies.dtype)
    angles = places.to(precision)[..., None] * frequencies.to(precision)
    return angles.cos(), angles.sin()


def rotary_frequencies(
    size: int,
    theta: float = 10_000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Returns the size / 2 rotary frequencies, from 1 to nearly 1 / theta."""
    return theta ** -(torch.arange(0, size, 2, dtype=dtype, device=device) / size)


class RotaryFrequencies(nn.Module):
    """Frequencies of the rotary embedding, theta 10000."""

    # `freqs` [head_size / 2] is a parameter without a gradient, as in the public weights. Source:
    # Su et al., RoFormer, 2021 (arXiv 2104.09864).

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(rotary_frequencies(head_size), requires_grad=False)

    def forward(self, count: int, scale: float = 1.0) -> Rotation:
        """Returns cosine and sine of the angles along one axis, each [count, freqs]."""
        precision = working_precision(self.freqs.dtype)
        places = torch.arange(count, device=self.freqs.device, dtype=precision)
        return rotation_of(places / scale, self.freqs)

    def box(self, frames: int, rows: int, columns: int, scale: float) -> Rotation:
        """Returns cosine and sine for a box of tokens, each [frames, rows, columns, 3 * freqs]."""
        # The first third of a head is rotated by frame, the second by row and the last by column;
        # rows and columns are divided by `scale`.
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
    """Rotates pairs of the last dim of `x` [..., N, D] by the angles of their positions."""
    cos, sin = rotation
    exact = x.to(cos.dtype)
    pairs = exact.unflatten(-1, (2, -1)).unbind(-2) if halves else _neighbours(exact)
    first, second = pairs[0], pairs[1]
    turned = (first * cos - second * sin, second * cos + first * sin)
    out = torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)
    return out.to(x.dtype)


def _neighbours(x: Tensor) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (-1, 2)).unbind(-1)


# Blocks of the STDiT family: AdaLN-single, attention along an axis or in windows, final layer.
#
# Start with `STDiTBlock.forward`. The models differ in the blocks they stack and in the
# conditioning.
#
# Shapes: B clips, T frames (temporal), S tokens of a frame (spatial), C channels, L caption tokens.


# [Note: windows at the border] The reference code pads the grid to whole windows and masks the
# padding. Here windows at the border are smaller instead. This is the same attention without a
# mask: padding tokens are never keys, and their outputs are dropped. Positions count from the first
# token of a window, so the rotary code of a smaller window is a prefix of a whole one's.
class Grid(NamedTuple):
    """Token grid of a clip: T frames of S = rows x columns tokens."""

    frames: int
    spatial: int
    rows: int
    columns: int


class ConditionFrames(NamedTuple):
    """Conditioning frames, which attend to a different caption than generated ones."""

    # Caption tokens [B, L, C].
    captions: Tensor
    # Mask of caption tokens [B, 1, 1, L], or None for all.
    mask: Tensor | None
    # Their frame indices in the whole clip.
    frames: tuple[int, ...]


def layer_norm(x: Tensor) -> Tensor:
    """Normalizes the last dim, without weights (modulation provides them), eps 1e-6."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Returns x * (1 + scale) + shift, the adaptive part of AdaLN (Peebles and Xie, DiT, 2022)."""
    return torch.addcmul(shift, x, scale + 1)


def modulation_of(
    project: nn.Module, t: Tensor, t0: Tensor | None, x_mask: Tensor | None, parts: int
) -> Tensor:
    """Projects time embeddings to shifts, scales and gates."""
    found = project(t).view(len(t), 1, parts, 1, -1)
    if x_mask is not None and t0 is not None:
        still = project(t0).view(len(t), 1, parts, 1, -1)
        found = torch.where(x_mask[:, :, None, None, None], found, still)
    return found.permute(2, 0, 1, 3, 4)


def attend_along(
    attn: SelfAttention,
    x: Tensor,
    temporal: bool,
    rotation: Rotation | None = None,
    mix: Mix = F.scaled_dot_product_attention,
) -> Tensor:
    """Attends along S within each frame, or along T at each spatial position: [B, T, S, C]."""
    ordered = x.transpose(1, 2) if temporal else x
    out = attn(ordered.flatten(0, 1), rotation, mix).view(ordered.shape)
    return out.transpose(1, 2) if temporal else out


def attend_in_windows(
    attn: SelfAttention,
    x: Tensor,
    rotation: Rotation,
    window: tuple[int, int, int],
    mix: Mix = F.scaled_dot_product_attention,
    dim: int = 1,
) -> Tensor:
    """Attends within each window of frames, rows and columns."""
    if dim == 4:
        frames, rows, columns = x.shape[1:4]
        cos, sin = (angles[:frames, :rows, :columns].flatten(0, 2) for angles in rotation)
        return attn(x.flatten(1, 3), (cos, sin), mix).view(x.shape)
    size, wanted = x.shape[dim], window[dim - 1]
    width = size if wanted < 0 else min(wanted, size)
    inner = size - size % width
    done = []
    for piece, width_of_it in ((x.narrow(dim, 0, inner), width),
                               (x.narrow(dim, inner, size - inner), size - inner)):  # fmt: skip
        if not piece.shape[dim]:
            continue
        windows = piece.unflatten(dim, (-1, width_of_it)).movedim(dim, 0)
        out = attend_in_windows(attn, windows.flatten(0, 1), rotation, window, mix, dim + 1)
        out = out.unflatten(0, windows.shape[:2]).movedim(0, dim)
        done.append(out.flatten(dim, dim + 1))
    return done[0] if len(done) == 1 else torch.cat(done, dim)


class STDiTBlock(nn.Module):
    """Transformer block: spatial or temporal attention, cross-attention to the caption, MLP.

    Args:
        hidden_size: width C.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP relative to C.
        qk_norm: whether queries and keys are RMS-normalized.
        temporal: whether attention runs along T; else along S.
        window: frames, rows and columns of attention windows, instead of attention along T.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float,
        qk_norm: bool,
        temporal: bool,
        window: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__()
        self.temporal, self.window = temporal, window
        self.scale_shift_table = nn.Parameter(torch.randn(6, hidden_size) / hidden_size**0.5)
        self.attn = SelfAttention(hidden_size, num_heads, qk_norm)
        self.cross_attn = CrossAttention(hidden_size, num_heads)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), hidden_size)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        y_mask: Tensor | None,
        modulation: Tensor,
        rotation: Rotation | None,
        grid: Grid,
        given: ConditionFrames | None = None,
    ) -> Tensor:
        """Computes one block.

        Args:
            x: tokens [B, T, S, C].
            y: caption tokens [B, L, C].
            y_mask: mask of caption tokens [B, 1, 1, L], or None for all.
            modulation: shift, scale and gate of attention and of the MLP, [6, B, 1 or T, 1, C],
                before this block's own table is added.
            rotation: cosine and sine along the axis of attention, each [T or S, head size / 2], or
                of a whole window.
            grid: grid of the whole clip.
            given: frames that attend to a different caption; None if there are none.

        Returns:
            Tokens [B, T, S, C].
        """
        # AdaLN-single: one time projection for all blocks, plus a small table per block.
        table = self.scale_shift_table.view(6, 1, 1, 1, -1) + modulation
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = table.unbind(0)
        attended = self.attend(modulate(layer_norm(x), shift_msa, scale_msa), rotation, grid)
        x = torch.addcmul(x, gate_msa, attended)
        x = x + self.read(x, y, y_mask, given)
        return torch.addcmul(x, gate_mlp, self.mlp(modulate(layer_norm(x), shift_mlp, scale_mlp)))

    def attend(
        self,
        x: Tensor,
        rotation: Rotation | None,
        grid: Grid,
        mix: Mix = F.scaled_dot_product_attention,
    ) -> Tensor:
        """Attends along S, along T, or in windows, as the block was built: [B, T, S, C]."""
        if self.window is None:
            return attend_along(self.attn, x, self.temporal, rotation, mix)
        assert rotation is not None, "positions in a window need a rotary code"
        boxes = x.unflatten(2, (grid.rows, grid.columns))
        return attend_in_windows(self.attn, boxes, rotation, self.window, mix).flatten(2, 3)

    def read(
        self, x: Tensor, y: Tensor, y_mask: Tensor | None, given: ConditionFrames | None
    ) -> Tensor:
        """Cross-attends to the caption, with arguments as in `forward`; [B, T, S, C]."""
        if given is None or not given.frames:
            return self.cross_attn(x.flatten(1, 2), y, y_mask).view_as(x)
        others = [frame for frame in range(x.shape[1]) if frame not in given.frames]
        mine = (list(given.frames), given.captions, given.mask)
        out = torch.empty_like(x)
        for frames, captions, mask in ((others, y, y_mask), mine):
            if frames:
                rows = x[:, frames]
                read = self.cross_attn(rows.flatten(1, 2), captions, mask).view_as(rows)
                out[:, frames] = read.to(out.dtype)
        return out


class JointBlock(nn.Module):
    """Block of STDiT and STDiT2: spatial attention, temporal attention, cross-attention, MLP."""

    scale_shift_table_temporal: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float,
        qk_norm: bool = False,
        rotate_first: bool = False,
        own_table: bool = False,
    ) -> None:
        super().__init__()

        def table(parts: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(parts, hidden_size) / hidden_size**0.5)

        self.attn = SelfAttention(hidden_size, num_heads, qk_norm, rotate_first)
        self.scale_shift_table = table(6)
        self.cross_attn = CrossAttention(hidden_size, num_heads)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), hidden_size)
        self.attn_temp = SelfAttention(hidden_size, num_heads, qk_norm, rotate_first)
        self.register_parameter("scale_shift_table_temporal", table(3) if own_table else None)

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        y_mask: Tensor | None,
        modulation: Tensor,
        temporal: Tensor | None = None,
        rotation: Rotation | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        table = self.scale_shift_table.view(6, 1, 1, 1, -1) + modulation
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = table.unbind(0)
        attended = attend_along(self.attn, modulate(layer_norm(x), shift_msa, scale_msa), False)
        x = torch.addcmul(x, gate_msa, attended)
        if self.scale_shift_table_temporal is None:
            seen, gate = x if places is None else x + places, gate_msa
        else:
            assert temporal is not None, "temporal attention has its own modulation"
            own = self.scale_shift_table_temporal.view(3, 1, 1, 1, -1) + temporal
            seen, gate = modulate(layer_norm(x), own[0], own[1]), own[2]
        x = torch.addcmul(x, gate, attend_along(self.attn_temp, seen, True, rotation))
        x = x + self.cross_attn(x.flatten(1, 2), y, y_mask).view_as(x)
        return torch.addcmul(x, gate_mlp, self.mlp(modulate(layer_norm(x), shift_mlp, scale_mlp)))


class FinalLayer(nn.Module):
    """Modulated norm and projection of tokens to patches."""

    def __init__(self, hidden_size: int, outputs: int, twice: bool = True) -> None:
        super().__init__()
        self.twice = twice
        self.linear = nn.Linear(hidden_size, outputs)
        self.scale_shift_table = nn.Parameter(torch.randn(2, hidden_size) / hidden_size**0.5)

    def forward(
        self, x: Tensor, t: Tensor, t0: Tensor | None, x_mask: Tensor | None, grid: Grid
    ) -> Tensor:
        """Projects tokens to patches; given frames are modulated with the embedding of time 0."""
        normed = layer_norm(x)
        out = modulate(normed, *self._table(t))
        if x_mask is not None and t0 is not None:
            given = modulate(layer_norm(out) if self.twice else normed, *self._table(t0))
            out = torch.where(x_mask[:, :, None, None], out, given)
        return self.linear(out)

    def _table(self, t: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = (self.scale_shift_table[:, None] + t[None]).unbind(0)
        return shift[:, None, None], scale[:, None, None]
