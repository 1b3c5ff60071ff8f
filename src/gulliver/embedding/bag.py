"""`CachedEmbeddingBag`: torch's EmbeddingBag with rows on the host and a device cache of hot rows.

Start with `forward`. Rows are copied into slots (`records.py`), and torch's ``embedding_bag`` runs
on the slots as on the full table (`lookup.py`). The torch optimizer updates the slots
(`optimizers.py`).
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
    """Less common options of `CachedEmbeddingBag`, passed to it as keyword arguments.

    Attributes:
        max_norm: maximum norm of a row, as in torch.
        norm_type: p of the p-norm for `max_norm`.
        disk: folder on a local disk to store the rows in, instead of host memory.
        split: whether a forward pass without gradients is split if the cache is too small.
        stable: whether a row's gradients are summed in the order of its uses. In torch, the order
            depends on all rows of the batch.
        name: name of the table in error messages.
        sparse: must be True, because a table larger than memory cannot have a dense gradient.
        scale_grad_by_freq: must be False, because torch does not support it with sparse gradients.
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
        """Rejects values of `sparse` and `scale_grad_by_freq` that are not supported."""
        if not self.sparse:
            raise GulliverError(
                "sparse=False needs a gradient as large as the table; leave sparse=True"
            )
        if self.scale_grad_by_freq:
            raise GulliverError(
                "scale_grad_by_freq=True does not support sparse gradients; leave it False"
            )


