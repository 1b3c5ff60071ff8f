"""Layers of causal video autoencoders: zeros stand before the first frame."""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


class CausalConv(nn.Module):
    """A 3-D convolution that sees the present and earlier frames."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 3,
        stride: tuple[int, int, int] = (1, 1, 1),
        before: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.before = kernel - 1 if before is None else before
        around = (0, kernel // 2, kernel // 2)
        self.conv = nn.Conv3d(inputs, outputs, kernel, stride, around, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Convolves ``[B, C, T, H, W]``."""
        return self.conv(F.pad(x, (0, 0, 0, 0, self.before, 0)) if self.before else x)


class CausalResidual(nn.Module):
    """Norm, SiLU, convolution, twice, and a shortcut."""

    def __init__(
        self, inputs: int, outputs: int, groups: int, eps: float, bias: bool, shortcut: str
    ) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inputs, eps)
        self.conv1 = CausalConv(inputs, outputs, bias=bias)
        self.norm2 = nn.GroupNorm(groups, outputs, eps)
        self.conv2 = CausalConv(outputs, outputs, bias=bias)
        self.shortcut = shortcut
        if inputs != outputs:
            self.add_module(shortcut, CausalConv(inputs, outputs, 1, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        """Adds the convolutions' output."""
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        shortcut = getattr(self, self.shortcut, None)
        return h + (x if shortcut is None else shortcut(x))


def residuals(
    inputs: int, outputs: int, count: int, groups: int, eps: float, bias: bool, shortcut: str
) -> nn.ModuleList:
    """Returns residual blocks, the first of which changes the channels."""
    widths = [inputs] + [outputs] * count
    return nn.ModuleList(
        CausalResidual(a, b, groups, eps, bias, shortcut) for a, b in pairwise(widths)
    )


def through(blocks: nn.Module, x: Tensor) -> Tensor:
    """Calls modules one after the other; of a list its modules, too."""
    for block in blocks.children():
        x = through(block, x) if isinstance(block, nn.ModuleList) else block(x)
    return x
