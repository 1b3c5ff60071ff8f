"""Wire formats: how the elements of a tensor travel between ranks.

Every collective, exchange and message takes one. There is one so far, the elements as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gulliver.errors import GulliverError, nearest


@dataclass(frozen=True)
class WireFormat:
    """A wire format.

    Attributes:
        name: what it is called.
    """

    name: str

    def __str__(self) -> str:
        return self.name


IDENTITY = WireFormat("identity")
"""The elements as they are."""
FORMATS = {IDENTITY.name: IDENTITY}


def check_wire(wire: WireFormat) -> None:
    """Refuses formats that nobody has written.

    Raises:
        GulliverError: the format is not known.
    """
    if FORMATS.get(str(wire)) is not wire:
        raise GulliverError(f"unknown wire format {str(wire)!r}: {nearest(str(wire), FORMATS)}")


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as the bytes that travel: backends do not know every dtype."""
    assert tensor.is_contiguous(), "gloo would read the storage from its start"
    return tensor.detach().view(-1).view(torch.uint8)
