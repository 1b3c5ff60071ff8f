"""A UNet of Stable Diffusion's layout, for where diffusers is not installed.

Four levels, two residual blocks each on the way down and three on the way up, each followed by a
transformer block but on the innermost level; a middle of two and one; shortcuts from level to
level. Times and captions enter as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, GROUPS, FACTORS = 8, 32, (1, 2, 4, 4)


class Attention(nn.Module):
    """Attention of tokens to themselves, or to a context; `explicit` makes scores a tensor."""

    def __init__(self, width: int, context: int, explicit: bool) -> None:
        super().__init__()
        self.explicit = explicit
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(context, 2 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """``[B, T, width]`` to the same."""
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(context).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.explicit:
            mixed = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Attention within an image, to its caption, and a gated MLP."""

    def __init__(self, width: int, context: int, explicit: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.within = Attention(width, width, explicit)
        self.across = Attention(width, context, explicit)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, caption: Tensor) -> Tensor:
        """``[B, C, H, W]`` to the same."""
        y = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        first, second, third = self.norms
        y = y + self.within(normed := first(y), normed)
        y = y + self.across(second(y), caption)
        value, gate = self.up(third(y)).chunk(2, -1)
        y = y + self.down(value * F.gelu(gate))
        return x + self.leave(y.transpose(1, 2).unflatten(-1, x.shape[2:]))


class Residual(nn.Module):
    """Two convolutions around the time, and a shortcut."""

    def __init__(self, entering: int, width: int, times: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(GROUPS, entering), nn.GroupNorm(GROUPS, width)
        self.conv1 = nn.Conv2d(entering, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(times, width)
        self.short = nn.Conv2d(entering, width, 1) if entering != width else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """``[B, C, H, W]`` to the same of its width."""
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.short(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(nn.Module):
    """Predicts the noise on latents.

    Args:
        width: channels of the outermost level; a multiple of 32.
        explicit: whether scores of attention are made as tensors.
    """

    def __init__(self, width: int, explicit: bool = False) -> None:
        super().__init__()
        self.width, times, context = width, 4 * width, 4 * width
        widths = [width * factor for factor in FACTORS]
        inner = len(widths) - 1

        def transformers(level: int, count: int) -> nn.ModuleList:
            many = 0 if level == inner else count
            return nn.ModuleList(Transformer(widths[level], context, explicit) for _ in range(many))

        self.time = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.enter = nn.Conv2d(4, width, 3, padding=1)
        self.leave = nn.Conv2d(width, 4, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, width)
        self.down, self.down_mixing = nn.ModuleList(), nn.ModuleList()
        self.smaller, self.larger = nn.ModuleList(), nn.ModuleList()
        self.up, self.up_mixing = nn.ModuleList(), nn.ModuleList()
        kept, now = [width], width
        for level, wide in enumerate(widths):
            entering = [now, wide]
            self.down.append(nn.ModuleList(Residual(e, wide, times) for e in entering))
            self.down_mixing.append(transformers(level, 2))
            kept, now = [*kept, wide, wide], wide
            if level < inner:
                self.smaller.append(nn.Conv2d(wide, wide, 3, stride=2, padding=1))
                kept.append(wide)
        self.middle = nn.ModuleList(Residual(now, now, times) for _ in range(2))
        self.middle_mixing = Transformer(now, context, explicit)
        for level in reversed(range(len(widths))):
            blocks = nn.ModuleList()
            for _ in range(3):
                blocks.append(Residual(now + kept.pop(), widths[level], times))
                now = widths[level]
            self.up.append(blocks)
            self.up_mixing.append(transformers(level, 3))
            if level:
                self.larger.append(nn.Conv2d(now, now, 3, padding=1))

    def forward(self, x: Tensor, times: Tensor, caption: Tensor) -> SimpleNamespace:
        """The noise as ``sample``, of latents ``[B, 4, H, W]``, as diffusers says it."""
        half = self.width // 2
        steps = torch.exp(-math.log(1e4) * torch.arange(half, device=x.device) / half)
        angles = times[:, None] * steps
        time = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        x = self.enter(x)
        kept = [x]
        for level, blocks in enumerate(self.down):
            kept += _through(x, blocks, self.down_mixing[level], time, caption)
            x = kept[-1]
            if level < len(self.smaller):
                x = self.smaller[level](x)
                kept.append(x)
        x = self.middle[0](x, time)
        x = self.middle[1](self.middle_mixing(x, caption), time)
        for level, blocks in enumerate(self.up):
            *_, x = _through(x, blocks, self.up_mixing[level], time, caption, kept.pop)
            if level < len(self.larger):
                x = self.larger[level](F.interpolate(x, scale_factor=2.0))
        return SimpleNamespace(sample=self.leave(F.silu(self.norm(x))))


def _through(
    x: Tensor,
    blocks: nn.Module,
    mixing: nn.Module,
    time: Tensor,
    caption: Tensor,
    beside: Callable[[], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Goes through a level; yields what each of its pairs of blocks gives."""
    mixed = list(mixing.children())
    for number, block in enumerate(blocks.children()):
        x = block(x if beside is None else torch.cat((x, beside()), 1), time)
        x = mixed[number](x, caption) if mixed else x
        yield x
