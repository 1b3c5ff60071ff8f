"""Blocks of the STDiT family: AdaLN-single, attention along an axis or in windows, final layer.

Read `STDiTBlock.forward` first. The models differ in which blocks they stack and in what modulates
them.

Shapes: B clips, T frames (temporal), S tokens of a frame (spatial), C channels, L caption tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.models._attention import CrossAttention, Mix, SelfAttention
from gulliver.models._embeddings import Mlp, Rotation


# [Note: windows at the border] Public code pads the grid to whole windows and masks what it added.
# Here the windows at the border are smaller instead: the same attention without a mask, for a token
# of the padding is no key, and its own row is thrown away. The places in a window count from its
# first token, so the rotary code of a smaller window is the beginning of a whole one's.
class Grid(NamedTuple):
    """Sizes of a whole clip in tokens; S is rows times columns."""

    frames: int
    spatial: int
    rows: int
    columns: int


class Given(NamedTuple):
    """Frames that are given to the model, which read another caption than the others."""

    # Caption tokens [B, L, C].
    captions: Tensor
    # Caption tokens to attend to [B, 1, 1, L], or None for all.
    mask: Tensor | None
    # Numbers of them, on the whole clip.
    frames: tuple[int, ...]


def layer_norm(x: Tensor) -> Tensor:
    """Normalises the last dim, without weights (the modulation has them), eps 1e-6."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Returns x * (1 + scale) + shift, the adaptive part of AdaLN (Peebles and Xie, DiT, 2022)."""
    return torch.addcmul(shift, x, scale + 1)


def modulation_of(
    project: nn.Module, t: Tensor, t0: Tensor | None, x_mask: Tensor | None, parts: int
) -> Tensor:
    """Projects embeddings of time to what modulates the blocks."""
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
    """Attends among the tokens of each window."""
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
    """A transformer block: spatial or temporal attention, attention to the caption, an MLP.

    Args:
        hidden_size: width C.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over C.
        qk_norm: whether queries and keys are RMS-normed.
        temporal: whether attention runs along T; else along S.
        window: frames, rows and columns of the windows in which temporal attention runs instead.
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
        given: Given | None = None,
    ) -> Tensor:
        """Computes one block.

        Args:
            x: tokens [B, T, S, C].
            y: caption tokens [B, L, C].
            y_mask: caption tokens to attend to [B, 1, 1, L], or None for all.
            modulation: shift, scale and gate of attention and of the MLP, [6, B, 1 or T, 1, C]
                before this block's own table is added.
            rotation: cosine and sine along the axis of attention, each [T or S, head size / 2], or
                of a whole window.
            grid: sizes of the whole clip.
            given: frames that read another caption; None where there are none.

        Returns:
            Tokens [B, T, S, C].
        """
        # AdaLN-single: one projection of time for all blocks, plus a small table for each.
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
        """Attends along S within each frame, along T at each spatial position, or in windows.

        Args:
            x: modulated tokens [B, T, S, C].
            rotation: cosine and sine, as of `forward`.
            grid: sizes of the whole clip; for wrappers that hold a part of it.
            mix: attention function, as in `SelfAttention.forward`.

        Returns:
            Tokens [B, T, S, C].
        """
        if self.window is None:
            return attend_along(self.attn, x, self.temporal, rotation, mix)
        assert rotation is not None, "places in a window are told by their rotary code"
        boxes = x.unflatten(2, (grid.rows, grid.columns))
        return attend_in_windows(self.attn, boxes, rotation, self.window, mix).flatten(2, 3)

    def read(self, x: Tensor, y: Tensor, y_mask: Tensor | None, given: Given | None) -> Tensor:
        """Attends to the caption, with arguments as of `forward`; [B, T, S, C]."""
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
    """A block of the first two forms: spatial, then temporal attention, caption and MLP."""

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
        """Computes one block."""
        table = self.scale_shift_table.view(6, 1, 1, 1, -1) + modulation
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = table.unbind(0)
        attended = attend_along(self.attn, modulate(layer_norm(x), shift_msa, scale_msa), False)
        x = torch.addcmul(x, gate_msa, attended)
        if self.scale_shift_table_temporal is None:
            seen, gate = x if places is None else x + places, gate_msa
        else:
            assert temporal is not None, "temporal attention is modulated by itself"
            own = self.scale_shift_table_temporal.view(3, 1, 1, 1, -1) + temporal
            seen, gate = modulate(layer_norm(x), own[0], own[1]), own[2]
        x = torch.addcmul(x, gate, attend_along(self.attn_temp, seen, True, rotation))
        x = x + self.cross_attn(x.flatten(1, 2), y, y_mask).view_as(x)
        return torch.addcmul(x, gate_mlp, self.mlp(modulate(layer_norm(x), shift_mlp, scale_mlp)))


class FinalLayer(nn.Module):
    """The modulated norm and the projection of tokens to patches."""

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
