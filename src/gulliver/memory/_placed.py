"""Objects of the memory manager: bytes of a fixed size that come and go."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Placed:
    """Bytes that a `Manager` keeps in the fast tier or behind it.

    Attributes:
        name: name in messages and pictures.
        kind: kind of state, as the byte counter knows it.
        numel: number of elements.
        dtype: dtype of the elements.
        nbytes: size in bytes.
        tensor: flat tensor of `dtype` while the object is in the fast tier, else None. Its memory
            moves between visits: views are made anew after each `Manager.use`.
        number: number among the manager's objects.
        offset: place in the store that has its content; None where the store has not.
        shown: addresses at which this place has been shown; a checkpoint may be copying from there.
    """

    name: str
    kind: str
    numel: int
    dtype: torch.dtype
    tensor: Tensor | None = None
    number: int = -1
    offset: int | None = field(default=None, repr=False)
    shown: set[int] = field(default_factory=set, repr=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize
