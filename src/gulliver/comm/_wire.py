"""Wire formats: how the elements of a tensor travel between ranks.

Every collective, exchange and message takes one. What they are, and how elements are packed, is
in `gulliver.precision.wire`; how packed elements are reduced and gathered is in `_packed.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gulliver.comm._flight_recorder import Purpose
from gulliver.precision.wire import IDENTITY, WireFormat, wire_format


def check_wire(wire: WireFormat) -> None:
    """Refuses unknown wire formats."""
    if wire is not IDENTITY:
        wire_format(wire)


def with_wire(purpose: Purpose, wire: WireFormat) -> Purpose:
    """Adds the format to a purpose: messages of ranks that disagree about it never match."""
    if wire.name == "identity":
        return purpose
    text = f"{purpose.text or 'shares a tensor'}, packed as {wire.name} in {wire.block}s"
    return replace(purpose, text=text, wire=wire.code)


def as_bytes(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor as bytes, since backends do not support every dtype."""
    assert tensor.is_contiguous(), "gloo would read the storage from its start"
    return tensor.detach().view(-1).view(torch.uint8)
