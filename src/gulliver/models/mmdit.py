"""MMDiT, the transformer of Open-Sora 2.0, with joint attention over video and text tokens.

Start with `MMDiT.forward`. Double blocks have separate weights for video and text and share one
attention; single blocks share their weights. Every token has a position on three axes (frame, row,
column; zeros for text), encoded by rotary codes. `clips.py` converts latents to tokens and back.
Names are those of the published weights, which derive from FLUX.1.

Shapes: B clips, N video tokens, L text tokens, C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.models.blocks import (
    RMSNorm,
    Rotation,
    layer_norm,
    modulate,
    rotary_frequencies,
    rotate,
    rotation_of,
    sinusoid,
    working_precision,
)
from gulliver.models.clips import as_exact
from gulliver.models.configurations import MMDiTConfig, checked_quirks, config_of


# [Note: two layouts of one model] The published weights exist with queries, keys and values in one
# matrix (``fused_qkv``, as in FLUX) and in three, and with rotary pairs adjacent or half a head
# apart (``use_liger_rope``, the layout of a fused kernel). Open-Sora 2.0 was trained with three
# matrices and pairs half a head apart. The values of the weights do not reveal the layout, so both
# are fields.
class VectorEmbedder(nn.Module):
    """Two-layer MLP with SiLU: [B, inputs] to [B, hidden_size]."""

    def __init__(self, inputs: int, hidden_size: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(inputs, hidden_size)
        self.out_layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x)))


class HeadNorms(nn.Module):
    """RMS norms of queries and keys, per head."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.query_norm = RMSNorm(head_size, name="scale")
        self.key_norm = RMSNorm(head_size, name="scale")

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q), self.key_norm(k)


class Modulation(nn.Module):
    """Projects the conditioning vector to shifts, scales and gates: [B, C] to parts x [B, 1, C]."""

    def __init__(self, hidden_size: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.lin = nn.Linear(hidden_size, parts * hidden_size)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        return self.lin(F.silu(vec))[:, None].chunk(self.parts, dim=-1)


Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each [B, heads, N, head size]."""


class StreamAttention(nn.Module):
    """Projections of one stream (video or text) for joint attention."""

    def __init__(self, hidden_size: int, num_heads: int, qkv_bias: bool, fused_qkv: bool) -> None:
        super().__init__()
        self.num_heads, self.fused = num_heads, fused_qkv
        if fused_qkv:
            self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=qkv_bias)
        else:
            self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
            self.k_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
            self.v_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.norm = HeadNorms(hidden_size // num_heads)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def heads(self, x: Tensor) -> Heads:
        """Projects tokens [B, N, C] to normalized queries and keys, and values."""
        parts = self.qkv(x).chunk(3, -1) if self.fused else _each(x, *self._projections())
        q, k, v = (_by_head(part, self.num_heads) for part in parts)
        return *self.norm(q, k), v

    def _projections(self) -> tuple[nn.Module, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class DoubleBlock(nn.Module):
    """Block with separate weights for video and text, and joint attention."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool,
        fused_qkv: bool,
        halves: bool,
    ) -> None:
        super().__init__()
        self.halves = halves
        inner = int(hidden_size * mlp_ratio)
        for stream in ("img", "txt"):
            self.add_module(f"{stream}_mod", Modulation(hidden_size, 6))
            attention = StreamAttention(hidden_size, num_heads, qkv_bias, fused_qkv)
            self.add_module(f"{stream}_attn", attention)
            mlp = nn.Sequential(
                nn.Linear(hidden_size, inner),
                nn.GELU(approximate="tanh"),
                nn.Linear(inner, hidden_size),
            )
            self.add_module(f"{stream}_mlp", mlp)

    def forward(
        self, img: Tensor, txt: Tensor, vec: Tensor, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        streams = {"txt": txt, "img": img}
        parts = {name: self._part(name, "mod")(vec) for name in streams}
        seen = {name: modulate(layer_norm(x), *parts[name][:2]) for name, x in streams.items()}
        mixed = self.attend(seen["txt"], seen["img"], rotation)
        sizes = [txt.shape[1], img.shape[1]]
        out = {}
        for (name, x), own in zip(streams.items(), mixed.split(sizes, dim=1), strict=True):
            _, _, gate, shift_mlp, scale_mlp, gate_mlp = parts[name]
            x = torch.addcmul(x, gate, self._part(name, "attn").proj(own))
            inner = self._part(name, "mlp")(modulate(layer_norm(x), shift_mlp, scale_mlp))
            out[name] = torch.addcmul(x, gate_mlp, inner)
        return out["img"], out["txt"]

    def attend(self, txt: Tensor, img: Tensor, rotation: Rotation) -> Tensor:
        """Computes modulated joint attention without output projections: [B, L + N, C]."""
        found = self._part("txt", "attn").heads(txt), self._part("img", "attn").heads(img)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(*found, strict=True))
        return joint_attention(q, k, v, rotation, self.halves)

    def _part(self, stream: str, name: str) -> Any:
        return getattr(self, f"{stream}_{name}")


