"""Small public autoencoders in float64, and their clips, for several tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gulliver.models import CausalAutoencoder, FrameAutoencoder, PipelineAutoencoder

FRAMES: dict[str, Any] = {
    "block_out_channels": (4, 8), "layers_per_block": 1, "norm_num_groups": 2,
}  # fmt: skip
TIME: dict[str, Any] = {
    "filters": 4, "channel_multipliers": (1, 2, 2), "num_res_blocks": 1,
    "temporal_downsample": (True, True), "num_groups": 2,
}  # fmt: skip
CAUSAL: dict[str, Any] = {
    "latent_channels": 4, "channels": 4, "channel_multipliers": (1, 2, 2), "num_res_blocks": 1,
    "num_groups": 2, "normalization": None,
}  # fmt: skip


def make(name: str) -> Any:
    """Returns an autoencoder: its kind, and ``whole`` for one without the quirks."""
    kind, *how = name.split()
    torch.manual_seed(0)
    compat = () if how else None
    made: Any = {
        "frames": lambda: FrameAutoencoder(**FRAMES, shift_factor=0.5),
        "pipeline": lambda: PipelineAutoencoder(spatial=FRAMES, temporal=TIME, compat=compat),
        "causal": lambda: CausalAutoencoder(**CAUSAL, compat=compat),
    }[kind]()
    return made.double()


NAMES = ("frames", "pipeline", "pipeline whole", "causal", "causal whole")


def clip(name: str, frames: int, batch: int = 1) -> Tensor:
    """Returns a clip that fits the autoencoder, of uneven sides."""
    torch.manual_seed(1)
    side = 8 if name.startswith("causal") else 6
    return torch.randn(batch, 3, frames, 8, side + 4).double()
