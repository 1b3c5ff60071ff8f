"""Buffers of optimizer state: what an optimizer keeps of one kind for the parameters of a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

ALIGN = 16
"""Elements: each tensor begins on a multiple of so many, as in a chunk's layout."""


def moment_size(sizes: Iterable[int]) -> int:
    """Elements of a buffer with room for parameters of these sizes."""
    return sum(-(-numel // ALIGN) * ALIGN for numel in sizes)


def first_elements(sizes: Mapping[str, int]) -> dict[str, int]:
    """First elements in a buffer with room for parameters of these sizes, in their order."""
    starts, end = dict[str, int](), 0
    for name, numel in sizes.items():
        starts[name] = end
        end += moment_size([numel])
    return starts


@dataclass(eq=False)
class Moment:
    """A flat buffer of state, and where in it the state of which parameter begins."""

    # Flat tensor; on meta while its bytes are elsewhere.
    buffer: Tensor
    starts: Mapping[str, int]

    def filled(self, name: str, value: Tensor) -> Tensor:
        """A parameter's run of the buffer, with the elements of `value`."""
        start = self.starts[name]
        run = self.buffer[start : start + value.numel()]
        if run.data_ptr() != value.data_ptr() and not value.is_meta:
            run.view(value.shape).copy_(value)
        return run
