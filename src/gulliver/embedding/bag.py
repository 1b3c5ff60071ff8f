"""`CachedEmbeddingBag`: torch's EmbeddingBag whose rows lie on the host, the hot ones in a cache.

Read `forward`. Rows are brought into slots (`records.py`) and torch's own ``embedding_bag`` runs
on the slots, as it would on the table (`lookup.py`). The step of torch's optimizer changes the
slots (`optimizers.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gulliver.embedding.inputs import Bags, Given, Table, one_table, rows_of, several_tables
from gulliver.embedding.lookup import Lookup, RowGradient
from gulliver.embedding.optimizers import AttachedOptimizer, RowState
from gulliver.embedding.records import WEIGHT, Column, RecordStore, RowStorage
from gulliver.errors import GulliverError, nearest
from gulliver.memory.parts import set_state_shape
from gulliver.options import Options, from_keywords, size_text, whole_number
from gulliver.solve.rows import CacheTooSmall, RowCounts, RowReplacement

Mode = Literal["sum", "mean", "max"]
MODES = ("sum", "mean", "max")


@dataclass(frozen=True)
class EmbeddingCacheOptions(Options):
    """Options of `CachedEmbeddingBag` that few tables need; they are given to it by name.

    Attributes:
        max_norm: largest norm of a row, as of torch.
        norm_type: kind of that norm.
        disk: folder on a local disk for the rows, instead of host memory.
        split: whether a forward without gradients goes in parts where the cache is too small.
        stable: whether the gradients of a row are summed in the order of its uses, rather than in
            torch's, which depends on all rows of the batch.
        name: name of the table, for messages.
        sparse: must be True: a table that does not fit has no dense gradient.
        scale_grad_by_freq: must be False, as torch has no sparse gradients with it.
    """

    max_norm: float | None = None
    norm_type: float = 2.0
    disk: Path | str | None = None
    split: bool = False
    stable: bool = False
    name: str = "embedding"
    sparse: bool = True
    scale_grad_by_freq: bool = False

    def check_combinations(self) -> None:
        """Refuses options that exclude each other."""
        if not self.sparse:
            raise GulliverError(
                "sparse=False needs a gradient as large as the table: leave it True"
            )
        if self.scale_grad_by_freq:
            raise GulliverError("scale_grad_by_freq=True has no sparse gradients: leave it False")


class CachedEmbeddingBag(nn.Module):
    """An embedding bag over a table, or several, that lie on the host or on a disk.

    Output, gradients and what an optimizer makes of the table are those of torch's EmbeddingBag
    with ``sparse=True``, bit for bit, whatever the size of the cache. Its `state_dict`, and the
    optimizer's, hold the whole table: they are interchangeable with those of torch's module.

    Args:
        num_embeddings: number of rows, or the rows of several tables by name, which then lie one
            after the other in one table and share the cache.
        embedding_dim: width of a row, of all tables alike.
        mode: ``sum``, ``mean`` or ``max``.
        _weight: first values, (rows, dim); they are taken over as they are, in their order.
        include_last_offset: option of torch's EmbeddingBag.
        padding_idx: row that is left out of all bags, counted from the end where it is negative;
            by name where there are several tables.
        device: device of the cache.
        dtype: dtype of the table.
        cache: share of the rows that are on the device, or, as a whole number, how many.
        options: fields of `EmbeddingCacheOptions`, by name.

    Attributes:
        weight: the cache, (slots, dim), or one slot more where there is padding. Its gradient's
            indices are slots.

    Raises:
        GulliverError: an argument that is not supported, naming it.

    Example:
        >>> table = CachedEmbeddingBag(10_000_000, 64, mode="sum", cache=0.01)
        >>> optimizer = torch.optim.Adagrad(table.parameters(), lr=0.05)
        >>> table.attach(optimizer)
    """

    def __init__(
        self,
        num_embeddings: int | Mapping[str, int],
        embedding_dim: int,
        *,
        mode: Mode = "mean",
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        cache: float | int = 0.01,
        **options: Any,
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise GulliverError(f"mode={mode!r} is unknown: {nearest(str(mode), MODES)}")
        self.options = chosen = from_keywords(EmbeddingCacheOptions, options, CachedEmbeddingBag)
        self.tables = make_tables(num_embeddings, padding_idx, chosen.name)
        self.rows = sum(table.rows for table in self.tables)
        self.several = isinstance(num_embeddings, Mapping)
        self.embedding_dim = whole_number("embedding_dim", embedding_dim)
        self.mode, self.include_last_offset = mode, include_last_offset
        self._storage = RowStorage(chosen.disk)
        self._attached: AttachedOptimizer | None = None
        column = Column(self._storage, self._first(_weight, dtype))
        slots = slots_of(cache, self.rows)
        replacement = RowReplacement(slots, self.rows)
        spare = any(table.padding is not None for table in self.tables)
        kind = _weight.dtype if _weight is not None else (dtype or torch.get_default_dtype())
        self._store = RecordStore(
            {WEIGHT: column}, replacement, self.rows, embedding_dim, kind, device_of(device), spare
        )
        self.weight, self._gradient = self._store.weight, RowGradient(self._store)
        set_state_shape(self.weight, (self.rows, self.embedding_dim))
        weakref.finalize(self, RecordStore.close, self._store)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, **options: Any
    ) -> CachedEmbeddingBag:
        """Makes a table of given rows, which are not trained unless `freeze` is False."""
        made = cls(len(embeddings), embeddings.shape[1], _weight=embeddings, **options)
        made.weight.requires_grad = not freeze
        return made

    def attach(
        self, optimizer: Optimizer, row_states: Mapping[str, RowState] | None = None
    ) -> None:
        """Names the optimizer that has `weight`, so that the states of a row move with it.

        Args:
            optimizer: optimizer, from now on the only one.
            row_states: states that it has for each row, by their names in its state, where its
                class is not one of `ROW_OPTIMIZERS` and it is known to be row-wise.

        Raises:
            GulliverError: it does not have `weight`, or is not row-wise.
        """
        if self._attached is not None:
            raise GulliverError("the table has an optimizer already: make another table for it")
        self._attached = AttachedOptimizer(
            self._store, self._gradient, optimizer, row_states, self._storage, self.options.stable
        )

    @property
    def optimizer_steps(self) -> float | None:
        """Steps that the attached optimizer counts for the table; None where it counts none."""
        return None if self._attached is None else self._attached.steps

    @optimizer_steps.setter
    def optimizer_steps(self, steps: float) -> None:
        if self._attached is not None:
            self._attached.steps = steps

    def announce(self, input: Given) -> None:
        """Takes the ids of a batch that will come; `LookAhead` does it for a loader."""
        self.announce_rows(self._rows_of(input))

    def announce_rows(self, rows: Tensor) -> None:
        """Takes the rows of a batch that will come, checked already; -1 for padding."""
        self._store.announce(_real(rows))

    def forward(
        self,
        input: Given,
        offsets: Given | None = None,
        per_sample_weights: Given | None = None,
    ) -> Tensor:
        """Sums, averages or takes the largest of the rows of each bag.

        Args:
            input: ids as of torch's EmbeddingBag. Of several tables: (samples, tables), one id of
                each, or ids by name.
            offsets: first place of each bag; by name where the ids are.
            per_sample_weights: weight of each id; by name where the ids are.

        Returns:
            (bags, dim), of several tables (samples, tables, dim).

        Raises:
            GulliverError: bad ids, offsets or weights, naming the table; or a batch that does not
                fit the cache.
        """
        given = input, offsets, per_sample_weights, self.mode, self.include_last_offset
        if self.several:
            bags = several_tables(self.tables, *given)
        else:
            bags = one_table(self.tables[0], *given)  # type: ignore[arg-type]
        output = self.looked_up(bags)
        if bags.tables > 0:
            return output.view(bags.tables, -1, self.embedding_dim).transpose(0, 1)
        return output.view(-1, len(self.tables), self.embedding_dim) if bags.tables else output

    def flush(self) -> None:
        """Writes all that was changed to the host."""
        self._store.flush()

    def release(self, last: int | None = None) -> None:
        """Gives up batches that wait for a step which will not come.

        Args:
            last: how many, from the last one back; None for all.
        """
        self._store.finish_lookups(last)

    def grow(self, rows: int | Mapping[str, int], _weight: Tensor | None = None) -> None:
        """Grows the last table, or the only one, to a number of rows.

        Args:
            rows: number of rows afterwards, in all; of several tables by the name of the last.
            _weight: first values of the new rows; None to draw them as at the beginning.

        Raises:
            GulliverError: it is not the last table, or would not grow.
        """
        last = self.tables[-1]
        if isinstance(rows, Mapping):
            if set(rows) != {last.name}:
                raise GulliverError(
                    f"rows follow one another: only the last table, {last.name!r}, can grow"
                )
            rows = rows[last.name]
        more = whole_number("rows", rows) - last.rows
        if more < 1:
            raise GulliverError(f"table {last.name!r} has {last.rows} rows: give more than that")
        if _weight is not None and tuple(_weight.shape) != (more, self.embedding_dim):
            raise GulliverError(f"_weight must be ({more}, {self.embedding_dim}), the new rows")
        if self._store.waiting:
            raise GulliverError("batches wait for a step: call optimizer.step() before grow()")
        self.flush()
        values = self._drawn(more, self.weight.dtype) if _weight is None else _weight
        self._store.grow(values, self._attached.first_rows(more) if self._attached else {})
        self.tables[-1] = Table(last.name, last.rows + more, last.first, last.padding)
        self.rows += more
        self._gradient = RowGradient(self._store)
        if self._attached is not None:
            # The old one is bound to the slots and rows that there were.
            self._attached.gradient = self._gradient
        set_state_shape(self.weight, (self.rows, self.embedding_dim))

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedEmbeddingBag:
        """Copies the table with an empty cache; a copy has no optimizer, nor announced batches."""
        self.flush()
        rows = {table.name: table.rows for table in self.tables}
        padding = {t.name: t.padding for t in self.tables if t.padding is not None}
        made = type(self)(
            rows if self.several else self.rows,
            self.embedding_dim,
            mode=cast("Mode", self.mode),
            include_last_offset=self.include_last_offset,
            _weight=self._column.whole(),
            padding_idx=(padding or None) if self.several else self.tables[0].padding,  # type: ignore[arg-type]
            device=self.weight.device,
            cache=self._store.slots,
            **vars(self.options),
        )
        made.weight.requires_grad_(self.weight.requires_grad)
        memo[id(self)] = made
        made.training = self.training
        return made

    @property
    def counts(self) -> RowCounts:
        """Hits and misses so far."""
        return self._store.replacement.counts

    @property
    def device_bytes(self) -> int:
        """Bytes on the device that stay: cache, optimizer state and the row of each slot."""
        return self._store.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes on the host or disk: all rows, the index and the decisions."""
        return self._store.host_bytes

    def extra_repr(self) -> str:
        """Returns the sizes, for `repr`."""
        return (
            f"{self.rows}, {self.embedding_dim}, mode={self.mode!r}, slots={self._store.slots}, "
            f"on the device {size_text(self.device_bytes)}"
        )

    # Lookup

    def _rows_of(self, ids: Given) -> Tensor:
        """Returns the rows of all ids, in the order in which `forward` has them."""
        if isinstance(ids, Mapping):
            missing = [t.name for t in self.tables if t.name not in ids]
            if missing or len(ids) != len(self.tables):
                raise GulliverError(f"give ids of the tables {[t.name for t in self.tables]}")
            return torch.cat([rows_of(table, ids[table.name]) for table in self.tables])
        if self.several:
            return several_tables(self.tables, ids, None, None, self.mode, False).rows
        return rows_of(self.tables[0], ids)

    def looked_up(self, bags: Bags) -> Tensor:
        """Reduces bags of rows that were checked already; see `forward`."""
        trained = torch.is_grad_enabled() and self.weight.requires_grad
        if trained and self._attached is None:
            raise GulliverError(
                "a table that is trained needs its optimizer, whose state moves with the rows: "
                "call attach(optimizer), or run under torch.no_grad()"
            )
        real = _real(bags.rows)
        try:
            found = self._store.begin(real, trained or self.options.max_norm is not None, trained)
        except CacheTooSmall:
            if trained or not self.options.split or len(bags) < 2:
                raise
            middle = len(bags) // 2
            halves = bags.part(0, middle), bags.part(middle, len(bags))
            return torch.cat([self.looked_up(half) for half in halves])
        device = self.weight.device
        # As torch: a padding index that no bag has still makes it add in another order.
        padded = any(table.padding is not None for table in self.tables)
        slots, spare = found, self._store.slots
        if len(real) < len(bags.rows):
            places = (bags.rows >= 0).to(device)
            slots = torch.full(bags.rows.shape, spare, device=device).masked_scatter_(places, found)
        norm = self.options.max_norm, self.options.norm_type
        padding = spare if padded else None
        lookup = Lookup(slots, bags.offsets.to(device), padding, self.mode, *norm)
        weights = None if bags.weights is None else bags.weights.to(device)
        if trained or (weights is not None and weights.requires_grad and torch.is_grad_enabled()):
            return self._gradient.bags(lookup, weights)
        return lookup.bags(self.weight.detach(), weights)

    # First values and state

    def _first(self, given: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        shape = self.rows, self.embedding_dim
        if given is not None:
            if tuple(given.shape) != shape:
                raise GulliverError(f"_weight is {tuple(given.shape)}, the table {shape}")
            return self._storage.zeros(shape, given.dtype).copy_(given.detach())
        values = self._drawn(self.rows, dtype)
        for table in self.tables:
            if table.padding is not None:
                values[table.first + table.padding] = 0
        return values

    def _drawn(self, count: int, dtype: torch.dtype | None) -> Tensor:
        # On a disk the table is drawn where it lies.
        shape = count, self.embedding_dim
        return nn.init.normal_(self._storage.zeros(shape, dtype or torch.get_default_dtype()))

    @property
    def columns(self) -> dict[str, Column]:
        """Columns of all rows, by name: the weight and the optimizer's states."""
        return self._store.columns

    def forget(self) -> None:
        """Empties the cache without writing: the columns have been given other values."""
        self._store.forget()

    @property
    def _column(self) -> Column:
        return self._store.columns[WEIGHT]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.flush()
        destination[prefix + WEIGHT] = self._column.whole()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + WEIGHT
        unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k != key and strict]
        if key not in state_dict:
            if strict:
                missing_keys.append(key)
            return
        values, shape = state_dict[key], (self.rows, self.embedding_dim)
        if tuple(values.shape) != shape:
            error_msgs.append(
                f"{key} is {tuple(values.shape)}, the table {shape}: grow() it, or make it as large"
            )
            return
        self._store.flush()
        self._column.fill(values.detach().to("cpu", self.weight.dtype))
        self._store.forget()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with torch.no_grad():
            # `fn` is what `Module.to` applies; one row tells where it would go.
            probe = fn(self.weight[:1])
        if probe.device != self.weight.device or probe.dtype != self.weight.dtype:
            raise GulliverError(
                "a cached table stays on its device and in its dtype: say device= and dtype= when "
                "it is made"
            )
        return self


