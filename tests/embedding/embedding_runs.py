"""Training of one table, cached and whole, on the same batches: what tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.embedding import CachedEmbeddingBag, LookAhead, RowWiseAdagrad

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(
        p, lr=0.2, lr_decay=0.01, initial_accumulator_value=0.1
    ),
    "row-wise adagrad": lambda p: RowWiseAdagrad(p, lr=0.2, lr_decay=0.01),
    "sparse adam": lambda p: torch.optim.SparseAdam(p, lr=0.05),
}


@dataclass
class Step:
    """A batch: ids in bags, weights of the ids, and the gradient of the output."""

    ids: Tensor
    offsets: Tensor
    weights: Tensor
    gradient: Tensor


def steps(rows: int, dim: int, count: int, bags: int = 6, seed: int = 0) -> list[Step]:
    """Batches with rows that occur several times, and empty bags."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        sizes = torch.randint(0, 5, (bags,), generator=draw)
        ids = (torch.rand(int(sizes.sum()), generator=draw) ** 2.5 * rows).long()
        offsets = sizes.cumsum(0) - sizes
        weights = torch.rand(len(ids), generator=draw)
        made.append(Step(ids, offsets, weights, torch.randn(bags, dim, generator=draw)))
    return made


def most_rows(batches: list[Step]) -> int:
    """The smallest legal cache."""
    return max(len(batch.ids.unique()) for batch in batches)


def train(
    table: nn.Module, optimizer: Any, batches: Iterator[Step] | LookAhead[Step], weighted: bool
) -> list[Tensor]:
    """Trains a table on batches and returns all outputs."""
    outputs = []
    for step in batches:
        optimizer.zero_grad()
        output = table(step.ids, step.offsets, step.weights if weighted else None)
        output.backward(step.gradient)
        if not table.weight.grad.is_sparse:  # type: ignore[union-attr]
            _sparse_in_place(table.weight, step.ids)  # type: ignore[arg-type]
        optimizer.step()
        outputs.append(output.detach().clone())
    return outputs


def _sparse_in_place(weight: Tensor, ids: Tensor) -> None:
    """Gives torch's table, which has a dense gradient in mode max, that of the batch's rows."""
    rows = ids.unique()
    values = weight.grad[rows]  # type: ignore[index]
    weight.grad = torch.sparse_coo_tensor(rows[None], values, weight.shape).coalesce()


def whole_run(
    mode: str, name: str, batches: list[Step], first: Tensor, weighted: bool
) -> tuple[list[Tensor], dict[str, Any], dict[str, Any]]:
    """Trains torch's own EmbeddingBag with torch's own optimizer."""
    table = nn.EmbeddingBag(*first.shape, mode=mode, sparse=mode != "max", _weight=first.clone())
    optimizer = OPTIMIZERS[name](table.parameters())
    outputs = train(table, optimizer, iter(batches), weighted)
    return outputs, table.state_dict(), optimizer.state_dict()


def cached(
    mode: str, name: str, first: Tensor, slots: int, **options: Any
) -> tuple[CachedEmbeddingBag, torch.optim.Optimizer]:
    """Makes a cached table and its optimizer."""
    table = CachedEmbeddingBag(*first.shape, mode=mode, _weight=first, cache=slots, **options)
    optimizer = OPTIMIZERS[name](table.parameters())
    table.attach(optimizer)
    return table, optimizer
