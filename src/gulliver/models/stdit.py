"""STDiT3, the spatial-temporal diffusion transformer of Open-Sora 1.2.

Read `STDiT3.forward` first, then `Block.forward`. Attention alternates between the tokens of one
frame (spatial blocks) and the frames at one spatial position (temporal blocks); each block then
attends to the caption. Parameter names are those of the public weights, which load strictly and
compute the same: two quirks that trained weights depend on are marked where they stand.

Shapes: B clips, T frames (temporal), S tokens of a frame (spatial), C channels, L caption tokens.
What it does not know: autoencoders, noise, parallelism. But blocks and the final layer are told the
grid, T and S of the whole clip, so that sequence parallelism may hand them a part of its tokens.

[Note: factored attention] Attention over all T x S tokens at once would cost (T S)^2; spatial and
temporal attention in turn cost T S^2 + S T^2, and any two tokens are connected after one pair of
blocks. It is also what makes dynamic sequence parallelism possible: each block needs only one of
the two axes whole.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.errors import GulliverError, nearest
from gulliver.models._attention import CrossAttention, Mix, SelfAttention
from gulliver.models._embeddings import (
    CaptionEmbedder,
    Mlp,
    RotaryFrequencies,
    ScalarEmbedder,
    sinusoid,
    spatial_positions,
)

__all__ = ["STDIT3_SIZES", "STDiT3", "stdit3"]

STDIT3_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "depth": 3, "num_heads": 4},
    "mini": {"hidden_size": 192, "depth": 4, "num_heads": 6},
    "S/2": {"hidden_size": 384, "depth": 12, "num_heads": 6},
    "B/2": {"hidden_size": 768, "depth": 12, "num_heads": 12},
    "L/2": {"hidden_size": 1024, "depth": 24, "num_heads": 16},
    "XL/2": {"hidden_size": 1152, "depth": 28, "num_heads": 16},
    "3B/2": {"hidden_size": 1872, "depth": 28, "num_heads": 26},
}
"""Named sizes; `depth` counts pairs of a spatial and a temporal block."""

REFUSED_WHEN_SET = {
    "enable_flash_attn": "attention always runs through torch's scaled_dot_product_attention",
    "enable_layernorm_kernel": "layer norms always run through torch",
    "enable_sequence_parallelism": "models know nothing of parallelism",
    "skip_y_embedder": "captions are always embedded by the model",
    "drop_path": "stochastic depth is not supported",
}


def stdit3(size: str, **overrides: Any) -> STDiT3:
    """Builds a named size of STDiT3, with any field of its configuration changed.

    Args:
        size: name in `STDIT3_SIZES`.
        overrides: arguments of `STDiT3`.

    Raises:
        GulliverError: the size or a field is unknown; the nearest is named.
    """
    if size not in STDIT3_SIZES:
        raise GulliverError(f"unknown model size {size!r}: {nearest(size, STDIT3_SIZES)}")
    return STDiT3(**{**STDIT3_SIZES[size], **overrides})


def layer_norm(x: Tensor) -> Tensor:
    """Normalises the last dim, without weights (the modulation has them), eps 1e-6."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Returns x * (1 + scale) + shift, the adaptive part of AdaLN (Peebles and Xie, DiT, 2022)."""
    return torch.addcmul(shift, x, scale + 1)


Grid = tuple[int, int]
"""T and S of a whole clip, in tokens."""


