"""Cached embedding tables sharded over ranks; an error on one rank is raised on all.

A rank that finds an invalid id, or whose cache is too small for a batch, still takes part in the
next exchange and sets a flag: in the counts gathered with the ids, or as an additional element of
the data it sends. If any flag is set, all ranks exchange error messages and raise the same error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gulliver.comm.collectives import gather_objects
from gulliver.comm.groups import RankGroup
from gulliver.comm.messages import exchange, gather_integers
from gulliver.embedding.bag import CachedEmbeddingBag, Mode, device_of, make_tables
from gulliver.embedding.inputs import Bags, Given, Table, check_lengths, one_table
from gulliver.embedding.lookup import BagExchange, Lookup, Pool
from gulliver.embedding.optimizers import RowWiseAdagrad
from gulliver.embedding.planning import FirstRows, TablePlacement, share
from gulliver.embedding.records import WEIGHT
from gulliver.errors import GulliverError, nearest
from gulliver.memory.parts import Part, Region
from gulliver.options import whole_number


def flagged(pieces: Sequence[Tensor], error: GulliverError | None, like: Tensor) -> Tensor:
    """Concatenates the data for a rank, and appends the error flag."""
    flag = like.new_full((1,), float(error is not None))
    return torch.cat([*(piece.reshape(-1) for piece in pieces), flag])


def unflagged(
    group: RankGroup, arriving: Sequence[Tensor], error: GulliverError | None
) -> list[Tensor]:
    """Strips the error flags from received data; raises on all ranks if any flag is set."""
    flags = torch.stack([flat.detach()[-1] for flat in arriving])
    if bool(flags.any()):
        raise_together(group, error, flags.device)
    return [flat[:-1] for flat in arriving]


def raise_together(group: RankGroup, error: GulliverError | None, device: torch.device) -> NoReturn:
    """Raises the error of the first failed rank on all ranks (collective)."""
    if group.size == 1:
        assert error is not None, "set a flag exactly on the ranks that found an error"
        raise error
    text = list(str(error or "").encode())
    lengths = gather_integers(group, [len(text)], device)
    mine = torch.tensor(text, dtype=torch.int64, device=device)
    texts = exchange(group, [mine] * group.size, [length for (length,) in lengths])
    rank = next(rank for rank, (length,) in enumerate(lengths) if length)
    raise GulliverError(f"rank {rank}: {bytes(texts[rank].tolist()).decode()}") from error


# What a rank saves of shared tables, in addition to its rows.


STEPS = "optimizer.step"
"""Name of the optimizer's step count (for bias correction and decay) in checkpoints."""


def with_empty_parts(parts: Mapping[str, Part], group: RankGroup) -> dict[str, Part]:
    """Adds empty parts for tensors that exist only on other ranks (collective)."""
    # Without them a rank would not know the contents of a checkpoint, and could not read it.
    mine = {name: (part.shape, part.value.dtype) for name, part in parts.items()}
    everyone = gather_objects(mine, group.process_group)
    known = {name: of for rank in everyone for name, of in rank.items()}
    others = {name: of for name, of in known.items() if name not in parts}
    empty = {
        name: Part(torch.zeros(0, *shape[1:], dtype=kind), shape)
        for name, (shape, kind) in others.items()
    }
    return {**parts, **empty}


def steps_taken(bags: Sequence[CachedEmbeddingBag], group: RankGroup) -> Tensor | None:
    """The optimizer's step count, (1,) in float64; None if it does not count (collective)."""
    mine = [steps for bag in bags if (steps := bag.optimizer_steps) is not None]
    everyone = gather_objects(max(mine, default=None), group.process_group)
    known = [steps for steps in everyone if steps is not None]
    return torch.tensor([max(known)], dtype=torch.float64) if known else None


def steps_part(steps: Tensor, group: RankGroup) -> Part:
    return Part(steps, (1,), region=Region((1,), 0, ((0, 1),), group.size))


# Tables sharded over ranks: whole on one rank, by columns or by rows, each part behind a cache.
#
# Start with `forward`. Every rank has its own samples. Ids are all-gathered, each rank looks up the
# parts it holds for the samples of all ranks, and sends each rank its results:
#
# - *whole* table: bags, from the rank that holds it,
# - *columns*: bags, a slice of their width from every rank,
# - *rows*: one row per id, from the rank that holds it; the destination reduces them to bags.


