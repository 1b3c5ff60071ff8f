"""A run of the elements of a tensor, of which the rest lies with other ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Part:
    """Elements `start` to `stop` of a whole tensor, counted in row-major order.

    Args:
        value: the elements; contiguous.
        shape: of the whole tensor.
        start: of the first element.
        owner: whose version counter tells of writes to the elements; None where the writer asks
            `before_write` first.
    """

    value: Tensor
    shape: tuple[int, ...]
    start: int = 0
    owner: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.value.is_contiguous(), "a part is contiguous"
        assert self.start >= 0, "a part lies in its whole"
        assert self.stop <= math.prod(self.shape), "a part lies in its whole"

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.value.numel()

    @property
    def is_whole(self) -> bool:
        """Whether there is no other part."""
        return self.value.numel() == math.prod(self.shape)
