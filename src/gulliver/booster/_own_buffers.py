"""Warns of buffers that forwards change differently on each rank."""

from __future__ import annotations

import hashlib
import warnings
from weakref import WeakSet

import torch
from torch import Tensor, nn

from gulliver.comm import current_world, gather_objects, group_size
from gulliver.parallel import ZeroOptimizer, persistent_buffers

NAMED = 3
_LOOKED = WeakSet[ZeroOptimizer]()
"""Optimizers whose model was looked at."""


class OwnBuffers:
    """Compares once in a run whether saved buffers differ between ranks."""

    # Nothing is compared of buffers that are not saved, such as caches that each rank sizes for
    # itself. Contents are compared, because not every write raises a tensor's version.
    #
    # To ask all ranks costs what is on its way between two steps its hiding place, so loaders that
    # follow, such as one for each epoch, do not ask again.

    def __init__(self, model: nn.Module, optimizer: ZeroOptimizer) -> None:
        self._model, self._group, self._optimizer = model, optimizer.group, optimizer
        self._looked = group_size(self._group) == 1 or optimizer in _LOOKED

    def look(self) -> None:
        """Warns of buffers that differ, on the first call; every rank calls it."""
        if self._looked:
            return
        self._looked = True
        _LOOKED.add(self._optimizer)
        mine = {name: _digest(buffer) for name, buffer in persistent_buffers(self._model).items()}
        found = gather_objects(mine, self._group)
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
    """A digest of shape and content."""
    found = hashlib.blake2b(f"{tuple(buffer.shape)} {buffer.dtype}".encode(), digest_size=16)
    found.update(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
