"""Making the next items in a thread while the present one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class prefetch(Generic[T]):
    """Iterates over `iterable` in a thread, at most `depth` items ahead, in order.

    A context manager: leaving it ends the thread. An exception in the thread surfaces at the item
    that could not be made.
    """

    def __init__(self, iterable: Iterable[T], depth: int = 2) -> None:
        self._queue: queue.Queue[tuple[str, object]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(iterable,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def _fill(self, iterable: Iterable[T]) -> None:
        try:
            for item in iterable:
                if not self._put(("item", item)):
                    return
            self._put(("end", None))
        except BaseException as error:
            self._put(("error", error))

    def _put(self, entry: tuple[str, object]) -> bool:
        """Waits for room; False once nobody listens any more."""
        while not self._stop.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[T]:
        while True:
            kind, value = self._queue.get()
            if kind == "end":
                return
            if kind == "error":
                assert isinstance(value, BaseException)
                raise value
            yield value  # type: ignore[misc]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
