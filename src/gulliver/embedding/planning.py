"""Plans the placement of tables on ranks, and initializes rows independently of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gulliver.embedding.inputs import Table
from gulliver.errors import GulliverError, check_known, nearest
from gulliver.hardware.cluster import Cluster
from gulliver.hardware.operators import LookupLoad, lookup_seconds
from gulliver.solve.rows import index_bytes
from gulliver.solve.tables import TableOption, place_tables

BLOCK = 4096  # number of rows that are initialized from one seed


@dataclass(frozen=True)
class TablePlacement:
    """The placement of a table: by column, by row, or whole on one rank."""

    # ``whole``, ``column`` or ``row``.
    kind: str
    # Rank that holds it, if it is whole.
    rank: int = 0

    @classmethod
    def read(cls, text: str, ranks: int) -> TablePlacement:
        """Parses ``column``, ``row`` or ``whole:RANK``."""
        kind, _, rank = text.partition(":")
        if kind not in ("whole", "column", "row") or (kind == "whole") != bool(rank):
            right = nearest(text, ["column", "row", "whole:0"])
            raise GulliverError(f"unknown placement {text!r}: {right}")
        if rank and not (rank.isdigit() and int(rank) < ranks):
            raise GulliverError(
                f"placement {text!r} names an unknown rank; the ranks are 0 to {ranks - 1}"
            )
        return cls(kind, int(rank or 0))


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the range [begin, end) of rows or columns on a rank."""
    return size * rank // ranks, size * (rank + 1) // ranks