class CachedEmbeddingBag(nn.Module):
    """An embedding bag over one or several tables stored in host memory or on disk.

    Outputs, gradients and optimizer updates are bitwise equal to those of torch's EmbeddingBag with
    ``sparse=True``, for any cache size. Its `state_dict` and that of the optimizer contain the full
    table and are interchangeable with those of torch's module.

    Args:
        num_embeddings: number of rows. For several tables, a dict from name to number of rows; they
            are concatenated into one table and share the cache.
        embedding_dim: width of a row, equal for all tables.
        mode: ``sum``, ``mean`` or ``max``.
        _weight: initial values, (rows, dim), used without a copy.
        include_last_offset: same as in torch's EmbeddingBag.
        padding_idx: row to exclude from all bags; negative values count from the end. A dict by
            table name if there are several tables.
        device: device of the cache.
        dtype: dtype of the table.
        cache: size of the device cache, as a fraction of the rows or as an integer number of rows.
        options: fields of `EmbeddingCacheOptions`.

    Attributes:
        weight: the cache, (slots, dim), with an additional slot if there is padding. Its gradient
            is indexed by slot.

    Raises:
        GulliverError: an argument is not supported.

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
        """Builds a table from existing rows, frozen unless `freeze` is False."""
        made = cls(len(embeddings), embeddings.shape[1], _weight=embeddings, **options)
        made.weight.requires_grad = not freeze
        return made

    def attach(
        self, optimizer: Optimizer, row_states: Mapping[str, RowState] | None = None
    ) -> None:
        """Attaches the optimizer of `weight`, so that its state for a row moves with the row.

        Args:
            optimizer: optimizer of this table; a table has only one.
            row_states: names and shapes of the optimizer's per-row states; needed only if its class
                is not in `ROW_OPTIMIZERS`. Its update must be row-wise.

        Raises:
            GulliverError: the optimizer does not have `weight`, or is not row-wise.
        """
        if self._attached is not None:
            raise GulliverError(
                "the table already has an optimizer; create another table for the new one"
            )
        self._attached = AttachedOptimizer(
            self._store, self._gradient, optimizer, row_states, self._storage, self.options.stable
        )

    @property
    def optimizer_steps(self) -> float | None:
        """Number of steps counted by the attached optimizer; None if it does not count."""
        return None if self._attached is None else self._attached.steps

    @optimizer_steps.setter
    def optimizer_steps(self, steps: float) -> None:
        if self._attached is not None:
            self._attached.steps = steps

    def announce(self, input: Given) -> None:
        """Queues the ids of an upcoming batch for prefetching (called by `LookAhead`)."""
        self.announce_rows(self._rows_of(input))

    def announce_rows(self, rows: Tensor) -> None:
        """Queues the validated rows of an upcoming batch for prefetching; -1 means padding."""
        self._store.announce(_real(rows))

    def forward(
        self,
        input: Given,
        offsets: Given | None = None,
        per_sample_weights: Given | None = None,
    ) -> Tensor:
        """Returns the sum, mean or maximum of the rows of each bag.

        Args:
            input: ids as for torch's EmbeddingBag. For several tables, (samples, tables) with one
                id each, or a dict of ids by table name.
            offsets: start of each bag; a dict by table name if `input` is a dict.
            per_sample_weights: weight of each id; a dict by table name if `input` is a dict.

        Returns:
            (bags, dim), or (samples, tables, dim) for several tables.

        Raises:
            GulliverError: ids, offsets or weights of a table are invalid, or the batch does not fit
                into the cache.
        """
        if per_sample_weights is not None and self.mode != "sum":
            raise GulliverError(f"per_sample_weights need mode='sum', not {self.mode!r}")
        given = input, offsets, per_sample_weights, self.include_last_offset
        if self.several:
            bags = several_tables(self.tables, *given)
        else:
            bags = one_table(self.tables[0], *given)  # type: ignore[arg-type]
        output = self.looked_up(bags)
        if bags.tables > 0:
            return output.view(bags.tables, -1, self.embedding_dim).transpose(0, 1)
        return output.view(-1, len(self.tables), self.embedding_dim) if bags.tables else output

    def flush(self) -> None:
        """Writes all modified rows back to the host."""
        self._store.flush()

    def release(self, last: int | None = None) -> None:
        """Unpins batches that wait for an optimizer step that will not happen.

        Args:
            last: number of most recent batches to unpin; None for all.
        """
        self._store.finish_lookups(last)

    def grow(self, rows: int | Mapping[str, int], _weight: Tensor | None = None) -> None:
        """Grows the last (or only) table to a number of rows.

        Args:
            rows: new total number of rows; a dict with the name of the last table if there are
                several.
            _weight: initial values of the new rows; None for random initialization.

        Raises:
            GulliverError: the table is not the last one, or does not grow.
        """
        last = self.tables[-1]
        if isinstance(rows, Mapping):
            if set(rows) != {last.name}:
                raise GulliverError(
                    f"tables are stored consecutively and only the last one, {last.name!r}, can "
                    "grow"
                )
            rows = rows[last.name]
        more = whole_number("rows", rows) - last.rows
        if more < 1:
            raise GulliverError(
                f"table {last.name!r} already has {last.rows} rows; pass a larger number"
            )
        if _weight is not None and tuple(_weight.shape) != (more, self.embedding_dim):
            raise GulliverError(
                f"_weight must have shape ({more}, {self.embedding_dim}), the shape of the new rows"
            )
        if self._store.waiting:
            raise GulliverError(
                "some batches are still waiting for a step; call optimizer.step() before grow()"
            )
        self.flush()
        values = self._drawn(more, self.weight.dtype) if _weight is None else _weight
        self._store.grow(values, self._attached.first_rows(more) if self._attached else {})
        self.tables[-1] = Table(last.name, last.rows + more, last.first, last.padding)
        self.rows += more
        self._gradient = RowGradient(self._store)
        if self._attached is not None:
            # The old replacement policy is bound to the previous numbers of slots and rows.
            self._attached.gradient = self._gradient
        set_state_shape(self.weight, (self.rows, self.embedding_dim))

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedEmbeddingBag:
        """Copies the table without its cache contents, optimizer and announced batches."""
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
        return self._store.replacement.counts

    @property
    def device_bytes(self) -> int:
        """Bytes used on the device: cache, optimizer state and slot index."""
        return self._store.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes used on the host or disk: all rows, the index and the replacement state."""
        return self._store.host_bytes

    def extra_repr(self) -> str:
        return (
            f"{self.rows}, {self.embedding_dim}, mode={self.mode!r}, slots={self._store.slots}, "
            f"on the device {size_text(self.device_bytes)}"
        )

    # Lookup

    def _rows_of(self, ids: Given) -> Tensor:
        if isinstance(ids, Mapping):
            missing = [t.name for t in self.tables if t.name not in ids]
            if missing or len(ids) != len(self.tables):
                raise GulliverError(
                    f"ids are missing; pass ids for the tables {[t.name for t in self.tables]}"
                )
            return torch.cat([rows_of(table, ids[table.name]) for table in self.tables])
        if self.several:
            return several_tables(self.tables, ids, None, None, False).rows
        return rows_of(self.tables[0], ids)

    def looked_up(self, bags: Bags) -> Tensor:
        """Reduces bags of validated rows; see `forward`."""
        trained = torch.is_grad_enabled() and self.weight.requires_grad
        if trained and self._attached is None:
            raise GulliverError(
                "training needs the table's optimizer, whose state moves with the rows; call "
                "attach(optimizer), or use torch.no_grad()"
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
        # As in torch: a padding index changes the order of summation even if no bag contains it.
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

    # Initial values and state

    def _first(self, given: Tensor | None, dtype: torch.dtype | None) -> Tensor:
        shape = self.rows, self.embedding_dim
        if given is not None:
            if tuple(given.shape) != shape:
                raise GulliverError(
                    f"_weight has shape {tuple(given.shape)}, but the table has shape {shape}"
                )
            return self._storage.zeros(shape, given.dtype).copy_(given.detach())
        values = self._drawn(self.rows, dtype)
        for table in self.tables:
            if table.padding is not None:
                values[table.first + table.padding] = 0
        return values

    def _drawn(self, count: int, dtype: torch.dtype | None) -> Tensor:
        # A table on disk is initialized in place.
        shape = count, self.embedding_dim
        return nn.init.normal_(self._storage.zeros(shape, dtype or torch.get_default_dtype()))

    @property
    def columns(self) -> dict[str, Column]:
        """Per-row data by name: the weight and the optimizer states."""
        return self._store.columns

    def forget(self) -> None:
        """Empties the cache without writing it back, because the columns were overwritten."""
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
                f"{key} has shape {tuple(values.shape)}, the table {shape}; call grow(), or "
                "create a table of that size"
            )
            return
        self._store.flush()
        self._column.fill(values.detach().to("cpu", self.weight.dtype))
        self._store.forget()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with torch.no_grad():
            # `fn` is applied by `Module.to`; one row shows its target device and dtype.
            probe = fn(self.weight[:1])
        if probe.device != self.weight.device or probe.dtype != self.weight.dtype:
            raise GulliverError(
                "a cached table cannot change its device or dtype; pass device= and dtype= when "
                "it is created"
            )
        return self


