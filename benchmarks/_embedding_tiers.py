"""Two tiers on one machine: rows behind a link of a given rate, beside tables without a cache.

The link is a column that sleeps as long as its bytes would take: in the thread that moves rows, so
that compute goes on meanwhile, as it does beside a copy engine. On a GPU the host link is real, and
nothing sleeps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks._embedding_rates import power_law
from gulliver.embedding import CachedEmbeddingBag
from gulliver.embedding.records import WEIGHT, Column


@dataclass(frozen=True)
class TierConfig:
    """Work of a step."""

    rows: int = 400_000  # rows of the table
    dim: int = 64  # width of a row
    samples: int = 512  # samples of a batch
    ids: int = 8  # ids of a sample
    cache: float = 0.02  # share of the rows in the cache
    ahead: int = 8  # batches of look-ahead
    rate: float = 25e6  # bytes/s of the link; 0 for the real one
    hidden: int = 1024  # width of the layers that compute
    device: str = "cpu"  # device of cache and compute


class SlowColumn(Column):
    """A column behind a link of so many bytes/s, in both directions."""

    def __init__(self, column: Column, rate: float) -> None:
        vars(self).update(vars(column))
        self._rate = rate

    def read(self, rows: Tensor) -> Tensor:
        return self._slowly(len(rows), lambda: super(SlowColumn, self).read(rows))

    def write(self, rows: Tensor, values: Tensor) -> None:
        self._slowly(len(rows), lambda: super(SlowColumn, self).write(rows, values))

    def _slowly(self, rows: int, call: Callable[[], Tensor | None]) -> Tensor:
        begun = time.perf_counter()
        found = call()
        left = rows * self.row_bytes / self._rate - (time.perf_counter() - begun)
        if left > 0:
            time.sleep(left)
        return found  # type: ignore[return-value]


@dataclass
class Job:
    """A table, what computes on its bags, and the batches."""

    config: TierConfig
    table: nn.Module  # cached table, or torch's
    batches: list[Tensor]
    ahead: int = 0  # batches that are announced; 0 for none
    forget: bool = False  # whether nothing stays in the cache from step to step
    place: int = 0
    head: nn.Module = field(init=False)
    optimizers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        torch.manual_seed(0)
        width = config.hidden
        self.head = nn.Sequential(
            *(nn.Linear(config.dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 1),
        ).to(config.device)
        sparse = torch.optim.Adagrad(self.table.parameters(), lr=0.01)
        if isinstance(self.table, CachedEmbeddingBag):
            self.table.attach(sparse)
            if config.rate:
                columns = self.table.columns
                for name in columns:
                    columns[name] = SlowColumn(columns[name], config.rate)
            for ids in self.batches[: self.ahead]:
                self.table.announce(ids)
        self.optimizers = [sparse, torch.optim.SGD(self.head.parameters(), lr=1e-3)]

    def step(self) -> float:
        """Trains on the next batch; returns its seconds."""
        ids = self.batches[self.place]
        begun = time.perf_counter()
        table = self.table
        if isinstance(table, CachedEmbeddingBag):
            if self.ahead and self.place + self.ahead < len(self.batches):
                table.announce(self.batches[self.place + self.ahead])
            elif self.forget:
                table.flush()
                table.forget()
            bags = table(ids)
        else:
            bags = table(ids.to(self.config.device))
        loss = self.head(bags).square().mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        if self.config.device != "cpu":
            torch.cuda.synchronize()
        self.place += 1
        return time.perf_counter() - begun


def make_batches(config: TierConfig, count: int) -> list[Tensor]:
    """Draws batches of a power law over rows in a random order."""
    draw = np.random.default_rng(0)
    order = draw.permutation(config.rows)
    shape = config.samples, config.ids
    return [
        torch.from_numpy(order[power_law(draw, config.rows, shape[0] * shape[1], 1.1)]).view(shape)
        for _ in range(count)
    ]


def make_jobs(config: TierConfig, count: int) -> dict[str, Job]:
    """Makes the contestants, all from one table and on the same batches."""
    first = torch.randn(config.rows, config.dim, generator=torch.Generator().manual_seed(1))
    batches = make_batches(config, count)
    most = max(len(ids.unique()) for ids in batches)

    def cached(slots: int) -> CachedEmbeddingBag:
        return CachedEmbeddingBag(
            config.rows, config.dim, mode="sum", _weight=first, cache=slots, device=config.device
        )

    slots = max(int(config.cache * config.rows), most)
    whole = nn.EmbeddingBag(config.rows, config.dim, mode="sum", sparse=True, _weight=first.clone())
    return {
        "torch's EmbeddingBag, all in the device": Job(config, whole.to(config.device), batches),
        "cache holds all rows": Job(config, cached(config.rows), batches, config.ahead),
        "cache, look-ahead": Job(config, cached(slots), batches, config.ahead),
        "cache, on demand": Job(config, cached(slots), batches),
        "no cache, gathered on demand": Job(config, cached(most), batches, forget=True),
    }


def weight_of(job: Job) -> Tensor:
    """Returns the whole table that a job has trained."""
    state = job.table.state_dict()
    return state[WEIGHT].cpu()
