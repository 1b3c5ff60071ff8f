"""Counts the bytes of tensors that are alive at once, whatever allocates them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from gulliver._compat import DispatchMode


class LiveBytes(DispatchMode):
    """Counts storages that operations make, from their making until nobody holds them.

    Attributes:
        live: bytes alive now.
        peak: most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
