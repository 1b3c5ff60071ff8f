"""Buffers that each rank changes by itself, where ranks run other samples each: they are told."""

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
    """Looks once in a run whether saved buffers that forwards have changed differ between ranks.

    Nothing is compared of buffers that no rank has changed, nor of those that are not saved, such
    as caches that each rank sizes for itself.

    To ask all ranks costs what is on its way between two steps its hiding place, so loaders that
    follow, such as one for each epoch, do not ask again.

    Args:
        model: model with the same buffers on all ranks.
        optimizer: optimizer of the ranks that run other samples each; every one of them makes one
            of these.
    """

    def __init__(self, model: nn.Module, optimizer: ZeroOptimizer) -> None:
        self._model, self._group, self._optimizer = model, optimizer.group, optimizer
        self._looked = group_size(self._group) == 1 or optimizer in _LOOKED
        self._before = {name: (b, b._version) for name, b in persistent_buffers(model).items()}

    def look(self) -> None:
        """Warns of buffers that differ, the first time that it is called; every rank calls it."""
        if self._looked:
            return
        self._looked, now = True, persistent_buffers(self._model)
        _LOOKED.add(self._optimizer)
        changed = [name for name, buffer in now.items() if self._is_changed(name, buffer)]
        self._before.clear()
        anywhere = {name for names in gather_objects(changed, self._group) for name in names}
        if not anywhere:
            return
        mine = {name: _digest(now[name]) for name in sorted(anywhere & now.keys())}
        found = gather_objects(mine, self._group)
        apart = [n for n in sorted(anywhere) if len({other.get(n) for other in found}) > 1]
        if apart and current_world().is_main:
            more = f" and {len(apart) - NAMED} more" if len(apart) > NAMED else ""
            warnings.warn(
                f"forwards have changed {', '.join(apart[:NAMED])}{more}, and ranks that run other "
                "samples have other values now: rank 0's are saved; a buffer that samples change "
                "is best kept outside of the model, or reduced after each step",
                stacklevel=3,
            )

    def _is_changed(self, name: str, buffer: Tensor) -> bool:
        seen, version = self._before.get(name, (None, -1))
        return buffer is not seen or buffer._version != version


def _digest(buffer: Tensor) -> bytes:
    """A digest of shape and content."""
    found = hashlib.blake2b(f"{tuple(buffer.shape)} {buffer.dtype}".encode(), digest_size=16)
    found.update(buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
