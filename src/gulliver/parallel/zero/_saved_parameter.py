"""What autograd keeps of a parameter whose memory may be given back meanwhile."""

from __future__ import annotations

from typing import Any

from torch import nn


class SavedParameter:
    """A parameter, or a view of one, as autograd keeps it."""

    __slots__ = ("offset", "parameter", "size", "step", "stride")

    def __init__(self, parameter: nn.Parameter, step: int, size: Any, stride: Any, offset: int):
        self.parameter, self.step = parameter, step
        self.size, self.stride, self.offset = size, stride, offset
