"""Mask strategies: which latent frames of a training clip are given, and which are to be made.

A model that is shown some frames without noise learns to make the others fit: pictures are set in
motion, clips continued, begun from their end, and filled in between. Masks are [T], True for the
frames to make, as the models' `x_mask`. What this does not know: how a given frame is shown, and
how the loss leaves it out (`_rectified_flow.py`).

Source: the strategies and names of Open-Sora 1.1 to 1.3 (https://arxiv.org/abs/2412.20404).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from gulliver.errors import GulliverError, nearest
from gulliver.options import SHARE
from gulliver.video._flow_config import FlowConfig

Draw = torch.Generator
Length = Callable[[int, Draw], int]
Strategy = Callable[[int, Draw], Tensor]
"""Function from a number of latent frames and a generator to those that are given: bool [T]."""


def _integer(least: int, most: int, draw: Draw) -> int:
    return int(torch.randint(least, most + 1, (), generator=draw))


def _one(frames: int, draw: Draw) -> int:
    return 1


def _two(frames: int, draw: Draw) -> int:
    return min(2, frames - 1)


def _quarter(frames: int, draw: Draw) -> int:
    """Draws a length of at most a quarter of the frames, and at least one of them."""
    return _integer(1, max(1, frames // 4), draw)


def _head(length: Length, frames: int, draw: Draw) -> Tensor:
    return torch.arange(frames) < length(frames, draw)


def _tail(length: Length, frames: int, draw: Draw) -> Tensor:
    return torch.arange(frames) >= frames - length(frames, draw)


def _head_tail(length: Length, frames: int, draw: Draw) -> Tensor:
    given = length(frames, draw)
    places = torch.arange(frames)
    return (places < given) | (places >= frames - given)


def _anywhere(length: Length, frames: int, draw: Draw) -> Tensor:
    given = length(frames, draw)
    start = _integer(0, frames - given, draw)
    places = torch.arange(frames)
    return (places >= start) & (places < start + given)


def _identity(frames: int, draw: Draw) -> Tensor:
    return torch.zeros(frames, dtype=torch.bool)


def _random(frames: int, draw: Draw) -> Tensor:
    """Gives each frame with a chance that is itself drawn, from 0.1 to 0.9."""
    chance = 0.1 + 0.8 * float(torch.rand((), generator=draw))
    return torch.rand(frames, generator=draw) <= chance


def _interpolate(frames: int, draw: Draw) -> Tensor:
    """Gives every second frame, from the first or the second."""
    return torch.arange(frames) % 2 == _integer(0, 1, draw)


STRATEGIES: dict[str, Strategy] = {
    "identity": _identity,
    **{
        f"{name}_{side}": partial(place, length)
        for name, length in (("quarter", _quarter), ("image", _one))
        for side, place in (
            ("random", _anywhere),
            ("head", _head),
            ("tail", _tail),
            ("head_tail", _head_tail),
        )
    },
    "random": _random,
    "interpolate": _interpolate,
    "extend": partial(_head, _two),
}
"""The public strategies, and `extend`, ours: the first two latent frames are given, the beginning
of a clip however short it is; a quarter of few frames is one, which is a picture."""
ALIASES = {"intepolate": "interpolate"}
"""Names as public configurations write them."""


@dataclass(frozen=True)
class MaskStrategies:
    """Mask strategies by name, each with its share of the clips; the others are made whole."""

    ratios: dict[str, float]

    @classmethod
    def of(cls, config: FlowConfig) -> Self:
        """Reads the strategies of a configuration."""
        if not config.masks:
            return cls(_checked({"image_head": config.mask_first, "extend": config.mask_head}))
        short = (config.mask_first, FlowConfig.mask_first), (config.mask_head, FlowConfig.mask_head)
        # At 0 they name no other strategy than the list does.
        if any(share not in (0, default) for share, default in short):
            raise GulliverError(
                "--flow.masks names every strategy: leave out --flow.mask-first and "
                "--flow.mask-head, which are image_head and extend"
            )
        ratios: dict[str, float] = {}
        for text in config.masks:
            name, ratio = _parsed(text)
            if name in ratios:
                raise GulliverError(f"--flow.masks: {name} is named twice")
            ratios[name] = ratio
        return cls(_checked(ratios))

    @property
    def share(self) -> float:
        """Share of the clips that have given frames."""
        return sum(ratio for name, ratio in self.ratios.items() if name != "identity")

    def draw(
        self,
        clips: int,
        frames: int,
        generator: torch.Generator,
        step: torch.Generator | None = None,
    ) -> Tensor | None:
        """Draws the masks [clips, frames] of a step; None where all of its clips are made whole."""
        # Masks cost a second modulation of every block: they come a whole step at a time, with the
        # chance that a clip has one, and each clip of the step draws its strategy.
        masked = float(torch.rand((), generator=step or generator)) < self.share
        if not masked or frames == 1:
            return None
        names = [name for name in self.ratios if name != "identity"]
        bounds = torch.tensor([self.ratios[name] for name in names]).cumsum(0)[:-1]
        places = torch.rand(clips, generator=generator) * self.share
        chosen = (places[:, None] >= bounds).sum(dim=1)
        return torch.stack(
            [_rest(STRATEGIES[names[number]](frames, generator)) for number in chosen.tolist()]
        )


def _rest(given: Tensor) -> Tensor:
    """Returns the frames to make; the last is one where all would be given."""
    made = ~given
    made[-1] |= not bool(made.any())
    return made


def _parsed(text: str) -> tuple[str, float]:
    name, colon, ratio = text.partition(":")
    name = ALIASES.get(name, name)
    if name not in STRATEGIES:
        raise GulliverError(f"--flow.masks: unknown strategy {name!r}: {nearest(name, STRATEGIES)}")
    try:
        share = float(ratio)
    except ValueError:
        share = math.nan
    if share not in SHARE:
        problem = f"its share is {ratio!r}" if colon else "it has no share"
        raise GulliverError(
            f"--flow.masks {text!r}: {problem}: write one {SHARE} after a colon, such as "
            f"{name}:0.05"
        )
    return name, share


def _checked(ratios: dict[str, float]) -> dict[str, float]:
    total = sum(ratios.values())
    if total > 1 + 1e-6:
        parts = " + ".join(f"{name}:{ratio:g}" for name, ratio in ratios.items())
        raise GulliverError(f"--flow.masks {parts} is {total:g}: it must be at most 1")
    return ratios