# [Note: exact over ranks] A bag is reduced where all its rows are, in the order of its ids, and the
# holder of a row receives the gradients of all samples in rank order. Gradients of a row are summed
# in that order (`stable`). So results do not depend on the number of ranks; splitting columns does
# not matter because elements are independent. Summing partial bags on the way (as a reduce-scatter
# does) would send fewer bytes for long bags, but in another order of summation.
class ShardedEmbeddingBag(nn.Module):
    """Cached embedding tables sharded over ranks; each rank passes its own samples.

    Args:
        num_embeddings: number of rows by table name.
        embedding_dim: width of a row, equal for all tables.
        placement: ``whole:RANK``, ``column`` or ``row``, for all tables or by name, as chosen by
            `plan_tables`.
        mode: ``sum``, ``mean`` or ``max``.
        group: ranks that share the tables; None for all.
        average: whether gradients are divided by the number of ranks, for losses that are means
            over a rank's own samples (as with DDP).
        _weight: initial values of all rows, in the order of the tables; None for random values that
            do not depend on the number of ranks.
        padding_idx: padding index of tables by name, as for `CachedEmbeddingBag`.
        include_last_offset: same as in torch's EmbeddingBag.
        seed: seed of the initial values.
        device: device of the caches.
        options: further options of `CachedEmbeddingBag`, such as `cache` and `disk`.

    Attributes:
        device: device of the caches.
        nothing: an empty parameter on ranks without any part of a table, so that they can create an
            optimizer.

    Raises:
        GulliverError: a placement is unknown, or the number of ranks does not divide the columns.
    """

    def __init__(
        self,
        num_embeddings: Mapping[str, int],
        embedding_dim: int,
        placement: str | Mapping[str, str] = "column",
        mode: Mode = "mean",
        group: RankGroup | None = None,
        average: bool = True,
        _weight: Tensor | None = None,
        padding_idx: Mapping[str, int] | None = None,
        include_last_offset: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.group = _everyone() if group is None else group
        self.tables = make_tables(num_embeddings, padding_idx, "embedding")
        self.dim, self.mode, self.average = (
            whole_number("embedding_dim", embedding_dim),
            mode,
            average,
        )
        self.include_last_offset = include_last_offset
        self.placements = self._placements(placement)
        first = FirstRows(self.tables, self.dim, _weight, seed)
        columns = share(self.dim, self.group.rank, self.group.size)
        self.device, options = device_of(device), {**options, "device": device}
        self.wide = self._bag(
            [t for t in self.tables if self._kind(t) != "column"], first, None, options
        )
        self.narrow = self._bag(
            [t for t in self.tables if self._kind(t) == "column"], first, columns, options
        )
        self._steps: Tensor | None = None
        self._gathered: deque[tuple[list[Bags], list[list[Bags]]]] = deque()
        self.anchor = torch.zeros((), dtype=first.dtype, device=self.device, requires_grad=True)
        if not self._bags():
            self.nothing = nn.Parameter(self.anchor.detach().new_zeros(0, self.dim))

    def attach(self, optimizer: Optimizer) -> None:
        """Attaches the optimizer of this rank's parameters, whose state moves with the rows.

        Raises:
            GulliverError: the optimizer needs whole rows, but a table is sharded by columns.
        """
        if (
            isinstance(optimizer, RowWiseAdagrad)
            and self.narrow is not None
            and self.group.size > 1
        ):
            raise GulliverError(
                "RowWiseAdagrad needs complete rows; place the tables by row or unsharded, not by "
                "column"
            )
        for bag in self._bags():
            bag.attach(optimizer)

    def announce(self, input: Given) -> None:
        """Queues the ids of an upcoming batch for prefetching (collective).

        Raises:
            GulliverError: ids are invalid on some rank.
        """
        own, error = self._tried(input, None)
        everyone = self._gather(own, error)
        self._gathered.append((own, everyone))
        for bag in self._bags():
            rows = self._local(bag, everyone).rows
            bag.announce_rows(rows)

    def forward(self, input: Given, offsets: Given | None = None) -> Tensor:
        """Reduces the bags of this rank's samples (collective).

        Args:
            input: ids by table name, or (samples, tables) with one id each.
            offsets: starts of bags by table name, for one-dimensional ids.

        Returns:
            (samples, tables, dim).

        Raises:
            GulliverError: ids or offsets are invalid on some rank, or a cache is too small for the
                batch. All ranks raise the same error and can continue with other ids.
        """
        own, error = self._tried(input, offsets)
        announced = bool(self._gathered)
        if announced:
            own, everyone, error = self._announced(own, error)
        else:
            everyone = self._gather(own, error)
        found, error = self._found(everyone, error)
        outgoing = [self._outgoing(found, everyone, rank, error) for rank in self._ranks]
        counts = [self._count(rank, own) + 1 for rank in self._ranks]
        # Gradients are scaled once on arrival, not in every row that they are added to.
        scale = 1.0 / self.group.size if self.average else 1.0
        arrived = BagExchange.apply(self.anchor, self.group, counts, scale, *outgoing)
        try:
            arriving = unflagged(self.group, cast(Sequence[Tensor], arrived), error)
        except GulliverError:
            # These lookups will get no gradient: their rows may be evicted.
            self._take_back(found)
            raise
        if announced:
            self._gathered.popleft()
        return self._assembled(arriving, own)

    def flush(self) -> None:
        """Writes all modified rows to the host."""
        for bag in self._bags():
            bag.flush()

    def parts(self) -> dict[str, Part]:
        """Flushes the caches, and returns this rank's parts of all tables and states.

        ``AsyncCheckpointer.save(step, {"tables": sharded.parts()})`` writes full tables, which
        ``load(folder, {"tables": sharded.parts()})`` reads on any number of ranks and in any
        placement; call `loaded` afterwards. The call is collective: ranks without rows of a tensor
        have an empty part.
        """
        self.flush()
        found = {}
        for bag in self._bags():
            for name, column in bag.columns.items():
                for local in bag.tables:
                    whole = next(t for t in self.tables if t.name == local.name)
                    values = column.whole()[local.first : local.first + local.rows]
                    key = f"{local.name}.{name}"
                    found[key] = self._part(whole, values, name)
        self._steps = steps_taken(self._bags(), self.group)
        if self._steps is not None:
            found[STEPS] = steps_part(self._steps, self.group)
        everywhere = all(place.kind != "whole" for place in self.placements.values())
        if everywhere and min(table.rows for table in self.tables) >= self.group.size:
            return found
        return with_empty_parts(found, self.group)

    def loaded(self) -> None:
        """Notifies the tables that the tensors from the last `parts` call were overwritten."""
        for bag in self._bags():
            bag.forget()
            if self._steps is not None:
                bag.optimizer_steps = float(self._steps)

    @property
    def device_bytes(self) -> int:
        """Bytes used on this rank's device."""
        return sum(bag.device_bytes for bag in self._bags())

    # Placement

    def _placements(self, given: str | Mapping[str, str]) -> dict[str, TablePlacement]:
        names = [table.name for table in self.tables]
        named = dict.fromkeys(names, given) if isinstance(given, str) else given
        for name in [*names, *named]:
            if name not in named or name not in names:
                raise GulliverError(f"unknown table {name!r} in placement: {nearest(name, names)}")
        made = {n: TablePlacement.read(named[n], self.group.size) for n in names}
        if any(p.kind == "column" for p in made.values()) and self.dim < self.group.size:
            raise GulliverError(
                f"{self.group.size} ranks do not divide {self.dim} columns; choose another "
                "embedding_dim or placement"
            )
        return made

    def _kind(self, table: Table) -> str:
        return self.placements[table.name].kind

    def _rows(self, table: Table) -> tuple[int, int]:
        place, rank = self.placements[table.name], self.group.rank
        if place.kind == "row":
            return share(table.rows, rank, self.group.size)
        return (0, table.rows) if place.kind == "column" or place.rank == rank else (0, 0)

    def _bag(
        self,
        tables: list[Table],
        first: FirstRows,
        columns: tuple[int, int] | None,
        options: Mapping[str, Any],
    ) -> CachedEmbeddingBag | None:
        held = {t.name: self._rows(t) for t in tables if self._rows(t)[0] < self._rows(t)[1]}
        if not held:
            return None
        values = torch.cat([first.rows(name, *rows) for name, rows in held.items()])
        if columns is not None:
            values = values[:, slice(*columns)].contiguous()
        sizes = {name: stop - begin for name, (begin, stop) in held.items()}
        width = values.shape[1]
        # Padding for whole tables and columns; padding rows are never requested.
        padding = {t.name: t.padding for t in tables if t.padding is not None and t.name in held}
        padding = {n: p for n, p in padding.items() if self.placements[n].kind != "row"}
        return CachedEmbeddingBag(
            sizes,
            width,
            mode=cast(Mode, self.mode),
            _weight=values,
            padding_idx=padding or None,  # type: ignore[arg-type]
            stable=True,
            **options,
        )

    def _bags(self) -> list[CachedEmbeddingBag]:
        return [bag for bag in (self.wide, self.narrow) if bag is not None]

    def _part(self, table: Table, values: Tensor, name: str) -> Part:
        width = values.shape[1] if name != WEIGHT and values.shape[1] == 1 else self.dim
        shape = table.rows, width
        if self._kind(table) == "column":
            columns = share(self.dim, self.group.rank, self.group.size)
            return Part(values, shape, region=Region(shape, 1, (columns,)))
        return Part(values, shape, self._rows(table)[0] * width)

    @property
    def _ranks(self) -> range:
        return range(self.group.size)

    # Ids

    def _tried(self, ids: Given, offsets: Given | None) -> tuple[list[Bags], GulliverError | None]:
        try:
            return self._own(ids, offsets), None
        except GulliverError as error:
            empty = torch.zeros(0, dtype=torch.int64)
            return [Bags(empty, empty) for _ in self.tables], error

    def _own(self, ids: Given, offsets: Given | None) -> list[Bags]:
        """Validates this rank's ids, and returns the bags of each table."""
        if isinstance(ids, Tensor):
            if ids.dim() != 2 or ids.shape[1] != len(self.tables) or offsets is not None:
                raise GulliverError(
                    f"ids must have shape (samples, {len(self.tables)}), one per table, or be a "
                    "dict by name"
                )
            ids = {t.name: ids[:, n : n + 1] for n, t in enumerate(self.tables)}
        by_name = offsets if isinstance(offsets, Mapping) else {}
        for table in self.tables:
            if table.name not in ids:
                raise GulliverError(f"table {table.name!r} has no ids; pass empty bags")
        found = [
            one_table(
                replace(table, first=0),
                ids[table.name],
                by_name.get(table.name),
                None,
                self.include_last_offset,
            )
            for table in self.tables
        ]
        check_lengths(self.tables, found)
        return found

    def _announced(
        self, own: list[Bags], error: GulliverError | None
    ) -> tuple[list[Bags], list[list[Bags]], GulliverError | None]:
        """Returns the data gathered by the matching `announce`, which must be the next one."""
        bags, everyone = self._gathered[0]
        same = error is not None or all(
            torch.equal(a.rows, b.rows) and torch.equal(a.offsets, b.offsets)
            for a, b in zip(bags, own, strict=True)
        )
        if not same:
            error = GulliverError(
                "these ids are not the next announced batch; with several ranks batches must be "
                "used in the order in which they were announced"
            )
        return bags, everyone, error

    def _gather(self, own: list[Bags], error: GulliverError | None) -> list[list[Bags]]:
        if self.group.size == 1:
            if error is not None:
                raise error
            return [own]
        device = self.device
        packed = torch.cat([torch.cat([b.offsets, b.rows]) for b in own]).to(device)
        sizes = [size for b in own for size in (len(b.offsets), len(b.rows))]
        gathered = gather_integers(self.group, [int(error is not None), *sizes], device)
        if any(flag for flag, *_ in gathered):
            raise_together(self.group, error, device)
        all_sizes = [sizes for _, *sizes in gathered]
        lengths = [sum(sizes) for sizes in all_sizes]
        arrived = exchange(self.group, [packed] * self.group.size, lengths)
        everyone = []
        for flat, counts in zip(arrived, all_sizes, strict=True):
            parts = flat.cpu().split(counts)
            everyone.append([Bags(r, o) for o, r in zip(parts[::2], parts[1::2], strict=True)])
        return everyone

    def _local(self, bag: CachedEmbeddingBag, everyone: list[list[Bags]]) -> Bags:
        """Returns the part of all ranks' lookups that one of this rank's caches serves."""
        rows, offsets, count = [], [], 0
        for local in bag.tables:
            number = next(n for n, t in enumerate(self.tables) if t.name == local.name)
            begin, stop = self._rows(self.tables[number])
            single = self.placements[local.name].kind == "row"
            for bags in (of[number] for of in everyone):
                wanted, starts = bags.rows, bags.offsets
                if single:
                    wanted = wanted[(wanted >= begin) & (wanted < stop)] - begin
                    starts = torch.arange(len(wanted))
                rows.append(torch.where(wanted < 0, -1, wanted + local.first))
                offsets.append(starts + count)
                count += len(wanted)
        return Bags(torch.cat(rows), torch.cat(offsets))

    # Exchange

    def _found(
        self, everyone: list[list[Bags]], error: GulliverError | None
    ) -> tuple[dict[int, Tensor], GulliverError | None]:
        """Looks up the rows that all ranks need from this one, if they fit into the cache."""
        found: dict[int, Tensor] = {}
        if error is not None:
            return found, error
        for bag in self._bags():
            try:
                found[id(bag)] = bag.looked_up(self._local(bag, everyone))
            except GulliverError as failed:
                return found, failed
        return found, None

    def _take_back(self, found: Mapping[int, Tensor]) -> None:
        """Unpins the rows of a batch that does not fit on every rank."""
        for bag in self._bags():
            if found.get(id(bag)) is not None and found[id(bag)].requires_grad:
                bag.release(1)

    def _outgoing(
        self,
        found: Mapping[int, Tensor],
        everyone: list[list[Bags]],
        rank: int,
        error: GulliverError | None,
    ) -> Tensor:
        """Returns the data to send to a rank, or zeros of the same size after an error."""
        if error is not None:
            zeros = self.anchor.detach().new_zeros(self._count(self.group.rank, everyone[rank]))
            return flagged([zeros], error, self.anchor.detach())
        return flagged(self._pieces(found, everyone, rank), None, self.anchor.detach())

    def _pieces(
        self, found: Mapping[int, Tensor], everyone: list[list[Bags]], rank: int
    ) -> list[Tensor]:
        """Returns the lookups that another rank needs, by table."""
        pieces = []
        for bag in self._bags():
            output, place = found[id(bag)], 0
            for local in bag.tables:
                number = next(n for n, t in enumerate(self.tables) if t.name == local.name)
                for other, bags in enumerate(of[number] for of in everyone):
                    count = self._wanted(number, bags, self.group.rank)
                    if other == rank:
                        pieces.append(output[place : place + count])
                    place += count
        return pieces

    def _wanted(self, number: int, bags: Bags, holder: int) -> int:
        """Number of vectors that a rank sends for the bags of a table."""
        table = self.tables[number]
        if self._kind(table) != "row":
            return len(bags)
        begin, stop = share(table.rows, holder, self.group.size)
        return int(((bags.rows >= begin) & (bags.rows < stop)).sum())

    def _sent_by(self, holder: int) -> list[tuple[int, int]]:
        """Tables whose data a rank sends, each with the width of its part, in sending order."""
        wide, narrow = [], []
        for number, table in enumerate(self.tables):
            place = self.placements[table.name]
            if place.kind == "column":
                begin, stop = share(self.dim, holder, self.group.size)
                narrow.append((number, stop - begin))
            elif place.kind == "row":
                begin, stop = share(table.rows, holder, self.group.size)
                wide += [(number, self.dim)] if begin < stop else []
            elif place.rank == holder:
                wide.append((number, self.dim))
        return wide + narrow

    def _count(self, holder: int, own: list[Bags]) -> int:
        return sum(self._wanted(n, own[n], holder) * width for n, width in self._sent_by(holder))

    def _assembled(self, arriving: Sequence[Tensor], own: list[Bags]) -> Tensor:
        """Assembles the bags of this rank's samples from the received data."""
        parts: list[list[Tensor]] = [[] for _ in self.tables]
        for holder, flat in enumerate(arriving):
            sent = self._sent_by(holder)
            counts = [self._wanted(number, own[number], holder) for number, _ in sent]
            sizes = [count * width for count, (_, width) in zip(counts, sent, strict=True)]
            for (number, width), piece in zip(sent, flat.split(sizes), strict=True):
                parts[number].append(piece.view(-1, width))
        made = []
        for number, table in enumerate(self.tables):
            if self._kind(table) == "row":
                made.append(self._pooled(table, own[number], torch.cat(parts[number])))
            else:
                made.append(torch.cat(parts[number], 1))
        return torch.stack(made, 1)

    def _pooled(self, table: Table, bags: Bags, rows: Tensor) -> Tensor:
        ends = torch.tensor(
            [share(table.rows, r, self.group.size)[1] for r in range(self.group.size)]
        )
        real = bags.rows >= 0
        holders = torch.searchsorted(ends, bags.rows[real], right=True)
        order = holders.argsort(stable=True)
        slots = torch.full(bags.rows.shape, len(rows))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        slots[real] = places
        device, padding = rows.device, None if bool(real.all()) else len(rows)
        lookup = Lookup(slots.to(device), bags.offsets.to(device), padding, self.mode, None, 2.0)
        return cast(Tensor, Pool.apply(torch.cat([rows, rows.new_zeros(1, self.dim)]), lookup))


def _everyone() -> RankGroup:
    if not dist.is_initialized():
        return RankGroup()
    return RankGroup(tuple(range(dist.get_world_size())), dist.get_rank())
