"""A loader that shows a table the next batches before they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from gulliver.embedding._bag import CachedEmbeddingBag
from gulliver.embedding._inputs import Given
from gulliver.errors import GulliverError
from gulliver.options import whole_number

T = TypeVar("T")


class LookAhead(Generic[T]):
    """Draws batches some steps before they are used, and announces their ids.

    A batch is yielded when those of its window have been drawn, in the order of the loader, each
    once. What was drawn and not used when a loop ends early is lost, as with any loader that works
    ahead.

    Args:
        loader: batches.
        table: table, or several tables with their ids each.
        batches: number of batches that are known besides the present one.
        ids: function that finds the ids in a batch: what the table's forward will be given.

    Raises:
        GulliverError: fewer than 1 batch.

    Example:
        >>> for batch in LookAhead(loader, table, batches=8, ids=lambda batch: batch["ids"]):
        ...     output = table(batch["ids"])
    """

    def __init__(
        self,
        loader: Iterable[T],
        table: CachedEmbeddingBag,
        batches: int,
        ids: Callable[[T], Given],
    ) -> None:
        if whole_number("batches", batches) < 1:
            raise GulliverError(f"batches={batches}: look at least 1 batch ahead")
        self._loader, self._table, self._batches, self._ids = loader, table, batches, ids

    def __iter__(self) -> Iterator[T]:
        waiting: deque[T] = deque()
        for batch in self._loader:
            self._table.announce(self._ids(batch))
            waiting.append(batch)
            if len(waiting) > self._batches:
                yield waiting.popleft()
        yield from waiting

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]
