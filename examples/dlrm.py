"""Train a recommender (DLRM) on a click log, its tables behind a cache.

    python examples/dlrm.py                       # a click log is made, 1 % of 26 tables is cached
    python examples/dlrm.py --cache 1             # all rows in the cache: the same losses and AUC
    python examples/dlrm.py --log day_0.gz        # Criteo's own file

The last line says the area under the ROC curve of samples that were not trained on, and the time
of a step.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from criteo import Clicks, CriteoFile, write_criteo
from gulliver.embedding import CachedEmbeddingBag, LookAhead

ROWS = [20_000, 5_000, 3_000, 500, 200, 50, 30, 10, *[1_000] * 8, *[100] * 10]
DIM, BATCH, SAMPLES, HELD_OUT = 16, 128, 16_384, 16


class Dlrm(nn.Module):
    """Naumov et al. 2019: numbers and rows of tables, their products in pairs, a classifier."""

    def __init__(self, tables: CachedEmbeddingBag) -> None:
        super().__init__()
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        pairs = 27 * 26 // 2
        self.top = nn.Sequential(nn.Linear(pairs + DIM, 128), nn.ReLU(), nn.Linear(128, 1))
        self.register_buffer("pairs", torch.tril_indices(27, 27, -1))

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits of (samples, 13) numbers and (samples, 26) ids."""
        dense = self.bottom(numbers)
        x = torch.cat([dense[:, None], self.tables(ids)], 1)
        products = (x @ x.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], 1))[:, 0]


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Chance that a clicked sample has a higher score than one that is not, ties half."""
    values, place = scores.unique(return_inverse=True)
    counts = torch.bincount(place, minlength=len(values)).double()
    rank = counts.cumsum(0) - (counts - 1) / 2
    clicked = labels > 0
    n, m = int(clicked.sum()), int((~clicked).sum())
    return float((rank[place[clicked]].sum() - n * (n + 1) / 2) / (n * m))


def make(cache: float, seed: int = 0) -> tuple[Dlrm, list[torch.optim.Optimizer]]:
    """The model, and an optimizer for the tables and one for the rest."""
    torch.manual_seed(seed)
    rows = {f"C{number + 1}": count for number, count in enumerate(ROWS)}
    # A batch must fit: at most a row of each table and sample.
    least = sum(min(BATCH, count) for count in ROWS)
    slots = sum(ROWS) if cache >= 1 else max(int(cache * sum(ROWS)), least)
    # As in the paper: rows of a table of n are drawn from a range of 1 / sqrt(n).
    first = torch.cat([(2 * torch.rand(n, DIM) - 1) / n**0.5 for n in ROWS])
    model = Dlrm(CachedEmbeddingBag(rows, DIM, mode="sum", _weight=first, cache=slots))
    sparse = torch.optim.Adagrad(model.tables.parameters(), lr=0.05)
    model.tables.attach(sparse)
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    return model, [sparse, torch.optim.Adam(dense, lr=1e-3)]


def main(
    cache: float = 0.01, log: Path | str = "out/clicks.tsv", steps: int = 112, ahead: int = 4
) -> list[float]:
    """Trains on a log, and judges on its last batches; returns the losses."""
    if not Path(log).exists():
        Path(log).parent.mkdir(parents=True, exist_ok=True)
        write_criteo(log, SAMPLES, ROWS)
    batches: list[Clicks] = []
    for number, clicks in enumerate(CriteoFile(log, ROWS, BATCH)):
        if number >= steps + HELD_OUT:
            break
        batches.append(clicks)
    model, optimizers = make(cache)
    losses, seconds = [], []
    for batch in LookAhead(batches[:steps], model.tables, ahead, lambda batch: batch.ids):
        begun = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(model(batch.numbers, batch.ids), batch.labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begun)
        if len(losses) % 28 == 0:
            print(f"step {len(losses)}: loss {statistics.mean(losses[-28:]):.4f}")
    with torch.no_grad():
        held = batches[steps:]
        scores = torch.cat([model(batch.numbers, batch.ids) for batch in held])
    area = auc(scores, torch.cat([batch.labels for batch in held]))
    print(
        f"AUC {area:.4f}, {1e3 * statistics.median(seconds):.1f} ms a step, "
        f"{model.tables.counts.hit_rate:.1%} of the uses in the cache, {model.tables}"
    )
    return [*losses, area]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", type=float, default=0.01)
    parser.add_argument("--log", type=Path, default=Path("out/clicks.tsv"))
    arguments = parser.parse_args()
    main(arguments.cache, arguments.log)
