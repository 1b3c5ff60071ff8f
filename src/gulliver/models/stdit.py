"""STDiT3, the spatial-temporal diffusion transformer of Open-Sora 1.2 and 1.3.

Start with `STDiT3.forward`, then `STDiTBlock.forward` in `blocks.py`. Attention alternates between
the tokens of one frame (spatial blocks) and the frames at one spatial position (temporal blocks),
or, in the later release, all tokens of a window; each block then cross-attends to the caption.
Parameter names are those of the published weights, which load strictly; quirks of trained weights
are in `configurations.py`.

Shapes: B clips, T frames (temporal), S tokens of a frame (spatial), C channels, L caption tokens.
Blocks and the final layer receive the grid of the whole clip, so that sequence parallelism can pass
them a part of its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError, check_known
from gulliver.models.blocks import (
    CaptionEmbedder,
    ConditionFrames,
    FinalLayer,
    Grid,
    JointBlock,
    RotaryFrequencies,
    Rotation,
    ScalarEmbedder,
    STDiTBlock,
    modulation_of,
    sines,
    sinusoid,
    spatial_positions,
)
from gulliver.models.clips import (
    PatchEmbedder,
    as_exact,
    caption_mask,
    check_heads,
    check_inputs,
    clip_scales,
    grid_positions,
    initialise_as_pixart,
    initialise_linears,
    join_patches,
    needed,
)
from gulliver.models.configurations import (
    STDiT2Config,
    STDiT3Config,
    STDiTConfig,
    checked_quirks,
    config_of,
)

STDIT3_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "depth": 3, "num_heads": 4},
    "mini": {"hidden_size": 192, "depth": 4, "num_heads": 6},
    "S/2": {"hidden_size": 384, "depth": 12, "num_heads": 6},
    "B/2": {"hidden_size": 768, "depth": 12, "num_heads": 12},
    "L/2": {"hidden_size": 1024, "depth": 24, "num_heads": 16},
    "XL/2": {"hidden_size": 1152, "depth": 28, "num_heads": 16},
    "3B/2": {"hidden_size": 1872, "depth": 28, "num_heads": 26},
}
"""Named model sizes; `depth` counts pairs of a spatial and a temporal block."""


# [Note: factored attention] Attention over all T x S tokens at once would cost (T S)^2; alternating
# spatial and temporal attention cost T S^2 + S T^2, and any two tokens are connected after one pair
# of blocks. This also enables dynamic sequence parallelism: each block needs only one of the two
# axes whole.
def stdit3(size: str, **overrides: Any) -> STDiT3:
    """Builds a named size of STDiT3, with optional changes to its configuration.

    Args:
        size: name in `STDIT3_SIZES`.
        overrides: arguments of `STDiT3`.

    Raises:
        GulliverError: the size or a field is unknown.
    """
    check_known("model size", size, STDIT3_SIZES)
    return STDiT3(**{**STDIT3_SIZES[size], **overrides})


class STDiT3(nn.Module):
    """The spatial-temporal diffusion transformer, third version.

    Args:
        config: configuration; None for the defaults.
        fields: fields of `STDiT3Config` to override.

    Raises:
        GulliverError: a field is unknown or not supported, or sizes are not divisible.

    Source: https://arxiv.org/abs/2412.20404 (Open-Sora), https://arxiv.org/abs/2310.00426
    (AdaLN-single).
    """

    def __init__(self, config: STDiT3Config | None = None, **fields: Any) -> None:
        super().__init__()
        config = config_of(STDiT3Config, config, fields)
        hidden_size, num_heads, mlp_ratio = config.hidden_size, config.num_heads, config.mlp_ratio
        check_heads(hidden_size, num_heads)
        self.compat = checked_quirks("STDiT3", config.compat)
        head_size = hidden_size // num_heads
        self.window = _window(config.kernel_size, head_size, config.use_spatial_rope)
        self.use_spatial_rope = config.use_spatial_rope
        self.temporal_positions = config.temporal_positions
        self.input_size, self.input_sq_size = config.input_size, config.input_sq_size
        self.in_channels, self.hidden_size = config.in_channels, hidden_size
        self.depth, self.num_heads, self.mlp_ratio = config.depth, num_heads, mlp_ratio
        self.patch_size = config.patch_size
        self.out_channels = config.in_channels * (2 if config.pred_sigma else 1)

        def patches() -> PatchEmbedder:
            return PatchEmbedder(config.in_channels, hidden_size, config.patch_size)

        self.x_embedder = patches()
        self.x_embedder_cond = patches() if config.image_conditioning else None
        self.x_embedder_cond_mask = patches() if config.image_conditioning else None
        self.t_embedder = ScalarEmbedder(hidden_size)
        self.fps_embedder = ScalarEmbedder(hidden_size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        self.y_embedder = CaptionEmbedder(
            config.caption_channels,
            hidden_size,
            config.class_dropout_prob,
            config.model_max_length,
        )
        self.rope = RotaryFrequencies(head_size if self.window is None else head_size // 3)

        def blocks(temporal: bool, window: tuple[int, int, int] | None = None) -> nn.ModuleList:
            one = (hidden_size, num_heads, mlp_ratio, config.qk_norm, temporal, window)
            return nn.ModuleList(STDiTBlock(*one) for _ in range(config.depth))

        self.spatial_blocks, self.temporal_blocks = blocks(False), blocks(True, self.window)
        self.final_layer = FinalLayer(
            hidden_size,
            math.prod(config.patch_size) * self.out_channels,
            "final_norm_twice" in self.compat,
        )
        self._initialise(config.zero_init_temporal)
        if config.only_train_temporal:
            self.requires_grad_(False)
            self.temporal_blocks.requires_grad_(True)
        if config.freeze_y_embedder:
            self.y_embedder.requires_grad_(False)

    def _initialise(self, zero_init_temporal: bool) -> None:
        initialise_linears(self)
        nn.init.normal_(self.fps_embedder.get_parameter("mlp.0.weight"), std=0.02)
        nn.init.zeros_(self.fps_embedder.get_parameter("mlp.2.weight"))
        for embedder in (self.x_embedder_cond, self.x_embedder_cond_mask):
            for parameter in embedder.parameters() if embedder is not None else ():
                nn.init.zeros_(parameter)
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
        cond: Tensor | None = None,
        cond_mask: Tensor | None = None,
        mask_index: Sequence[int] | None = None,
        y_null: Tensor | None = None,
        *,
        drop_caption: Tensor | None = None,
    ) -> Tensor:
        """Predicts the velocity; with pred_sigma the output has twice the channels.

        Args:
            x: noisy latents [B, in_channels, T, H, W], any T, H, W.
            timestep: noise level of each clip [B], 0 (data) to 1000 (noise).
            y: caption vectors [B, 1, L, caption_channels].
            mask: True for valid caption tokens [B, L]; None: all.
            x_mask: True for frames to generate, False for given ones [B, T]; None: all True.
            fps: frames per second [B].
            height: rows of the clip in pixels [B]; as in the published model, the first value is
                used for the whole batch.
            width: columns of the clip in pixels [B].
            cond: latents of the given frames, zero elsewhere, in the shape of `x`; requires
                image_conditioning.
            cond_mask: one for given frames and zero elsewhere, with the shape of `x`.
            mask_index: indices of the given frames, which attend to the null caption.
            y_null: null caption vectors [B, 1, L, caption_channels]; None: the model's own.
            drop_caption: captions to replace by the null caption [B]; None: random with
                class_dropout_prob in training, none in evaluation.

        Returns:
            [B, out_channels, T, H, W] in float32 (float64 for a float64 model).

        Raises:
            GulliverError: fps, height or width is missing; shapes do not match; a caption has no
                tokens.
        """
        needed("STDiT3", fps=fps, height=height, width=width)
        assert fps is not None, "checked"
        check_inputs(x, y, mask, x_mask, self.patch_size)
        self._check_given(x, cond, cond_mask, mask_index)
        dtype = self.x_embedder.proj.weight.dtype
        tokens, grid = self.x_embedder(x.to(dtype))
        if mask_index is not None:
            assert self.x_embedder_cond is not None, "checked"
            assert self.x_embedder_cond_mask is not None, "checked"
            tokens = tokens + self.x_embedder_cond(cond.to(dtype))[0]  # pyright: ignore
            tokens = tokens + self.x_embedder_cond_mask(cond_mask.to(dtype))[0]  # pyright: ignore
        count = 1 if "first_clip_scale" in self.compat else len(x)
        scales = clip_scales(height, width, count, self.input_sq_size)
        tokens = tokens + self._positions(grid, scales, tokens)
        t, t0 = self.t_embedder(timestep), None
        speed = self.fps_embedder(fps)
        t = t + speed
        if x_mask is not None:
            x_mask = x_mask.bool()
            t0 = self.t_embedder(torch.zeros_like(timestep)) + speed
        modulation = modulation_of(self.t_block, t, t0, x_mask, 6)
        captions = self.y_embedder(y.to(dtype).squeeze(1), drop_caption)
        y_mask = caption_mask(mask)
        given = (self._given(y, y_null, y_mask, mask_index),) if mask_index else ()
        spatial_turn, temporal_turn = self._rotations(grid, scales)
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            tokens = spatial(tokens, captions, y_mask, modulation, spatial_turn, grid, *given)
            tokens = temporal(tokens, captions, y_mask, modulation, temporal_turn, grid, *given)
        out = self.final_layer(tokens, t, t0, x_mask, grid)
        return as_exact(join_patches(out, grid, self.patch_size, x.shape[2:]))

    def _check_given(
        self,
        x: Tensor,
        cond: Tensor | None,
        cond_mask: Tensor | None,
        mask_index: Sequence[int] | None,
    ) -> None:
        if mask_index is None:
            if cond is not None or cond_mask is not None:
                raise GulliverError("cond needs mask_index, the indices of the given frames")
            return
        if self.x_embedder_cond is None:
            raise GulliverError(
                "mask_index needs a model with image_conditioning=True; for other models use x_mask"
            )
        if self.patch_size[0] != 1:
            raise GulliverError("mask_index needs patches of one frame; use patch_size=(1, h, w)")
        for name, value in (("cond", cond), ("cond_mask", cond_mask)):
            if value is None or value.shape != x.shape:
                found = "missing" if value is None else f"of shape {tuple(value.shape)}"
                raise GulliverError(f"{name} is {found}; it needs the shape of x, {tuple(x.shape)}")
        beyond = [n for n in mask_index if not 0 <= n < x.shape[2]]
        if beyond:
            raise GulliverError(
                f"mask_index contains frame {beyond[0]}; the clip has frames 0 to {x.shape[2] - 1}"
            )

    def _positions(self, grid: Grid, scales: list[float], like: Tensor) -> Tensor:
        positions = grid_positions(grid, scales, like)[:, None]
        if self.temporal_positions:
            places = torch.arange(grid.frames, device=like.device)
            positions = positions + sinusoid(places, self.hidden_size, like.dtype)[:, None]
        return positions

    def _rotations(self, grid: Grid, scales: list[float]) -> tuple[Rotation | None, Rotation]:
        """Returns cosine and sine for the spatial blocks and for the temporal blocks."""
        if self.window is None:
            return None, self.rope(grid.frames)
        if len(scales) > 1:
            raise GulliverError(
                "clips of several sizes cannot share a batch, as rotary embeddings of rows and "
                "columns have a single scale"
            )
        sizes = (grid.frames, grid.rows, grid.columns)
        pairs = zip(sizes, self.window, strict=True)
        frames, rows, columns = (size if w < 0 else min(size, w) for size, w in pairs)
        spatial = None
        if self.use_spatial_rope:
            cos, sin = self.rope.box(1, grid.rows, grid.columns, scales[0])
            spatial = cos.flatten(0, 2), sin.flatten(0, 2)
        return spatial, self.rope.box(frames, rows, columns, scales[0])

    def _given(
        self,
        y: Tensor,
        y_null: Tensor | None,
        y_mask: Tensor | None,
        frames: Sequence[int],
    ) -> ConditionFrames:
        if y_null is None:
            y_null = self.y_embedder.y_embedding[: y.shape[2]].expand_as(y)
        never = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        dtype = self.y_embedder.y_proj.fc1.weight.dtype
        null = self.y_embedder(y_null.to(dtype).squeeze(1), never)
        mask = y_mask if "null_text_cut" in self.compat else None
        return ConditionFrames(null, mask, tuple(frames))


def _window(
    kernel_size: Sequence[int] | None, head_size: int, spatial: bool
) -> tuple[int, int, int] | None:
    """Returns frames, rows and columns of a window; `kernel_size` is (rows, columns, frames)."""
    if kernel_size is None:
        if spatial:
            raise GulliverError("use_spatial_rope needs kernel_size, such as (8, 8, -1)")
        return None
    if len(kernel_size) != 3 or any(size < 1 and size != -1 for size in kernel_size):
        raise GulliverError(
            f"kernel_size={tuple(kernel_size)} must be rows, columns and frames of a window, each "
            "at least 1, or -1 for all"
        )
    if head_size % 6:
        raise GulliverError(
            "windows have a 3-axis rotary embedding, so the head size must be a multiple of 6, "
            f"not {head_size}"
        )
    rows, columns, frames = kernel_size
    return frames, rows, columns


# STDiT, the first version of the model: Open-Sora 1.0.
#
# A block has attention over space, then over time, cross-attention to the caption, and an MLP.
# Positions are fixed codes for one clip size, stored as buffers of the weights; the frame codes are
# added only to the input of the first block's temporal attention. Start with `STDiT.forward`.


class STDiT(nn.Module):
    """The spatial-temporal diffusion transformer, first version.

    Args:
        config: configuration; None for the defaults.
        fields: fields of `STDiTConfig` to override.

    Raises:
        GulliverError: a field is unknown or not supported, or sizes are not divisible.

    Source: https://arxiv.org/abs/2412.20404 (Open-Sora), https://arxiv.org/abs/2310.00426 (PixArt).
    """

    # Buffers, as in the published weights.
    pos_embed: Tensor
    pos_embed_temporal: Tensor

    def __init__(self, config: STDiTConfig | None = None, **fields: Any) -> None:
        super().__init__()
        config = config_of(STDiTConfig, config, fields)
        hidden_size, num_heads, mlp_ratio = config.hidden_size, config.num_heads, config.mlp_ratio
        input_size, patch_size = tuple(size or 1 for size in config.input_size), config.patch_size
        check_heads(hidden_size, num_heads)
        self.compat = checked_quirks("STDiT", config.compat)
        if any(size % patch for size, patch in zip(input_size, patch_size, strict=True)):
            raise GulliverError(
                f"input_size={input_size} is not divisible by patch_size={patch_size}"
            )
        self.input_size, self.patch_size = input_size, patch_size
        self.in_channels, self.hidden_size = config.in_channels, hidden_size
        self.depth, self.num_heads, self.mlp_ratio = config.depth, num_heads, mlp_ratio
        self.out_channels = config.in_channels * (2 if config.pred_sigma else 1)
        frames, rows, columns = (s // p for s, p in zip(input_size, patch_size, strict=True))
        kind = torch.get_default_device(), torch.float64
        places = spatial_positions(
            rows, columns, hidden_size, config.space_scale, *kind, square=False
        )
        times = sines(torch.arange(frames, dtype=torch.float64) / config.time_scale, hidden_size)
        self.register_buffer("pos_embed", places.float()[None])
        self.register_buffer("pos_embed_temporal", times.float()[None])
        self.x_embedder = PatchEmbedder(config.in_channels, hidden_size, patch_size)
        self.t_embedder = ScalarEmbedder(hidden_size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        self.y_embedder = CaptionEmbedder(
            config.caption_channels,
            hidden_size,
            config.class_dropout_prob,
            config.model_max_length,
        )
        self.blocks = nn.ModuleList(
            JointBlock(hidden_size, num_heads, mlp_ratio) for _ in range(config.depth)
        )
        self.final_layer = FinalLayer(hidden_size, math.prod(patch_size) * self.out_channels)
        initialise_as_pixart(self, ("t_block",))

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
        mask: Tensor | None = None,
        *,
        drop_caption: Tensor | None = None,
    ) -> Tensor:
        """Predicts the noise; with pred_sigma the output has twice the channels, for its variance.

        Args:
            x: noisy latents [B, in_channels, *input_size].
            timestep: diffusion step of each clip [B], 0 to 999.
            y: caption vectors [B, 1, L, caption_channels].
            mask: True for valid caption tokens [B, L]; None: all.
            drop_caption: captions to replace by the null caption [B]; None: random with
                class_dropout_prob in training, none in evaluation.

        Returns:
            [B, out_channels, *input_size] in float32 (float64 for a float64 model).

        Raises:
            GulliverError: the clip's size is wrong; shapes do not match; a caption has no tokens.
        """
        check_inputs(x, y, mask, None, self.patch_size)
        if tuple(x.shape[2:]) != self.input_size:
            raise GulliverError(
                f"x has {'x'.join(map(str, x.shape[2:]))} latents, but this STDiT only has "
                f"position embeddings for input_size={'x'.join(map(str, self.input_size))}"
            )
        dtype = self.x_embedder.proj.weight.dtype
        tokens, grid = self.x_embedder(x.to(dtype))
        tokens = tokens + self.pos_embed.to(dtype)[:, None]
        t = self.t_embedder(timestep)
        modulation = modulation_of(self.t_block, t, None, None, 6)
        captions = self.y_embedder(y.to(dtype).squeeze(1), drop_caption)
        y_mask = caption_mask(mask)
        places: Tensor | None = self.pos_embed_temporal.to(dtype).squeeze(0)[:, None]
        for block in self.blocks:
            tokens = block(tokens, captions, y_mask, modulation, places=places)
            places = None
        out = self.final_layer(tokens, t, None, None, grid)
        return as_exact(join_patches(out, grid, self.patch_size, x.shape[2:]))


# STDiT2, the second version of the model: Open-Sora 1.1.
#
# Any clip size and length: positions are scaled sinusoids in space and a rotary code in time.
# Spatial attention and the MLP are modulated by height, width and aspect ratio, temporal attention
# by the number of frames and their rate. Start with `STDiT2.forward`.


class STDiT2(nn.Module):
    """The spatial-temporal diffusion transformer, second version.

    Args:
        config: configuration; None for the defaults.
        fields: fields of `STDiT2Config` to override.

    Raises:
        GulliverError: a field is unknown or not supported, or sizes are not divisible.

    Source: https://arxiv.org/abs/2412.20404 (Open-Sora).
    """

    def __init__(self, config: STDiT2Config | None = None, **fields: Any) -> None:
        super().__init__()
        config = config_of(STDiT2Config, config, fields)
        hidden_size, num_heads, mlp_ratio = config.hidden_size, config.num_heads, config.mlp_ratio
        check_heads(hidden_size, num_heads)
        if hidden_size % 3:
            raise GulliverError(
                f"hidden_size={hidden_size} must be a multiple of 3, for height, width and aspect "
                "ratio"
            )
        quirks = checked_quirks("STDiT2", config.compat)
        if config.qk_norm_legacy is not None:
            quirks = quirks - {"rotate_before_norm"}
            quirks |= {"rotate_before_norm"} if config.qk_norm_legacy else set()
        self.compat = quirks
        self.input_size, self.input_sq_size = config.input_size, config.input_sq_size
        self.in_channels, self.hidden_size = config.in_channels, hidden_size
        self.depth, self.num_heads, self.mlp_ratio = config.depth, num_heads, mlp_ratio
        self.patch_size = config.patch_size
        self.out_channels = config.in_channels * (2 if config.pred_sigma else 1)
        self.x_embedder = PatchEmbedder(config.in_channels, hidden_size, config.patch_size)
        self.t_embedder = ScalarEmbedder(hidden_size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        self.t_block_temp = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 3 * hidden_size))
        self.y_embedder = CaptionEmbedder(
            config.caption_channels,
            hidden_size,
            config.class_dropout_prob,
            config.model_max_length,
        )
        self.rope = RotaryFrequencies(hidden_size // num_heads)
        rotated = "rotate_before_norm" in quirks
        one = (hidden_size, num_heads, mlp_ratio, config.qk_norm, rotated, True)
        self.blocks = nn.ModuleList(JointBlock(*one) for _ in range(config.depth))
        self.final_layer = FinalLayer(
            hidden_size,
            math.prod(config.patch_size) * self.out_channels,
            "final_norm_twice" in quirks,
        )
        self.csize_embedder = ScalarEmbedder(hidden_size // 3)
        self.ar_embedder = ScalarEmbedder(hidden_size // 3)
        self.fl_embedder = ScalarEmbedder(hidden_size)
        self.fps_embedder = ScalarEmbedder(hidden_size)
        initialise_as_pixart(self, ("t_block", "t_block_temp"))

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        y: Tensor,
        mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        num_frames: Tensor | None = None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        ar: Tensor | None = None,
        fps: Tensor | None = None,
        *,
        drop_caption: Tensor | None = None,
    ) -> Tensor:
        """Predicts the noise; with pred_sigma the output has twice the channels, for its variance.

        Args:
            x: noisy latents [B, in_channels, T, H, W], any T, H, W.
            timestep: diffusion step of each clip [B], 0 to 999.
            y: caption vectors [B, 1, L, caption_channels].
            mask: True for valid caption tokens [B, L]; None: all.
            x_mask: True for frames to generate, False for given ones [B, T]; None: all True.
            num_frames: frames of the clip [B].
            height: rows of the clip in pixels [B].
            width: columns of the clip in pixels [B].
            ar: height over width [B].
            fps: frames per second [B].
            drop_caption: captions to replace by the null caption [B]; None: random with
                class_dropout_prob in training, none in evaluation.

        Returns:
            [B, out_channels, T, H, W] in float32 (float64 for a float64 model).

        Raises:
            GulliverError: a conditioning input is missing; shapes do not match; a caption has no
                tokens.
        """
        needed("STDiT2", num_frames=num_frames, height=height, width=width, ar=ar, fps=fps)
        assert num_frames is not None, "checked"
        assert height is not None, "checked"
        assert width is not None, "checked"
        assert ar is not None, "checked"
        assert fps is not None, "checked"
        check_inputs(x, y, mask, x_mask, self.patch_size)
        dtype = self.x_embedder.proj.weight.dtype
        tokens, grid = self.x_embedder(x.to(dtype))
        count = 1 if "first_clip_scale" in self.compat else len(x)
        scales = clip_scales(height, width, count, self.input_sq_size)
        tokens = tokens + grid_positions(grid, scales, tokens)[:, None]
        sides = torch.stack([torch.as_tensor(side) for side in (height, width)], dim=1)
        size = self.csize_embedder(sides.to(x.device))
        size = torch.cat([size, self.ar_embedder(ar)], dim=1)
        length = self.fl_embedder(num_frames) + self.fps_embedder(fps)
        t, t0 = self.t_embedder(timestep), None
        if x_mask is not None:
            x_mask = x_mask.bool()
            t0 = self.t_embedder(torch.zeros_like(timestep))

        def modulation(project: nn.Module, told: Tensor, parts: int) -> Tensor:
            return modulation_of(
                project, t + told, None if t0 is None else t0 + told, x_mask, parts
            )

        spatial, temporal = (
            modulation(self.t_block, size, 6),
            modulation(self.t_block_temp, length, 3),
        )
        captions = self.y_embedder(y.to(dtype).squeeze(1), drop_caption)
        y_mask, rotation = caption_mask(mask), self.rope(grid.frames)
        for block in self.blocks:
            tokens = block(tokens, captions, y_mask, spatial, temporal, rotation)
        if t0 is not None and "final_size_of_given" in self.compat:
            t0 = t0 + size
        out = self.final_layer(tokens, t, t0, x_mask, grid)
        return as_exact(join_patches(out, grid, self.patch_size, x.shape[2:]))
