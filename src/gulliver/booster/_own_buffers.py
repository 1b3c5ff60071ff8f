"""Warns of buffers that forwards change differently on each rank."""

from __future__ import annotations

import hashlib
import warnings
from weakref import WeakSet

import torch
from torch import Tensor, nn

from gulliver.comm import current_world, gather_objects
from gulliver.parallel import ZeroOptimizer, persistent_buffers

NAMED = 3
# Optimizers of models whose buffers were compared.
_COMPARED = WeakSet[ZeroOptimizer]()


def warn_of_own_buffers(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """Warns once of saved buffers that differ between ranks; every rank calls it after a step."""
    # Once in a run, and not for each epoch's loader: a gather between two steps cannot overlap.
    if optimizer.size == 1 or optimizer in _COMPARED:
        return
    _COMPARED.add(optimizer)
    # Contents are compared, because not every write raises a tensor's version.
    mine = {name: _digest(buffer) for name, buffer in persistent_buffers(model).items()}
    found = gather_objects(mine, optimizer.group)
    names = sorted({name for other in found for name in other})
    apart = [n for n in names if len({other.get(n) for other in found}) > 1]
    if apart and current_world().is_main:
        more = f" and {len(apart) - NAMED} more" if len(apart) > NAMED else ""
        warnings.warn(
            f"forwards have changed {', '.join(apart[:NAMED])}{more}, and ranks that run other "
            "samples have other values now: rank 0's are saved; a buffer that samples change "
            "is best kept outside of the model, or reduced after each step",
            stacklevel=3,
        )


def _digest(buffer: Tensor) -> bytes:
    found = hashlib.blake2b(f"{tuple(buffer.shape)} {buffer.dtype}".encode(), digest_size=16)
    found.update(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