class Block(nn.Module):
    """A transformer block: spatial or temporal attention, attention to the caption, an MLP.

    Args:
        hidden_size: width C.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over C.
        qk_norm: whether queries and keys are RMS-normed.
        temporal: whether attention runs along T; else along S.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, mlp_ratio: float, qk_norm: bool, temporal: bool
    ) -> None:
        super().__init__()
        self.temporal = temporal
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
        rotation: tuple[Tensor, Tensor] | None,
        grid: Grid,
    ) -> Tensor:
        """Computes one block.

        Args:
            x: tokens [B, T, S, C].
            y: caption tokens [B, L, C].
            y_mask: caption tokens to attend to [B, 1, 1, L], or None for all.
            modulation: shift, scale and gate of attention and of the MLP, [6, B, 1 or T, 1, C]
                before this block's own table is added.
            rotation: cosine and sine for the temporal blocks, each [T, head size / 2].
            grid: T and S of the whole clip.

        Returns:
            Tokens [B, T, S, C].
        """
        # AdaLN-single: one projection of time for all blocks, plus a small table for each.
        table = self.scale_shift_table.view(6, 1, 1, 1, -1) + modulation
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = table.unbind(0)
        attended = self.attend(modulate(layer_norm(x), shift_msa, scale_msa), rotation, grid)
        x = torch.addcmul(x, gate_msa, attended)
        x = x + self.cross_attn(x.flatten(1, 2), y, y_mask).view_as(x)
        return torch.addcmul(x, gate_mlp, self.mlp(modulate(layer_norm(x), shift_mlp, scale_mlp)))

    def attend(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        grid: Grid,
        mix: Mix = F.scaled_dot_product_attention,
    ) -> Tensor:
        """Attends along S within each frame, or along T at each spatial position.

        Args:
            x: modulated tokens [B, T, S, C].
            rotation: cosine and sine, for temporal attention.
            grid: T and S of the whole clip; for wrappers that hold a part of it.
            mix: attention function, as in `SelfAttention.forward`.

        Returns:
            Tokens [B, T, S, C].
        """
        if not self.temporal:
            return self.attn(x.flatten(0, 1), None, mix).view_as(x)
        by_place = x.transpose(1, 2)
        rows = self.attn(by_place.flatten(0, 1), rotation, mix)
        return rows.view(by_place.shape).transpose(1, 2)


class FinalLayer(nn.Module):
    """The modulated norm and the projection of tokens to patches."""

    def __init__(self, hidden_size: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, outputs)
        self.scale_shift_table = nn.Parameter(torch.randn(2, hidden_size) / hidden_size**0.5)

    def forward(
        self, x: Tensor, t: Tensor, t0: Tensor | None, x_mask: Tensor | None, grid: Grid
    ) -> Tensor:
        """Projects tokens to patches; given frames are modulated with the embedding of time 0.

        Args:
            x: tokens [B, T, S, C].
            t: embedding of the noise level [B, C].
            t0: embedding of noise level 0 [B, C]; None without `x_mask`.
            x_mask: True for frames to generate, False for given ones [B, T]; None: all True.
            grid: T and S of the whole clip; for wrappers that hold a part of it.

        Returns:
            Patches [B, T, S, outputs].
        """
        out = modulate(layer_norm(x), *self._table(t))
        if x_mask is not None and t0 is not None:
            # Quirk of the public model: given frames are normed after their first modulation.
            given = modulate(layer_norm(out), *self._table(t0))
            out = torch.where(x_mask[:, :, None, None], out, given)
        return self.linear(out)

    def _table(self, t: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = (self.scale_shift_table[:, None] + t[None]).unbind(0)
        return shift[:, None, None], scale[:, None, None]


class STDiT3(nn.Module):
    """The spatial-temporal diffusion transformer, third version.

    Args:
        input_size: accepted as public configurations have it; sizes are read off each input.
        input_sq_size: side in pixels of the resolution at which positions are unscaled.
        in_channels: channels of the latent.
        patch_size: latent frames, rows and columns of a token.
        hidden_size: width C.
        depth: pairs of a spatial and a temporal block.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLPs over C.
        class_dropout_prob: share of captions replaced by the null caption in training.
        pred_sigma: twice the output channels; rectified flow uses the first half.
        drop_path: refused unless 0.
        caption_channels: width of the text encoder's vectors.
        model_max_length: longest caption in tokens.
        qk_norm: RMS norm of queries and keys.
        only_train_temporal: freeze all but the temporal blocks.
        freeze_y_embedder: freeze the caption embedder.
        zero_init_temporal: start the temporal blocks as identities, as a model that grows out of an
            image model should; from scratch on little data False learns faster.
        temporal_positions: add a sinusoidal code of the frame to the tokens, as the first form did.
            The public third form has none: its rotary code tells frames apart only by what they
            show, so which way things move is learnt late.
        others: further fields of public configurations, refused when set.

    Raises:
        GulliverError: an unknown field (the nearest is named), one that is not supported, or sizes
            that do not divide.

    Source: https://arxiv.org/abs/2412.20404 (Open-Sora), https://arxiv.org/abs/2310.00426
        (AdaLN-single).
    """

    def __init__(
        self,
        *,
        input_size: tuple[int | None, int | None, int | None] = (None, None, None),
        input_sq_size: int = 512,
        in_channels: int = 4,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        pred_sigma: bool = True,
        caption_channels: int = 4096,
        model_max_length: int = 300,
        qk_norm: bool = True,
        only_train_temporal: bool = False,
        freeze_y_embedder: bool = False,
        zero_init_temporal: bool = True,
        temporal_positions: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        _check_fields(others)
        if hidden_size % num_heads or hidden_size % 4 or (hidden_size // num_heads) % 2:
            raise GulliverError(
                f"hidden_size {hidden_size} must be a multiple of 4 and of num_heads {num_heads}, "
                "with heads of even width"
            )
        self.temporal_positions = temporal_positions
        self.input_size, self.input_sq_size = input_size, input_sq_size
        self.in_channels, self.hidden_size = in_channels, hidden_size
        self.depth, self.num_heads, self.mlp_ratio = depth, num_heads, mlp_ratio
        self.patch_size = tuple(patch_size)
        self.out_channels = 2 * in_channels if pred_sigma else in_channels
        # A container, because the public weights call it x_embedder.proj.
        self.x_embedder = nn.ModuleDict(
            {"proj": nn.Conv3d(in_channels, hidden_size, patch_size, patch_size)}
        )
        self.t_embedder = ScalarEmbedder(hidden_size)
        self.fps_embedder = ScalarEmbedder(hidden_size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        self.y_embedder = CaptionEmbedder(
            caption_channels, hidden_size, class_dropout_prob, model_max_length
        )
        self.rope = RotaryFrequencies(hidden_size // num_heads)

        def blocks(temporal: bool) -> nn.ModuleList:
            one = (hidden_size, num_heads, mlp_ratio, qk_norm, temporal)
            return nn.ModuleList(Block(*one) for _ in range(depth))

        self.spatial_blocks, self.temporal_blocks = blocks(False), blocks(True)
        self.final_layer = FinalLayer(hidden_size, math.prod(patch_size) * self.out_channels)
        self._initialise(zero_init_temporal)
        if only_train_temporal:
            self.requires_grad_(False)
            self.temporal_blocks.requires_grad_(True)
        if freeze_y_embedder:
            self.y_embedder.requires_grad_(False)

    def _initialise(self, zero_init_temporal: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.fps_embedder.get_parameter("mlp.0.weight"), std=0.02)
        nn.init.zeros_(self.fps_embedder.get_parameter("mlp.2.weight"))
        if zero_init_temporal:
            for block in self.temporal_blocks:
                for name in ("attn.proj", "cross_attn.proj", "mlp.fc2"):
                    nn.init.zeros_(block.get_parameter(f"{name}.weight"))

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        fps: Tensor | None = None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        *,
        drop_caption: Tensor | None = None,
    ) -> Tensor:
        """Predicts the velocity (and, with pred_sigma, as many channels more).

        Args:
            x: noisy latents [B, in_channels, T, H, W], any T, H, W.
            timestep: noise level of each clip [B], 0 (data) to 1000 (noise).
            y: caption vectors [B, 1, L, caption_channels].
            mask: caption tokens that are there [B, L]; None: all.
            x_mask: True for frames to generate, False for given ones [B, T]; None: all True.
            fps: frames per second [B].
            height: rows of the clip in pixels [B]; as in the public model the first decides for
                the whole batch.
            width: columns of the clip in pixels [B].
            drop_caption: captions to replace by the null caption [B]; None: drawn with
                class_dropout_prob in training, none in evaluation.

        Returns:
            [B, out_channels, T, H, W] in float32 (float64 for a float64 model).

        Raises:
            GulliverError: fps, height or width is missing; shapes do not fit each other; a caption
                has no token.
        """
        if fps is None or height is None or width is None:
            missing = [
                n for n, v in (("fps", fps), ("height", height), ("width", width)) if v is None
            ]
            raise GulliverError(f"STDiT3 needs {' and '.join(missing)}: pass a tensor of shape [B]")
        self._check_shapes(x, y, mask, x_mask)
        dtype = self.x_embedder["proj"].get_parameter("weight").dtype
        x = x.to(dtype)
        tokens, grid = self._embed_patches(x, math.sqrt(float(height[0]) * float(width[0])))
        t = self.t_embedder(timestep)
        speed = self.fps_embedder(fps)
        t = t + speed
        t0 = None
        modulation = self.t_block(t).view(len(t), 1, 6, 1, -1)
        if x_mask is not None:
            x_mask = x_mask.bool()
            t0 = self.t_embedder(torch.zeros_like(timestep)) + speed
            still = self.t_block(t0).view(len(t), 1, 6, 1, -1)
            modulation = torch.where(x_mask[:, :, None, None, None], modulation, still)
        modulation = modulation.permute(2, 0, 1, 3, 4)
        captions = self.y_embedder(y.to(dtype).squeeze(1), drop_caption)
        # Without a mask scaled_dot_product_attention may choose its fastest kernel.
        y_mask = None if mask is None or bool(mask.all()) else mask.bool()[:, None, None]
        whole = (grid[0], grid[1] * grid[2])
        rotation = self.rope(whole[0])
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            tokens = spatial(tokens, captions, y_mask, modulation, None, whole)
            tokens = temporal(tokens, captions, y_mask, modulation, rotation, whole)
        out = self._join_patches(self.final_layer(tokens, t, t0, x_mask, whole), grid)
        out = out[:, :, : x.shape[2], : x.shape[3], : x.shape[4]]
        return out if dtype == torch.float64 else out.float()

    def _check_shapes(
        self, x: Tensor, y: Tensor, mask: Tensor | None, x_mask: Tensor | None
    ) -> None:
        if x.ndim != 5 or x.shape[1] != self.in_channels:
            raise GulliverError(
                f"x has shape {tuple(x.shape)}: expected [B, {self.in_channels}, T, H, W]"
            )
        if y.ndim != 4 or len(y) != len(x) or y.shape[1] != 1:
            raise GulliverError(
                f"y has shape {tuple(y.shape)}: expected [{len(x)}, 1, L, channels]"
            )
        if mask is not None:
            if mask.shape != (len(x), y.shape[2]):
                raise GulliverError(
                    f"mask has shape {tuple(mask.shape)}: expected {(len(x), y.shape[2])}"
                )
            if not bool(mask.any(dim=1).all()):
                raise GulliverError("a caption has no token: its mask must allow at least one")
        if x_mask is not None:
            if x_mask.shape != (len(x), x.shape[2]):
                raise GulliverError(
                    f"x_mask has shape {tuple(x_mask.shape)}: expected {(len(x), x.shape[2])}"
                )
            if self.patch_size[0] != 1:
                raise GulliverError("x_mask needs a patch of one frame: patch_size = (1, h, w)")

    def _embed_patches(self, x: Tensor, side: float) -> tuple[Tensor, tuple[int, int, int]]:
        """Embeds latents as tokens [B, T', S, C], zero-padded at the end to whole patches."""
        padding = [
            (-size) % patch for size, patch in zip(x.shape[2:], self.patch_size, strict=True)
        ]
        if any(padding):
            x = F.pad(x, (0, padding[2], 0, padding[1], 0, padding[0]))
        x = self.x_embedder["proj"](x)
        frames, rows, columns = x.shape[2:]
        # Quirk of the public model: the first clip's resolution decides for the whole batch.
        positions = spatial_positions(
            rows, columns, self.hidden_size, side / self.input_sq_size, x.device, x.dtype
        )
        if self.temporal_positions:
            places = torch.arange(frames, device=x.device)
            positions = positions + sinusoid(places, self.hidden_size, x.dtype)[:, None]
        return x.flatten(3).permute(0, 2, 3, 1) + positions, (frames, rows, columns)

    def _join_patches(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Joins patches [B, T', S, pt * ph * pw * channels] to [B, channels, T, H, W]."""
        split = tokens.view(len(tokens), *grid, *self.patch_size, self.out_channels)
        sizes = (n * p for n, p in zip(grid, self.patch_size, strict=True))
        return split.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(len(tokens), self.out_channels, *sizes)


def _check_fields(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in REFUSED_WHEN_SET:
            known = inspect.signature(STDiT3.__init__).parameters.keys() - {"self", "others"}
            choices = [*known, *REFUSED_WHEN_SET]
            raise GulliverError(f"STDiT3 has no field {name!r}: {nearest(name, choices)}")
        if value:
            raise GulliverError(f"{name}={value!r} is refused: {REFUSED_WHEN_SET[name]}")
