"""STDiT2, the second form of the model: Open-Sora 1.1.

Any size and length of clip: positions are scaled sinusoids in space and a rotary code in time. What
modulates spatial attention and the MLP knows height, width and aspect ratio; what modulates
temporal attention knows the number of frames and their rate. Read `STDiT2.forward`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.models._blocks import FinalLayer, JointBlock, modulation_of
from gulliver.models._clips import (
    PatchEmbedder,
    as_exact,
    caption_mask,
    check_heads,
    check_inputs,
    clip_scales,
    grid_positions,
    initialise_as_pixart,
    join_patches,
    needed,
)
from gulliver.models._embeddings import CaptionEmbedder, RotaryFrequencies, ScalarEmbedder
from gulliver.models._making import STDiT2Config, config_of
from gulliver.models._quirks import checked_quirks


class STDiT2(nn.Module):
    """The spatial-temporal diffusion transformer, second form.

    Args:
        config: configuration; None for the defaults.
        fields: fields of `STDiT2Config` that are other than there.

    Raises:
        GulliverError: an unknown field, one that is not supported, or sizes that do not divide.

    Source: https://arxiv.org/abs/2412.20404 (Open-Sora).
    """

    def __init__(self, config: STDiT2Config | None = None, **fields: Any) -> None:
        super().__init__()
        config = config_of(STDiT2Config, config, fields)
        hidden_size, num_heads, mlp_ratio = config.hidden_size, config.num_heads, config.mlp_ratio
        check_heads(hidden_size, num_heads)
        if hidden_size % 3:
            raise GulliverError(
                f"hidden_size {hidden_size} must be a multiple of 3: height, width and aspect "
                "ratio take a third each"
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
        """Predicts the noise (and, with pred_sigma, as many channels more).

        Args:
            x: noisy latents [B, in_channels, T, H, W], any T, H, W.
            timestep: step of the diffusion of each clip [B], 0 to 999.
            y: caption vectors [B, 1, L, caption_channels].
            mask: caption tokens that are there [B, L]; None: all.
            x_mask: True for frames to generate, False for given ones [B, T]; None: all True.
            num_frames: frames of the clip [B].
            height: rows of the clip in pixels [B].
            width: columns of the clip in pixels [B].
            ar: height over width [B].
            fps: frames per second [B].
            drop_caption: captions to replace by the null caption [B]; None: drawn with
                class_dropout_prob in training, none in evaluation.

        Returns:
            [B, out_channels, T, H, W] in float32 (float64 for a float64 model).

        Raises:
            GulliverError: something that it is conditioned on is missing; shapes do not fit each
                other; a caption has no token.
        """
        needed("STDiT2", num_frames=num_frames, height=height, width=width, ar=ar, fps=fps)
        assert num_frames is not None, "checked"
        assert height is not None, "checked"
        assert width is not None, "checked"
        assert ar is not None, "checked"
        assert fps is not None, "checked"
        check_inputs(x, y, mask, x_mask, self.in_channels, self.patch_size)
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