class SingleBlock(nn.Module):
    """Block with shared weights for text and video; attention and MLP run in parallel."""

    # Source of parallel blocks: Dehghani et al., 2023 (arXiv 2302.05442).

    def __init__(
        self, hidden_size: int, num_heads: int, mlp_ratio: float, fused_qkv: bool, halves: bool
    ) -> None:
        super().__init__()
        self.num_heads, self.fused, self.halves = num_heads, fused_qkv, halves
        self.hidden_size, self.inner = hidden_size, int(hidden_size * mlp_ratio)
        if fused_qkv:
            self.linear1 = nn.Linear(hidden_size, 3 * hidden_size + self.inner)
        else:
            self.q_proj = nn.Linear(hidden_size, hidden_size)
            self.k_proj = nn.Linear(hidden_size, hidden_size)
            self.v_mlp = nn.Linear(hidden_size, hidden_size + self.inner)
        self.linear2 = nn.Linear(hidden_size + self.inner, hidden_size)
        self.norm = HeadNorms(hidden_size // num_heads)
        self.modulation = Modulation(hidden_size, 3)

    def forward(self, x: Tensor, vec: Tensor, rotation: Rotation) -> Tensor:
        shift, scale, gate = self.modulation(vec)
        seen = modulate(layer_norm(x), shift, scale)
        width = self.hidden_size
        if self.fused:
            q, k, v, inner = self.linear1(seen).split([width, width, width, self.inner], dim=-1)
        else:
            q, k, last = _each(seen, self.q_proj, self.k_proj, self.v_mlp)
            v, inner = last.split([width, self.inner], dim=-1)
        mixed = self.attend(q, k, v, rotation)
        both = torch.cat([mixed, F.gelu(inner, approximate="tanh")], dim=-1)
        return torch.addcmul(x, gate, self.linear2(both))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
        """Attends over projected tokens q, k and v, each [B, L + N, C]; returns the same shape."""
        q, k, v = (_by_head(part, self.num_heads) for part in (q, k, v))
        q, k = self.norm(q, k)
        return joint_attention(q, k, v, rotation, self.halves)


def joint_attention(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, halves: bool) -> Tensor:
    """Rotates queries and keys and attends: heads [B, heads, N, head size] to tokens [B, N, C]."""
    q, k = rotate(q, rotation, halves), rotate(k, rotation, halves)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _each(x: Tensor, *projections: nn.Module) -> list[Tensor]:
    return [projection(x) for projection in projections]


class LastLayer(nn.Module):
    """Modulated norm and projection of tokens to packed latents."""

    def __init__(self, hidden_size: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, dim=-1)
        return self.linear(modulate(layer_norm(x), shift, scale))


class MMDiT(nn.Module):
    """The multi-modal diffusion transformer.

    Args:
        config: configuration; None for the defaults.
        fields: fields of `MMDiTConfig` to override.

    Raises:
        GulliverError: a field is unknown or not supported, or sizes are not divisible.

    Source: https://arxiv.org/abs/2503.09642 (Open-Sora 2.0), https://arxiv.org/abs/2403.03206
    (MMDiT).
    """

    CHANNELS = 256
    """Channels of the sinusoids of noise level and guidance."""

    def __init__(self, config: MMDiTConfig | None = None, **fields: Any) -> None:
        super().__init__()
        config = config_of(MMDiTConfig, config, fields)
        self.compat = checked_quirks("MMDiT", config.compat)
        hidden_size, num_heads, mlp_ratio = config.hidden_size, config.num_heads, config.mlp_ratio
        in_channels, patch_size, axes_dim = config.in_channels, config.patch_size, config.axes_dim
        if hidden_size % num_heads or sum(axes_dim) != hidden_size // num_heads:
            raise GulliverError(
                f"axes_dim={axes_dim} must add up to the head size, hidden_size={hidden_size} / "
                f"num_heads={num_heads}"
            )
        if len(axes_dim) != 3 or any(size % 2 for size in axes_dim):
            raise GulliverError(f"axes_dim={axes_dim} must be three even widths")
        if in_channels % patch_size**2:
            raise GulliverError(
                f"in_channels={in_channels} must be a multiple of patch_size={patch_size} squared"
            )
        self.in_channels, self.patch_size = in_channels, patch_size
        self.vec_in_dim, self.context_in_dim = config.vec_in_dim, config.context_in_dim
        self.hidden_size, self.num_heads, self.mlp_ratio = hidden_size, num_heads, mlp_ratio
        self.depth, self.depth_single_blocks = config.depth, config.depth_single_blocks
        self.axes_dim, self.theta = axes_dim, config.theta
        self.model_max_length = config.model_max_length
        self.img_in = nn.Linear(in_channels, hidden_size)
        self.time_in = VectorEmbedder(self.CHANNELS, hidden_size)
        self.vector_in = VectorEmbedder(config.vec_in_dim, hidden_size)
        self.guidance_in = (
            VectorEmbedder(self.CHANNELS, hidden_size) if config.guidance_embed else None
        )
        packed = in_channels + patch_size**2
        self.cond_in = nn.Linear(packed, hidden_size) if config.cond_embed else None
        self.txt_in = nn.Linear(config.context_in_dim, hidden_size)
        widths = (hidden_size, num_heads, mlp_ratio)
        layout = (config.fused_qkv, config.use_liger_rope)
        self.double_blocks = nn.ModuleList(
            DoubleBlock(*widths, config.qkv_bias, *layout) for _ in range(config.depth)
        )
        self.single_blocks = nn.ModuleList(
            SingleBlock(*widths, *layout) for _ in range(config.depth_single_blocks)
        )
        self.final_layer = LastLayer(hidden_size, in_channels)
        if self.cond_in is not None:
            # Zero-initialized, so that a text-only model is unchanged until it has learned the
            # conditioning.
            nn.init.zeros_(self.cond_in.weight)
            nn.init.zeros_(self.cond_in.bias)

    def forward(
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        timesteps: Tensor,
        y_vec: Tensor,
        cond: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Predicts the velocity of packed latents.

        Args:
            img: noisy packed latents [B, N, in_channels].
            img_ids: frame, row and column of each latent token [B, N, 3].
            txt: text token vectors [B, L, context_in_dim].
            txt_ids: positions of the text tokens [B, L, 3]; zeros in the original training.
            timesteps: noise level of each clip [B], 0 (data) to 1 (noise).
            y_vec: text encoder's pooled vector [B, vec_in_dim].
            cond: packed mask and latents of the given frames, in this order, [B, N, patch_size^2 +
                in_channels]; requires cond_embed.
            guidance: guidance scale [B]; requires guidance_embed.

        Returns:
            [B, N, in_channels] in float32 (float64 for a float64 model).

        Raises:
            GulliverError: an input is missing, or shapes do not match.
        """
        self._check(img, img_ids, txt, txt_ids, y_vec, cond, guidance)
        dtype = self.img_in.weight.dtype
        video = self.img_in(img.to(dtype))
        if self.cond_in is not None and cond is not None:
            video = video + self.cond_in(cond.to(dtype))
        # Noise levels from 0 to 1 are embedded as 0 to 1000.
        vec = self.time_in(sinusoid(1000 * timesteps, self.CHANNELS, dtype))
        if self.guidance_in is not None and guidance is not None:
            vec = vec + self.guidance_in(sinusoid(1000 * guidance, self.CHANNELS, dtype))
        vec = vec + self.vector_in(y_vec.to(dtype))
        text = self.txt_in(txt.to(dtype))
        rotation = self._rotation(torch.cat([txt_ids, img_ids], dim=1), dtype)
        for block in self.double_blocks:
            video, text = block(video, text, vec, rotation)
        tokens = torch.cat([text, video], dim=1)
        for block in self.single_blocks:
            tokens = block(tokens, vec, rotation)
        return as_exact(self.final_layer(tokens[:, text.shape[1] :], vec))

    def _rotation(self, places: Tensor, dtype: torch.dtype) -> Rotation:
        """Returns cosine and sine for each token, [B, 1, L + N, head size / 2]."""
        exact = working_precision(dtype)
        turns = []
        for axis, size in enumerate(self.axes_dim):
            frequencies = rotary_frequencies(size, self.theta, exact, places.device)
            turns.append(rotation_of(places[..., axis], frequencies))
        cos, sin = (torch.cat(parts, dim=-1)[:, None] for parts in zip(*turns, strict=True))
        return cos, sin

    def _check(
        self,
        img: Tensor,
        img_ids: Tensor,
        txt: Tensor,
        txt_ids: Tensor,
        y_vec: Tensor,
        cond: Tensor | None,
        guidance: Tensor | None,
    ) -> None:
        count = len(img)
        wanted: dict[str, tuple[Tensor | None, tuple[int | None, ...]]] = {
            "img": (img, (count, None, self.in_channels)),
            "img_ids": (img_ids, (count, img.shape[1], 3)),
            "txt": (txt, (count, None, self.context_in_dim)),
            "txt_ids": (txt_ids, (count, txt.shape[1], 3)),
            "y_vec": (y_vec, (count, self.vec_in_dim)),
        }
        if self.cond_in is not None:
            wanted["cond"] = cond, (count, img.shape[1], self.cond_in.in_features)
        elif cond is not None:
            raise GulliverError("cond needs a model with cond_embed=True")
        if self.guidance_in is not None:
            wanted["guidance"] = guidance, (count,)
        elif guidance is not None:
            raise GulliverError("guidance needs a model with guidance_embed=True")
        for name, (value, shape) in wanted.items():
            sizes = () if value is None else tuple(value.shape)
            fits = len(sizes) == len(shape) and all(
                want in (None, size) for want, size in zip(shape, sizes, strict=True)
            )
            if not fits:
                told = ", ".join("N" if size is None else str(size) for size in shape)
                found = "missing" if value is None else f"of shape {sizes}"
                raise GulliverError(f"{name} is {found}; expected [{told}]")
        if txt.shape[1] > self.model_max_length:
            raise GulliverError(
                f"a caption of {txt.shape[1]} tokens exceeds "
                f"model_max_length={self.model_max_length}; truncate it, or build the model with a "
                "larger limit"
            )