def make_tables(
    rows: int | Mapping[str, int], padding: int | Mapping[str, int] | None, name: str
) -> list[Table]:
    """Lays tables one after the other."""
    named = rows if isinstance(rows, Mapping) else {name: rows}
    if not named:
        raise GulliverError("num_embeddings names no table")
    if padding is not None and isinstance(rows, Mapping) != isinstance(padding, Mapping):
        raise GulliverError("padding_idx is by name where num_embeddings is, else a number")
    paddings = padding if isinstance(padding, Mapping) else {name: padding}
    for key in paddings:
        if padding is not None and key not in named:
            raise GulliverError(f"padding_idx: there is no table {key!r}: {nearest(key, named)}")
    tables, first = [], 0
    for key, count in named.items():
        count, index = whole_number(f"num_embeddings of {key!r}", count), paddings.get(key)
        if count < 1:
            raise GulliverError(f"table {key!r} has {count} rows: give at least 1")
        if index is not None and not -count <= index < count:
            raise GulliverError(
                f"padding_idx of {key!r} is {index}: give a row, 0 to {count - 1}, or -1 to "
                f"{-count} to count from the end"
            )
        index = index + count if index is not None and index < 0 else index
        tables.append(Table(key, count, first, index))
        first += count
    return tables


def slots_of(cache: float | int, rows: int) -> int:
    """Returns the number of slots that are asked for."""
    number = cache if isinstance(cache, int) and not isinstance(cache, bool) else cache * rows
    if isinstance(cache, float) and not 0 < cache <= 1:
        raise GulliverError(f"cache={cache} is no share of the rows: give 0 < cache <= 1, or slots")
    if not 1 <= number <= rows and not 0 < number < 1:
        raise GulliverError(f"cache={cache} slots: give 1 to {rows}, the number of rows")
    return max(int(number), 1)


def device_of(device: torch.device | str | None) -> torch.device:
    """Names the very device that is meant."""
    found = torch.device(device if device is not None else "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def _real(rows: Tensor) -> Tensor:
    """Returns the rows without padding."""
    return rows[rows >= 0] if len(rows) and int(rows.min()) < 0 else rows


# A loader that shows a table the next batches before they come.


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
