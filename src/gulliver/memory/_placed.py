"""Objects of the memory manager: bytes of a fixed size that come and go."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from gulliver.memory._stores import Transfer, whole_pages


class Residency(Enum):
    """Where an object of the manager is between the fast tier and the store."""

    AWAY = auto()
    """No memory is held: the content lies in the store, or there is none."""
    QUEUED = auto()
    """The object is wanted, and waits for memory."""
    ARRIVING = auto()
    """Memory is held, and the content is being read into it."""
    HERE = auto()
    """The content is in the fast tier."""
    LEAVING = auto()
    """The content is being written; the memory is held until that has ended."""


LEGAL_RESIDENCY = (
    (Residency.AWAY, Residency.QUEUED),
    (Residency.QUEUED, Residency.ARRIVING),  # there is memory: the read begins
    (Residency.QUEUED, Residency.HERE),  # there is nothing to read
    (Residency.QUEUED, Residency.AWAY),  # no longer wanted
    (Residency.ARRIVING, Residency.HERE),
    (Residency.ARRIVING, Residency.AWAY),  # the read failed
    (Residency.HERE, Residency.LEAVING),
    (Residency.HERE, Residency.AWAY),  # the store has its content, or nobody needs it
    (Residency.LEAVING, Residency.AWAY),
    (Residency.LEAVING, Residency.HERE),  # it could not be written, and there is room for it
)
RESIDENT = (Residency.ARRIVING, Residency.HERE, Residency.LEAVING)
"""Where an object has memory of the fast tier."""


@dataclass(eq=False)
class ManagedTensor:
    """Bytes that a `Manager` keeps in the fast tier or behind it."""

    name: str
    kind: str
    numel: int
    dtype: torch.dtype
    # Flat tensor of `dtype` while the object is in the fast tier, else None. Its memory moves
    # between visits: make new views after each `Manager.use`.
    tensor: Tensor | None = None
    number: int = -1
    # Whether its content is discarded before long.
    brief: bool = False
    residency: Residency = Residency.AWAY
    # Whole pages of the fast tier that it holds.
    memory: Tensor | None = field(default=None, repr=False)
    # Offset of its content in the store; None where the store has not got it.
    offset: int | None = field(default=None, repr=False)
    # Addresses at which this place has been shown; a checkpoint may be copying from there.
    shown: set[int] = field(default_factory=set, repr=False)
    transfer: Transfer | None = field(default=None, repr=False)
    # Whether there is something to read when it comes.
    reads: bool = field(default=False, repr=False)
    # Whether its memory is filled with zeros when it comes.
    zero: bool = field(default=False, repr=False)
    # Whether others may still read its memory, which serves nobody else until they end.
    viewed: bool = field(default=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Bytes of the whole pages that hold it."""
        return whole_pages(self.nbytes)

    @property
    def kept(self) -> int:
        """Bytes that there must be room for, in one tier or the other, at any time."""
        return 0 if self.brief else self.size

    @property
    def done(self) -> bool:
        """Whether no transfer is in flight."""
        return self.transfer is None or self.transfer.done

    def enter(self, residency: Residency) -> None:
        """Changes where it is."""
        assert (self.residency, residency) in LEGAL_RESIDENCY, (
            f"{self.name}: {self.residency} -> {residency}"
        )
        self.residency, self.tensor = residency, None
        if residency is Residency.HERE:
            assert self.memory is not None
            self.tensor = typed(self.memory, self.nbytes, self.dtype)


def typed(memory: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
    """Shows the first bytes of memory as a flat tensor of a dtype."""
    # In inference mode a view of another dtype would be an inference tensor, which a training that
    # comes later could not save for backward.
    with torch.inference_mode(False):
        return memory[:nbytes].view(dtype)
