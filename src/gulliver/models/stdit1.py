"""STDiT, the first form of the model: Open-Sora 1.0.

A block attends along space, then time, to the caption, and has an MLP. Positions are fixed codes
for one size of clip, which the weights hold as buffers; the codes of frames are added to what the
first block's temporal attention sees, and nowhere else. Read `STDiT.forward`.
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
    initialise_as_pixart,
    join_patches,
)
from gulliver.models._embeddings import CaptionEmbedder, ScalarEmbedder, sines, spatial_positions
from gulliver.models._making import STDiTConfig, config_of
from gulliver.models._quirks import checked_quirks


class STDiT(nn.Module):
    """The spatial-temporal diffusion transformer, first form.

    Args:
        config: configuration; None for the defaults.
        fields: fields of `STDiTConfig` that are other than there.

    Raises:
        GulliverError: an unknown field, one that is not supported, or sizes that do not divide.

    Source: https://arxiv.org/abs/2412.20404 (Open-Sora), https://arxiv.org/abs/2310.00426 (PixArt).
    """

    # Buffers, as in the public weights.
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
                f"input_size {input_size} does not divide by patch_size {patch_size}"
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
        """Predicts the noise (and, with pred_sigma, as many channels more).

        Args:
            x: noisy latents [B, in_channels, *input_size].
            timestep: step of the diffusion of each clip [B], 0 to 999.
            y: caption vectors [B, 1, L, caption_channels].
            mask: caption tokens that are there [B, L]; None: all.
            drop_caption: captions to replace by the null caption [B]; None: drawn with
                class_dropout_prob in training, none in evaluation.

        Returns:
            [B, out_channels, *input_size] in float32 (float64 for a float64 model).

        Raises:
            GulliverError: the clip is of another size; shapes do not fit each other; a caption has
                no token.
        """
        check_inputs(x, y, mask, None, self.in_channels, self.patch_size)
        if tuple(x.shape[2:]) != self.input_size:
            raise GulliverError(
                f"x has {'x'.join(map(str, x.shape[2:]))} latents: this STDiT has positions for "
                f"input_size {'x'.join(map(str, self.input_size))} alone"
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