def make_tables(
    rows: int | Mapping[str, int], padding: int | Mapping[str, int] | None, name: str
) -> list[Table]:
    named = rows if isinstance(rows, Mapping) else {name: rows}
    if padding is not None and isinstance(rows, Mapping) != isinstance(padding, Mapping):
        raise GulliverError(
            "padding_idx and num_embeddings must both be dicts by table name, or both be integers"
        )
    paddings = padding if isinstance(padding, Mapping) else {name: padding}
    for key in paddings:
        if padding is not None and key not in named:
            raise GulliverError(
                f"padding_idx names an unknown table {key!r}: {nearest(key, named)}"
            )
    tables, first = [], 0
    for key, count in named.items():
        count, index = whole_number(f"num_embeddings of {key!r}", count), paddings.get(key)
        if index is not None and not -count <= index < count:
            raise GulliverError(
                f"padding_idx of {key!r} is {index}; use 0 to {count - 1}, or -1 to {-count} to "
                "count from the end"
            )
        index = index + count if index is not None and index < 0 else index
        tables.append(Table(key, count, first, index))
        first += count
    return tables


def slots_of(cache: float | int, rows: int) -> int:
    """Converts `cache` to a number of slots."""
    number = cache if isinstance(cache, int) and not isinstance(cache, bool) else cache * rows
    if isinstance(cache, float) and not 0 < cache <= 1:
        raise GulliverError(
            f"cache={cache} is not a fraction of the rows; use 0 < cache <= 1, or an integer "
            "number of slots"
        )
    if not 1 <= number <= rows and not 0 < number < 1:
        raise GulliverError(
            f"cache={cache} slots is out of range; use 1 to {rows}, the number of rows"
        )
    return max(int(number), 1)


def device_of(device: torch.device | str | None) -> torch.device:
    found = torch.device(device if device is not None else "cpu")
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def _real(rows: Tensor) -> Tensor:
    return rows[rows >= 0] if len(rows) and int(rows.min()) < 0 else rows


# A loader that announces upcoming batches to a table.


T = TypeVar("T")


class LookAhead(Generic[T]):
    """Fetches batches a few steps ahead of their use and announces their ids.

    Batches are yielded in the order of the loader. If a loop ends early, batches that were fetched
    but not used are lost, as with any prefetching loader.

    Args:
        loader: batches.
        table: one or several tables.
        batches: number of batches to look ahead.
        ids: extracts the ids passed to the table's forward from a batch.

    Raises:
        GulliverError: `batches` is less than 1.

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
            raise GulliverError(f"batches={batches} is too small; use at least 1")
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
