"""Copies from a device into the engine's pages, on a copy stream.

The copy stream begins after what had been queued when the snapshot was taken. Whoever is about to
change a source makes its own stream wait for the copy; no thread waits for the device, but the one
that calls `pump`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.io import Engine, File, Page, Ticket


# [Note: page-locked memory] CUDA copies into pageable memory while the caller waits. So the pool is
# page-locked, once: every save uses it again.
class CopyStream:
    """Copy stream between a device and the host; copies run in the order of the calls."""

    # This base class serves host memory, where every copy has ended when the call returns.

    def prepare(self, regions: Iterable[tuple[int, int]]) -> None:
        """Makes the pool's memory fit for copies that do not wait."""

    def begin(self) -> None:
        """Orders the copies to come after the work that the caller has queued so far."""

    def queue(self) -> AbstractContextManager[Any]:
        """Returns the context in which copies are asked for."""
        return nullcontext()

    def mark(self) -> Any:
        """Returns an event after the copies asked for so far."""
        return None

    def order(self, event: Any) -> None:
        """Makes the work that the caller queues next wait for an event."""

    def wait(self, event: Any) -> None:
        """Blocks the calling thread until an event has happened."""


class CudaCopyStream(CopyStream):
    """Copy stream of CUDA, into host memory that is page-locked for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._locked: set[int] = set()

    def prepare(self, regions: Iterable[tuple[int, int]]) -> None:
        """Page-locks the pool, each region once."""
        for address, nbytes in regions:
            if address in self._locked:
                continue
            runtime: Any = torch.cuda.cudart()
            code = runtime.cudaHostRegister(address, nbytes, 0)
            if int(code) != 0:
                raise GulliverError(
                    f"{nbytes} bytes of host memory could not be page-locked (CUDA error "
                    f"{int(code)}): free some, or save with mode='ring'"
                )
            self._locked.add(address)

    def begin(self) -> None:
        """Orders the copies to come after what is queued on the caller's current stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def queue(self) -> AbstractContextManager[Any]:
        """Returns the context that makes the copy stream the current one."""
        return torch.cuda.stream(self.stream)

    def mark(self) -> Any:
        """Records an event on the copy stream."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def order(self, event: Any) -> None:
        """Makes the caller's current stream wait; the calling thread does not."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def wait(self, event: Any) -> None:
        """Blocks the calling thread until the event has happened, without the GIL."""
        event.synchronize()


class CopyTicket:
    """Page that a copy stream fills and the engine writes; waits as an engine's ticket does."""

    def __init__(
        self,
        copy_stream: CopyStream,
        file: File,
        offset: int,
        sources: Sequence[tuple[Tensor, int, int]],
    ) -> None:
        self.copy_stream, self.file, self.offset, self.sources = copy_stream, file, offset, sources
        # Bytes of the page.
        self.nbytes = sum(count for _, _, count in sources)
        self._issued, self._written = threading.Event(), threading.Event()
        self._event: Any = None
        self._ticket: Ticket | None = None
        self._error: BaseException | None = None

    @property
    def checksum(self) -> int | None:
        """Checksum of what was written; None until the page is with the engine."""
        return None if self._ticket is None else self._ticket.checksum

    def copy(self, page: Page) -> None:
        """Queues the copies into a page on the copy stream; does not wait for them."""
        target, position = torch.from_numpy(page.array), 0
        with self.copy_stream.queue():
            for source, begin, count in self.sources:
                # `reshape` copies what is not contiguous, into memory of the copy stream: it may be
                # freed at once, as whatever takes it next on this stream runs after the copy.
                run = source.detach().reshape(-1).view(torch.uint8)[begin : begin + count]
                target[position : position + count].copy_(run, non_blocking=True)
                position += count
            # `self.sources` keeps the sources alive until `write` has waited for this event: memory
            # freed earlier could be given out again on the compute stream while it is being read.
            self._event = self.copy_stream.mark()
        self._issued.set()

    def write(self, engine: Engine, page: Page) -> None:
        """Waits for the copies, and hands the page to the engine to be written."""
        self.copy_stream.wait(self._event)
        self.sources = ()  # their memory may go
        self._ticket = engine.write_page(self.file, self.offset, page, self.nbytes)
        self._written.set()

    def settle(self) -> None:
        """Waits until no copy writes the page any more; a device that is lost writes no more."""
        with suppress(Exception):
            self.copy_stream.wait(self._event)

    def fail(self, error: BaseException) -> None:
        """Wakes all waiting threads, with the error that keeps the page from being written."""
        if not self._written.is_set():
            self._error = error
        self._issued.set()
        self._written.set()

    def wait_copied(self) -> None:
        """Makes the caller's next work on the device come after the copies."""
        self._issued.wait()
        if self._event is not None:
            self.copy_stream.order(self._event)

    def wait(self) -> None:
        """Waits until the page is written."""
        self._written.wait()
        if self._error is not None:
            raise self._error
        assert self._ticket is not None
        self._ticket.wait()


def pump(engine: Engine, tickets: Sequence[CopyTicket]) -> None:
    """Copies page after page, as many ahead as the pool has, and has them written in order."""
    copying: deque[tuple[CopyTicket, Page]] = deque()
    left = deque(tickets)
    try:
        while left or copying:
            page = _page(engine, wait=not copying) if left else None
            if page is not None:
                copying.append((left.popleft(), page))
                copying[-1][0].copy(page)
                continue
            copying[0][0].write(engine, copying[0][1])
            copying.popleft()
    except BaseException as error:
        for ticket, page in copying:
            ticket.settle()
            ticket.fail(error)
            engine.release(page)
        for ticket in left:
            ticket.fail(error)
        raise


def _page(engine: Engine, wait: bool) -> Page | None:
    try:
        return engine.acquire(None if wait else 0.0)
    except TimeoutError:
        return None
