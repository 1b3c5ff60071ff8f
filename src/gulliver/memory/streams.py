"""CUDA streams, events and page-locked memory of the package."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.memory.stores import Transfer


# [Note: order of copies] A copy waits for what the current stream was given before it, and the
# current stream waits for a copy before it continues with the memory: both are queued on the
# device. So the host never waits, and still no memory is written while it is read.
class Copy(Transfer, Protocol):
    """A copy between the memory of a device and of its host."""

    def synchronize(self) -> None:
        """Returns when it has ended."""
        ...


class Copier(Protocol):
    """Copies between the memory of a device and of its host."""

    def pinned(self, nbytes: int) -> Tensor:
        """Allocates a flat uint8 tensor of pinned host memory."""
        ...

    def lock_pages(self, memory: Tensor) -> None:
        """Locks the pages of host memory."""
        ...

    def unlock_pages(self, memory: Tensor) -> None: ...

    def mark(self) -> Any:
        """Records the point in the device's work after which a later copy may start."""
        ...

    def copy(self, target: Tensor, source: Tensor, incoming: bool, after: Any = None) -> Copy:
        """Starts a copy: incoming to the device, or out of it."""
        ...

    def synchronize(self) -> None:
        """Waits for all copies out of the device."""
        ...


def cuda_runtime() -> Any:
    """The CUDA runtime library that torch has loaded."""
    return torch.cuda.cudart()


class CudaTransfer:
    """A copy on a stream; waiting for it is queued on the current stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    @property
    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        """Makes later work of the current stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Returns when it has ended."""
        self._event.synchronize()


class CudaCopier:
    """Copies on one stream per direction, as the bus carries both at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outgoing, self._incoming = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def pinned(self, nbytes: int) -> Tensor:
        """Makes a flat uint8 tensor of pinned host memory."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def lock_pages(self, memory: Tensor) -> None:
        """Page-locks host memory."""
        # `pinned` takes powers of two.
        if cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.numel(), 0) != 0:
            raise GulliverError(
                f"cannot page-lock {memory.numel()} more bytes of host memory: use a smaller "
                "host_limit, or raise ulimit -l"
            )

    def unlock_pages(self, memory: Tensor) -> None:
        cuda_runtime().cudaHostUnregister(memory.data_ptr())

    def mark(self) -> torch.cuda.Event:
        """Notes the place in the current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(
        self, target: Tensor, source: Tensor, incoming: bool, after: Any = None
    ) -> CudaTransfer:
        """Starts a copy after the current stream's work, or after a recorded point."""
        # Nothing here keeps source and target alive. Host memory belongs to a store. Device memory
        # is held by its owner until `CudaTransfer.wait`, which queues the wait on the current
        # stream: when the caching allocator gives the memory out again there, the copy has ended.
        stream = self._incoming if incoming else self._outgoing
        stream.wait_event(self.mark() if after is None else after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return CudaTransfer(event, self._device)

    def synchronize(self) -> None:
        """Waits for all copies out of the device."""
        self._outgoing.synchronize()
