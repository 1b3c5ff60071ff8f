"""Host memory for offloaded tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor


class SavedTensorStore:
    """Copies tensors to the host asynchronously, and back on demand."""

    # On a GPU copies go through page-locked memory on their own stream. On a CPU a thread copies to
    # numpy memory, since only torch's allocations count against the budget.

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1) if device.type == "cpu" else None
        self.moved = 0

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Offloads the memory of a tensor; returns a function that fetches it."""
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        flat.set_(tensor.untyped_storage())
        self.moved += flat.nbytes
        return self._on_host(flat) if self._thread is not None else self._page_locked(flat)

    def _on_host(self, flat: Tensor) -> Callable[[], Tensor]:
        assert self._thread is not None, "copies run in a thread"
        whole = flat.view(torch.uint8)
        writing = self._thread.submit(lambda: np.array(whole.numpy(), copy=True))
        form = flat.shape, flat.dtype
        del flat

        def fetch() -> Tensor:
            found = torch.empty(form[0], dtype=form[1])
            found.view(torch.uint8).copy_(torch.from_numpy(writing.result()))
            return found

        return fetch

    def _page_locked(self, flat: Tensor) -> Callable[[], Tensor]:
        stream = self._stream
        assert stream is not None, "copies have a stream"
        away = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            away.copy_(flat, non_blocking=True)
        flat.record_stream(stream)

        def fetch() -> Tensor:
            torch.cuda.current_stream(self._device).wait_stream(stream)
            return away.to(self._device, non_blocking=True)

        return fetch
