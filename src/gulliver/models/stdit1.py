"""STDiT, the first form of the model: Open-Sora 1.0.

A block attends along space, then time, to the caption, and has an MLP. Positions are fixed codes
for one size of clip, which the weights hold as buffers; the codes of frames are added to what the
first block's temporal attention sees, and nowhere else. Read `STDiT.forward`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.models._blocks import FinalLayer, JointBlock, modulation_of
from gulliver.models._clips import (
    PatchEmbedder,
    as_exact,
    caption_mask,
    check_fields,
    check_heads,
    check_inputs,
    initialise_as_pixart,
    join_patches,
)
from gulliver.models._embeddings import CaptionEmbedder, ScalarEmbedder, sines, spatial_positions
from gulliver.models._quirks import checked_quirks


class STDiT(nn.Module):
    """The spatial-temporal diffusion transformer, first form.

    Args:
        input_size: latent frames, rows and columns of every clip.
        in_channels: channels of the latent.
        patch_size: latent frames, rows and columns of a token.
        hidden_size: width C.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLPs over C.
        class_dropout_prob: share of captions replaced by the null caption in training.
        pred_sigma: twice the output channels: noise and its variance.
        caption_channels: width of the text encoder's vectors.
        model_max_length: longest caption in tokens.
        space_scale: resolution over the one at which positions are unscaled.
        time_scale: frames per unit of the temporal code.
        compat: names of quirks; there are none of this form.
        others: further fields of public configurations, refused when set.

    Raises:
        GulliverError: an unknown field, one that is not supported, or sizes that do not divide.

    Source: https://arxiv.org/abs/2412.20404 (Open-Sora), https://arxiv.org/abs/2310.00426 (PixArt).
    """

    # Buffers, as in the public weights.
    pos_embed: Tensor
    pos_embed_temporal: Tensor

    def __init__(
        self,
        *,
        input_size: Sequence[int] = (1, 32, 32),
        in_channels: int = 4,
        patch_size: Sequence[int] = (1, 2, 2),
        hidden_size: int = 1152,
        depth: int = 28,
        num_heads: int = 16,
        mlp_ratio: float = 4.0,
        class_dropout_prob: float = 0.1,
        pred_sigma: bool = True,
        caption_channels: int = 4096,
        model_max_length: int = 120,
        space_scale: float = 1.0,
        time_scale: float = 1.0,
        compat: Collection[str] | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        check_fields("STDiT", list(inspect.signature(STDiT.__init__).parameters), others)
        check_heads(hidden_size, num_heads)
        self.compat = checked_quirks("STDiT", compat)
        if any(size % patch for size, patch in zip(input_size, patch_size, strict=True)):
            raise GulliverError(
                f"input_size {tuple(input_size)} does not divide by patch_size {tuple(patch_size)}"
            )
        self.input_size, self.patch_size = tuple(input_size), tuple(patch_size)
        self.in_channels, self.hidden_size = in_channels, hidden_size
        self.depth, self.num_heads, self.mlp_ratio = depth, num_heads, mlp_ratio
        self.out_channels = 2 * in_channels if pred_sigma else in_channels
        frames, rows, columns = (s // p for s, p in zip(input_size, patch_size, strict=True))
        kind = torch.get_default_device(), torch.float64
        places = spatial_positions(rows, columns, hidden_size, space_scale, *kind, square=False)
        times = sines(torch.arange(frames, dtype=torch.float64) / time_scale, hidden_size)
        self.register_buffer("pos_embed", places.float()[None])
        self.register_buffer("pos_embed_temporal", times.float()[None])
        self.x_embedder = PatchEmbedder(in_channels, hidden_size, patch_size)
        self.t_embedder = ScalarEmbedder(hidden_size)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))
        self.y_embedder = CaptionEmbedder(
            caption_channels, hidden_size, class_dropout_prob, model_max_length
        )
        self.blocks = nn.ModuleList(
            JointBlock(hidden_size, num_heads, mlp_ratio) for _ in range(depth)
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
