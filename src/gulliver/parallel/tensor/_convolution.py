"""Convolutions sharded by output (column) or input (row) channels.

A convolution is a linear map of its channels at each offset of the kernel, so it is cut as a linear
layer is (`_linear.py`): dim 0 of the weight are its outputs, dim 1 its inputs.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.comm import ALONE, RankGroup
from gulliver.layout import deal
from gulliver.parallel.tensor._base import OnLine
from gulliver.parallel.tensor._collectives import copy, gather, reduce, split

CONVOLUTIONS: dict[type[nn.Module], Any] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}


class _Convolution(OnLine):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        like: nn.Module,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        rank_group: RankGroup,
    ) -> None:
        super().__init__(rank_group)
        assert isinstance(like, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        self.weight = weight
        self.register_parameter("bias", bias)
        self.stride, self.padding, self.dilation = like.stride, like.padding, like.dilation
        self._convolve = CONVOLUTIONS[type(like)]

    def _apply_weight(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._convolve(x, self.weight, bias, self.stride, self.padding, self.dilation)

    @property
    def _channels(self) -> int:
        """Dim of channels, counted from the end because the batch dim is optional."""
        return 1 - self.weight.dim()


class ColumnConvolution(_Convolution):
    """A convolution of which this rank holds some output channels."""

    def __init__(
        self,
        like: nn.Module,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        rank_group: RankGroup = ALONE,
        gather_output: bool = False,
    ) -> None:
        super().__init__(like, weight, bias, rank_group)
        self.total, self.gather_output = int(like.out_channels), gather_output  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        """Returns some or all output channels of an input that is whole on all ranks."""
        y = self._apply_weight(copy(x, self.rank_group), self.bias)
        if not self.gather_output:
            return y
        return gather(y, self._channels, deal(self.total, self.rank_group.size), self.rank_group)


class RowConvolution(_Convolution):
    """A convolution of which this rank holds some input channels."""

    def __init__(
        self,
        like: nn.Module,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        rank_group: RankGroup = ALONE,
        split_input: bool = False,
    ) -> None:
        super().__init__(like, weight, bias, rank_group)
        self.total, self.split_input = int(like.in_channels), split_input  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        """Returns all output channels, the same on all ranks, from this rank's input channels."""
        if self.split_input:
            x = split(x, self._channels, deal(self.total, self.rank_group.size), self.rank_group)
        y = reduce(self._apply_weight(x, None), self.rank_group)
        if self.bias is None:
            return y
        return y + self.bias.view(-1, *[1] * (self.weight.dim() - 2))
