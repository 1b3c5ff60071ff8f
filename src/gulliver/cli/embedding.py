"""``gulliver embedding plan``: predicts the cost of tables on the ranks of a cluster.

Torch is not imported at the top level here: ``--help`` reads this module.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from gulliver.errors import UsageError
from gulliver.options import AT_LEAST_1, SHARE, Options, Range, Size, byte_size, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from gulliver.embedding.planning import TablesPlan


@dataclass(frozen=True)
class EmbeddingConfig(Options):
    """Predicts how tables are distributed over ranks, with bytes and seconds."""

    tables: tyro.conf.Positional[tuple[str, ...]] = ("criteo-1tb",)
    """Dataset, criteo-1tb or criteo-kaggle, or tables as NAME=ROWS."""
    dim: Annotated[int, AT_LEAST_1] = 128
    """Embedding dimension."""
    cluster: str = "h100x1"
    """Machines: h100x8, a described name, or a file written by gulliver probe."""
    batch_size: Annotated[int, AT_LEAST_1] = 16384
    """Global batch size: samples per step over all ranks."""
    ids: Annotated[float, Range(0, open_below=True)] = 1.0
    """Ids per sample in each table."""
    cached_share: Annotated[float, Range(0, 1, open_below=True)] = 0.01
    """Fraction of the rows that is cached on the device."""
    hit_rate: Annotated[float, SHARE] = 0.9
    """Fraction of lookups that hit the cache; benchmarks.embedding measures it."""
    optimizer: Literal["sgd", "adagrad", "row-wise adagrad", "sparse adam"] = "sgd"
    """Optimizer of the rows, whose state is stored with them."""
    host_memory: Annotated[str | None, Size()] = None
    """Host memory, or disk, for each rank's rows, such as 900GiB; by default unlimited."""
    json: bool = False
    """Print JSON, in seconds and bytes."""


def embedding_command(config: EmbeddingConfig) -> int:
    from gulliver.embedding.planning import TablesJob, plan_tables
    from gulliver.hardware.probe import named_cluster
    from gulliver.jobs.display import print_json

    cluster = named_cluster(config.cluster)
    host = None
    if config.host_memory is not None:
        host = byte_size("--host-memory", config.host_memory)
    job = TablesJob(
        _tables(config.tables),
        config.dim,
        cluster.size,
        config.batch_size,
        config.ids,
        config.cached_share,
        1.0 if config.cached_share == 1 else config.hit_rate,
        config.optimizer,
        host,
    )
    plan = plan_tables(job, cluster)
    if config.json:
        made = {**asdict(plan), "device_bytes": plan.device_bytes, "host_bytes": plan.host_bytes}
        print_json({**made, "placement": plan.placement})
    else:
        _show(plan, cluster.name)
    return 0


def _tables(given: tuple[str, ...]) -> dict[str, int]:
    from gulliver.embedding.planning import DATA_SETS

    found: dict[str, int] = {}
    for text in given:
        name, equals, rows = text.partition("=")
        if text in DATA_SETS:
            found |= {f"{text}-{n + 1}": count for n, count in enumerate(DATA_SETS[text])}
        elif name in found:
            raise UsageError(f"table {name!r} is defined twice; use unique names")
        elif equals and name and rows.replace("_", "").isdigit():
            found[name] = int(rows)
        else:
            known = ", ".join(DATA_SETS)
            raise UsageError(
                f"table {text!r} is invalid; use NAME=ROWS, or one of the datasets {known}"
            )
    return found


def _show(plan: TablesPlan, cluster: str) -> None:
    from rich.table import Table

    from gulliver.jobs.display import report_console

    console = report_console()
    job, rows = plan.job, sum(plan.job.tables.values())
    console.print(
        f"{len(plan.tables)} tables, {rows:,} rows of {job.dim}, "
        f"{size_text(4 * rows * job.dim)} of weights, {job.optimizer}; {job.batch} samples a step "
        f"on {job.ranks} ranks of {cluster}; {job.cache:.3g} of the rows on the device, "
        f"{job.hit_rate:.0%} of the uses found there"
    )
    columns = ("table", "rows", "placement", "host", "device", "us", "why")
    shown = Table(*columns, title="tables (bytes of all ranks, seconds of its slowest)")
    for table in plan.tables:
        why = ", ".join(f"{name} {1e6 * s:.0f}" for name, s in table.instead.items())
        sizes = (size_text(sum(table.host_bytes)), size_text(sum(table.device_bytes)))
        slowest = f"{1e6 * max(table.seconds):.0f}"
        shown.add_row(table.name, f"{table.rows:,}", table.placement, *sizes, slowest, why)
    console.print(shown)
    ranks = Table("rank", "host", "index on host", "device", "sent", "ms", title="ranks")
    for rank in range(job.ranks):
        sent = sum(table.sent[rank] for table in plan.tables)
        ranks.add_row(
            str(rank),
            size_text(plan.host_bytes[rank]),
            size_text(plan.index_bytes[rank]),
            size_text(plan.device_bytes[rank]),
            size_text(2 * sent),
            f"{1e3 * plan.seconds[rank]:.2f}",
        )
    console.print(ranks)
    _warn_of_small_caches(plan, console)
    slowest = max(plan.seconds)
    parts = ", ".join(f"{name} {1e3 * s:.2f}" for name, s in plan.parts.items())
    console.print(
        f"slowest rank {1e3 * slowest:.2f} ms a step ({parts}); no placement is below "
        f"{1e3 * plan.bound:.2f} ms. LookAhead can overlap fetching with compute."
    )


def _warn_of_small_caches(plan: TablesPlan, console: Console) -> None:
    """Warns about caches with fewer rows than one batch may need."""
    small = [cache for cache in plan.caches if cache.slots < cache.most]
    if small:
        worst = max(small, key=lambda cache: cache.most / cache.rows)
        console.print(
            f"{len(small)} caches hold fewer rows than a batch may need: rank {worst.rank} has "
            f"{worst.slots:,} slots, and a batch of {plan.job.batch:,} samples needs up to "
            f"{worst.most:,} different rows. Batches that need more rows than slots are rejected; "
            f"with cache={worst.most / worst.rows:.3g}, all batches fit."
        )
