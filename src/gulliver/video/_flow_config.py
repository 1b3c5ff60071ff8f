"""`FlowConfig`: the options of rectified flow. Imports no torch: `--help` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from gulliver.options import SHARE, Options, Range


@dataclass(frozen=True)
class FlowConfig(Options):
    """Rectified flow: how noise and data are mixed in training."""

    timesteps: Literal["uniform", "logit-normal"] = "logit-normal"
    """Law of the noise level."""
    shift: Annotated[float, Range(0, 1000, open_below=True)] = 3.0
    """Factor of the noise level's odds; more than 1 trains more at high noise."""
    shift_by_size: bool = False
    """Multiply the odds by a ratio of the clip's size too."""
    shift_rule: Literal["latent", "1.2", "1.3", "2.0"] = "latent"
    """Ratio of a size: roots of the area over 512x512 and the latent frames, or as published."""
    drop_caption: Annotated[float, SHARE] = 0.1
    """Share of captions hidden, for classifier-free guidance."""
    masks: tuple[str, ...] = ()
    """Mask strategies as name:share, such as image_head:0.2 quarter_tail:0.05 random:0.1."""
    mask_first: Annotated[float, SHARE] = 0.15
    """Share of clips whose first latent frame is given; short for --flow.masks image_head."""
    mask_head: Annotated[float, SHARE] = 0.1
    """Share of clips whose first two are given; short for --flow.masks extend."""
