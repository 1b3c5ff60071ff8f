"""Pinned host memory behind the memory of a GPU, with copies on streams of their own."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.memory._stores import Middle, Transfer, whole_pages
from gulliver.memory._streams import Copier, CudaCopier
from gulliver.solve import Extents

if TYPE_CHECKING:
    from gulliver.memory._placed import ManagedTensor

SLAB = 1 << 30
"""Bytes of a slab of pinned memory, where objects are not larger."""


class HostStore:
    """Space in slabs of pinned host memory."""

    # Pinned memory is taken in powers of two, whatever is asked for. So slabs are powers of two,
    # and objects share them: nothing is lost to rounding but the end of the last slabs.

    name = "host"
    in_stream = True
    middle = Middle()

    def __init__(
        self, capacity: int, device: torch.device | str = "cuda", copier: Copier | None = None
    ) -> None:
        if copier is None and torch.device(device).type != "cuda":
            raise GulliverError(
                f"pinned host memory serves a GPU, not {device}: on a CPU machine the tier behind "
                "the process's memory is a disk"
            )
        self.capacity, self.used, self.pinned = capacity, 0, 0
        self._copier: Copier = copier or CudaCopier(torch.device(device))
        self._slabs: list[Tensor] = []
        self._starts: list[int] = []
        self._extents = Extents()

    def allocate(self, nbytes: int, owner: ManagedTensor | None = None) -> int:
        """Reserves whole pages and returns their offset."""
        size = whole_pages(nbytes)
        found = self._extents.take(size)
        if found is None:
            self._add_slab(size)
            found = self._extents.take(size)
        assert found is not None
        self.used += size
        return self._starts[found[0]] + found[1]

    def free(self, offset: int, nbytes: int) -> None:
        """Gives back what `allocate` reserved; the memory stays pinned."""
        slab, begin = self._place(offset)
        self._extents.give(slab, begin, whole_pages(nbytes))
        self.used -= whole_pages(nbytes)

    def read(self, offset: int, into: Tensor) -> Transfer:
        """Starts to copy to the device."""
        return self._copier.copy(into, self._bytes(offset, into.numel()), incoming=True)

    def write(self, offset: int, data: Tensor) -> Transfer:
        """Starts to copy from the device."""
        return self._copier.copy(self._bytes(offset, data.numel()), data, incoming=False)

    def mapped(self, offset: int, nbytes: int, write: bool = False) -> Tensor:
        """Shows bytes as a flat uint8 tensor of pinned memory."""
        self._copier.synchronize()
        return self._bytes(offset, nbytes)

    def close(self) -> None:
        """Waits for transfers in flight, and frees everything."""
        self._copier.synchronize()
        self._slabs.clear()

    def _add_slab(self, size: int) -> None:
        left = self.capacity - self.pinned
        least = 1 << (size - 1).bit_length()
        if least > left:
            raise GulliverError(
                f"the host memory of {self.capacity} bytes is full: pinned memory comes in powers "
                f"of two, {least} bytes are needed and {left} are left: give it more"
            )
        slab = max(least, min(SLAB, 1 << (left.bit_length() - 1)))
        self._extents.add(len(self._slabs), slab)
        self._starts.append(self.pinned)
        self._slabs.append(self._copier.pinned(slab))
        self.pinned += slab

    def _place(self, offset: int) -> tuple[int, int]:
        slab = bisect_right(self._starts, offset) - 1
        return slab, offset - self._starts[slab]

    def _bytes(self, offset: int, nbytes: int) -> Tensor:
        slab, begin = self._place(offset)
        return self._slabs[slab][begin : begin + nbytes]
