"""Timestep warps: how much more the high noise levels count for larger and longer clips.

More pixels and more frames tell the same thing more often, so that a clip is still readable under
noise that would hide a small one. Every warp multiplies the odds t / (1 - t) of a level by a ratio;
the published ones differ in how they take it from the size of a clip.

Sources: https://arxiv.org/abs/2403.03206 (resolution), https://arxiv.org/abs/2412.20404 (length).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from gulliver.errors import GulliverError


@dataclass(frozen=True)
class ClipSize:
    """Size of a clip: height and width in pixels, and frames of its latents."""

    # `token_area` are the pixels under one token of a frame, `base_area` those of a still whose
    # ratio is 1.

    height: float
    width: float
    latent_frames: int
    token_area: float = 256.0
    base_area: float = 512.0 * 512.0

    @property
    def side_ratio(self) -> float:
        """Side of a square of the clip's area, over that of the base."""
        return math.sqrt(self.height * self.width / self.base_area)


def _by_latent_frames(size: ClipSize) -> float:
    return size.side_ratio * math.sqrt(size.latent_frames)


def _by_whole_pieces(size: ClipSize) -> float:
    """1.2 counts the frames // 17 * 5: latents of whole pieces of its autoencoder."""
    frames = 1 if size.latent_frames == 1 else size.latent_frames // 5 * 5
    if frames == 0:
        raise GulliverError(
            f"the timestep warp of 1.2 counts latent frames in fives, a clip of "
            f"{size.latent_frames} has none: take longer clips, or another --flow.shift-rule"
        )
    return size.side_ratio * math.sqrt(frames)


def _by_frames_after_the_first(size: ClipSize) -> float:
    """1.3 counts (frames - 1) // 4: the latents without the first."""
    return size.side_ratio * math.sqrt(max(1, size.latent_frames - 1))


def _by_tokens(size: ClipSize) -> float:
    """2.0 goes straight from 1 at 256 tokens of a frame to 3 at 4096."""
    tokens = size.height * size.width / size.token_area
    return (1 + (tokens - 256) * 2 / (4096 - 256)) * math.sqrt(size.latent_frames)


RULES: dict[str, Callable[[ClipSize], float]] = {
    "latent": _by_latent_frames,
    "1.2": _by_whole_pieces,
    "1.3": _by_frames_after_the_first,
    "2.0": _by_tokens,
}
"""Ratios by name: ours, and those of Open-Sora's versions."""