class FirstRows:
    """Initial values of rows, independent of the number of ranks."""

    def __init__(self, tables: list[Table], dim: int, given: Tensor | None, seed: int) -> None:
        rows = tables[-1].first + tables[-1].rows
        if given is not None and tuple(given.shape) != (rows, dim):
            raise GulliverError(
                f"_weight has shape {tuple(given.shape)}, but the tables have {(rows, dim)}"
            )
        self._tables = {table.name: (n, table) for n, table in enumerate(tables)}
        self._dim, self._given, self._seed = dim, given, seed
        self.dtype = torch.float32 if given is None else given.dtype

    def rows(self, name: str, begin: int, stop: int) -> Tensor:
        number, table = self._tables[name]
        if self._given is not None:
            return self._given[table.first + begin : table.first + stop].detach().cpu()
        blocks = []
        for block in range(begin // BLOCK, -(-stop // BLOCK)):
            draw = torch.Generator().manual_seed(_seed_of(self._seed, number, block))
            values = torch.randn(BLOCK, self._dim, generator=draw, dtype=self.dtype)
            first = block * BLOCK
            blocks.append(values[max(begin - first, 0) : stop - first])
        made = torch.cat(blocks)
        if table.padding is not None and begin <= table.padding < stop:
            made[table.padding - begin] = 0
        return made


def _seed_of(*numbers: int) -> int:
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % (2**63 - 1)
    return seed


# Chooses table placements and estimates their cost before any memory is allocated.
#
# `plan_tables` picks a placement for each table (whole on a rank, by columns, by rows) that
# minimizes the time of the slowest rank within the memory limits. The report lists bytes and
# seconds per table and per rank, computed from the rates of the cluster.


STATE = {"sgd": 0.0, "adagrad": 1.0, "row-wise adagrad": 0.0, "sparse adam": 2.0}
"""Optimizer state elements per row element; row-wise Adagrad has one element per row instead."""
ITEM = 4
SLOT_BYTES = 4  # device bytes per slot in addition to its record, for the index of its row
CRITEO_1TB = (
    *(45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10),
    *(2209, 11267, 128, 4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35),
)
"""Rows of the 26 tables of the Criteo 1TB click logs, without a limit: 177,944,275 in total."""
CRITEO_KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992),
    *(5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the 26 tables of the Criteo Kaggle data: 33,762,577 in total."""
DATA_SETS = {"criteo-1tb": CRITEO_1TB, "criteo-kaggle": CRITEO_KAGGLE}


@dataclass(frozen=True)
class TablesJob:
    """Tables to place, and their workload.

    Attributes:
        tables: number of rows by table name.
        dim: width of a row.
        ranks: number of ranks.
        batch: global batch size in samples.
        ids: ids per sample in each table.
        cache: fraction of a table's rows on the device.
        hit_rate: fraction of lookups that hit the cache.
        optimizer: name of an optimizer in `STATE`.
        host_bytes: bytes of host memory or disk per rank; None for no limit.
    """

    tables: Mapping[str, int]
    dim: int
    ranks: int = 1
    batch: int = 16384
    ids: float = 1.0
    cache: float = 0.01
    hit_rate: float = 0.9
    optimizer: str = "sgd"
    host_bytes: int | None = None


@dataclass(frozen=True)
class PlannedTable:
    """A table with its placement."""

    name: str
    # Number of rows.
    rows: int
    # Placement, as accepted by `ShardedEmbeddingBag`.
    placement: str
    # Host bytes of its records per rank.
    host_bytes: tuple[int, ...]
    # Device bytes of its slots and their states per rank.
    device_bytes: tuple[int, ...]
    # Seconds per step on each rank.
    seconds: tuple[float, ...]
    # Bytes sent by each rank in a forward.
    sent: tuple[float, ...]
    # Seconds on the slowest rank, by placement.
    instead: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RankCache:
    """A cache on a rank, shared by its whole tables and row shards, or by its column shards."""

    rank: int
    # Capacity in rows.
    slots: int
    # Total number of rows.
    rows: int
    # Number of tables.
    tables: int
    # Maximum number of distinct rows that a batch may need from it at once.
    most: int


@dataclass(frozen=True)
class TablesPlan:
    """A placement of all tables.

    Attributes:
        job: the planned workload.
        tables: tables in the order of the job.
        index_bytes: host bytes of each rank's index.
        seconds: seconds per step on each rank, over all tables.
        bound: lower bound on the seconds of any placement.
        parts: seconds of the slowest rank, by component.
    """

    job: TablesJob
    tables: tuple[PlannedTable, ...]
    index_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    bound: float
    parts: Mapping[str, float]

    @property
    def placement(self) -> dict[str, str]:
        """Placements by table name, as passed to `ShardedEmbeddingBag`."""
        return {table.name: table.placement for table in self.tables}

    @property
    def caches(self) -> tuple[RankCache, ...]:
        """Caches of all ranks, as `ShardedEmbeddingBag` creates them."""
        found = []
        for rank in range(self.job.ranks):
            for columns in (False, True):
                of = [t for t in self.tables if (t.placement == "column") == columns]
                held = [_shape(self.job, t.rows, t.placement, rank)[0] for t in of]
                held = [rows for rows in held if rows]
                if held:
                    uses = math.ceil(self.job.batch * self.job.ids)
                    slots = max(int(self.job.cache * sum(held)), 1)
                    most = sum(min(rows, uses) for rows in held)
                    found.append(RankCache(rank, slots, sum(held), len(held), most))
        return tuple(found)

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """Device bytes of each rank: slots, states and slot indices."""
        return tuple(map(sum, zip(*(t.device_bytes for t in self.tables), strict=True)))

    @property
    def host_bytes(self) -> tuple[int, ...]:
        """Host bytes of each rank: all records."""
        return tuple(map(sum, zip(*(t.host_bytes for t in self.tables), strict=True)))


def plan_tables(job: TablesJob, cluster: Cluster) -> TablesPlan:
    """Chooses how ranks share tables.

    Args:
        job: tables to place, and their workload.
        cluster: machines, with as many ranks as the job.

    Raises:
        GulliverError: the optimizer is unknown, a number is out of range, a table fits on no rank,
            or a batch fits into no cache.
    """
    _check(job)
    options = [
        [_option(job, cluster, rows, name) for name in _names(job)] for rows in job.tables.values()
    ]
    room = job.host_bytes if job.host_bytes is not None else 2**62
    placed = place_tables(options, room)
    tables = []
    for (name, rows), option, every in zip(
        job.tables.items(), placed.options, options, strict=True
    ):
        loads = [_load(job, rows, option.name, rank) for rank in range(job.ranks)]
        tables.append(
            PlannedTable(
                name,
                rows,
                option.name,
                option.nbytes,
                tuple(_device_bytes(job, rows, option.name, rank) for rank in range(job.ranks)),
                option.seconds,
                tuple(load.sent for load in loads),
                _instead(every),
            )
        )
    slowest = placed.seconds.index(placed.slowest)
    parts: dict[str, float] = {}
    for table in tables:
        load = _load(job, table.rows, table.placement, slowest)
        for part, seconds in lookup_seconds(cluster, load).items():
            parts[part] = parts.get(part, 0.0) + seconds
    indices = tuple(_index(job, tables, rank) for rank in range(job.ranks))
    plan = TablesPlan(job, tuple(tables), indices, placed.seconds, placed.bound, parts)
    for cache in plan.caches:
        if cache.slots < cache.tables and job.ids >= 1:
            raise GulliverError(
                f"rank {cache.rank} has a cache of {cache.slots} slots for {cache.tables} tables, "
                "but a batch needs at least one row of each; use "
                f"cache={cache.tables / cache.rows:.3g} or more"
            )
    return plan


def _check(job: TablesJob) -> None:
    check_known("optimizer", job.optimizer, STATE)
    if not job.tables:
        raise GulliverError(
            "there are no tables to plan; pass at least one with its number of rows"
        )


def _names(job: TablesJob) -> list[str]:
    if job.ranks == 1:
        return ["whole:0"]
    found = [f"whole:{rank}" for rank in range(job.ranks)]
    # Row-wise Adagrad needs whole rows, and a row narrower than the number of ranks cannot be
    # split.
    if job.optimizer != "row-wise adagrad" and job.dim >= job.ranks:
        found.append("column")
    return [*found, "row"]


def _shape(job: TablesJob, rows: int, name: str, rank: int) -> tuple[int, float]:
    if name == "row":
        begin, stop = share(rows, rank, job.ranks)
        return stop - begin, job.dim
    if name == "column":
        begin, stop = share(job.dim, rank, job.ranks)
        return rows, stop - begin
    return (rows, job.dim) if name == f"whole:{rank}" else (0, 0)


def _load(job: TablesJob, rows: int, name: str, rank: int) -> LookupLoad:
    held, width = _shape(job, rows, name, rank)
    uses = job.batch * job.ids * held / rows
    # Ranks exchange bags, or rows where no rank has all rows of a bag.
    vectors = uses if name == "row" else job.batch * (held > 0)
    sent = ITEM * vectors * width * (job.ranks - 1) / job.ranks
    missed = min(uses * (1 - job.hit_rate), held)
    return LookupLoad(uses, width, _state(job, width), missed, sent)


def _state(job: TablesJob, width: float) -> float:
    return float(width > 0) if job.optimizer == "row-wise adagrad" else STATE[job.optimizer] * width


def _slots(job: TablesJob, held: int) -> int:
    return max(int(job.cache * held), 1) if held else 0


def _device_bytes(job: TablesJob, rows: int, name: str, rank: int) -> int:
    held, width = _shape(job, rows, name, rank)
    return _slots(job, held) * (int(ITEM * (width + _state(job, width))) + SLOT_BYTES)


def _option(job: TablesJob, cluster: Cluster, rows: int, name: str) -> TableOption:
    loads = [_load(job, rows, name, rank) for rank in range(job.ranks)]
    seconds = tuple(sum(lookup_seconds(cluster, load).values()) for load in loads)
    shapes = [_shape(job, rows, name, rank) for rank in range(job.ranks)]
    nbytes = tuple(int(ITEM * held * (width + _state(job, width))) for held, width in shapes)
    return TableOption(name, seconds, nbytes)


def _instead(options: list[TableOption]) -> dict[str, float]:
    found: dict[str, float] = {}
    for option in options:
        found.setdefault(option.name.partition(":")[0], max(option.seconds))
    return found


def _index(job: TablesJob, tables: list[PlannedTable], rank: int) -> int:
    """Bytes of a rank's row indices: one for whole tables and row shards, one for columns."""
    total = 0
    for columns in (False, True):
        held = [
            _shape(job, t.rows, t.placement, rank)[0]
            for t in tables
            if (t.placement == "column") == columns
        ]
        if sum(held):
            total += index_bytes(sum(held), sum(_slots(job, rows) for rows in held))
    return total
