"""A small model with everything that breaks memory managers, trained plainly and in tiers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.memory.manager import Manager
from gulliver.memory.stores import DiskStore
from gulliver.parallel import ZeroOptimizer
from gulliver.parallel.optimizer import named_trainables
from gulliver.parallel.zero.checkpoint import relayout

Make = Callable[[Any], torch.optim.Optimizer]
WIDTH, DEPTH, WORDS = 31, 16, 33
CHUNK = 4096
"""Bytes: a layer of the model, and a page of the disk."""


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


class Odd(nn.Module):
    """Tied, frozen, unused and conditional parameters, a low-rank adapter, a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(WIDTH, 3) / 6)
        self.up = nn.Parameter(torch.randn(3, WIDTH) / 6)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, skip: int = -1) -> Tensor:
        x = self.embed(ids)
        x = x + self.frozen(x) + x @ self.down @ self.up
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = x + torch.tanh(layer(x))
        x = x + self.layers[3](x)
        return F.linear(self.norm(x), self.embed.weight)


ORDER = [
    name
    for part in ("embed", "frozen", "down", "up", "layers.3", "layers", "norm")
    for name, _ in Odd().named_parameters()
    if name.startswith(part)
]


def batch(number: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randint(WORDS, (3, 5), generator=generator)


def loss_of(model: nn.Module, number: int, rank: int = 0, apart: int = 0) -> Tensor:
    """The loss; another layer has no gradient in every step and, `apart`, on every rank."""
    ids = batch(number, rank)
    logits = model(ids, skip=(number + apart * rank) % DEPTH)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.roll(1, 1).flatten())


def groups_of(model: Odd) -> list[dict[str, Any]]:
    some = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    return [{"params": others}, {"params": some, "weight_decay": 0.0, "lr": 3e-3}]


def states_of(model: nn.Module) -> int:
    """Bytes of parameters, gradients and two moments, all in float32."""
    return sum((16 if p.requires_grad else 4) * p.numel() for p in model.parameters())


@contextmanager
def manager_of(model: nn.Module, share: float, disk: bool = True) -> Iterator[Manager]:
    """A memory manager with room for a share of a model's states."""
    budget, room = states_of(model), 2 * states_of(model) + 2**20
    store = DiskStore(tempfile.gettempdir(), room) if disk else None
    manager = Manager(int(share * budget) if disk else room, "cpu", store)
    try:
        yield manager
    finally:
        manager.close()


def model_of(dtype: torch.dtype = torch.float32) -> Odd:
    torch.manual_seed(0)
    return Odd().to(dtype)


def boosted(
    model: Odd,
    make: Make = adamw,
    manager: Manager | None = None,
    ordered: bool = False,
    **options: Any,
) -> ZeroOptimizer:
    """An optimizer of the model; `ordered` lays its chunks out in the order of use."""
    inner = make(groups_of(model))
    names = named_trainables(model, inner)
    frozen = {p: name for name, p in model.named_parameters() if p not in names}
    options = {"stage": 3, "chunk_bytes": CHUNK, "frozen": frozen, **options}
    optimizer = ZeroOptimizer(inner, names, manager=manager, **options)
    optimizer.watch(model)
    if ordered:
        relayout(optimizer.shards, ORDER, options["chunk_bytes"])
    return optimizer


def steps(
    model: Odd,
    optimizer: Any,
    begin: int = 0,
    end: int = 4,
    rank: int = 0,
    parts: int = 1,
    apart: int = 0,
) -> list[float]:
    """Trains; with several parts each step accumulates as many batches."""
    found = []
    for number in range(begin, end):
        for part in range(parts - 1):
            with optimizer.no_sync():
                backward(optimizer, loss_of(model, 7 * number + part, rank, apart) / parts)
        loss = loss_of(model, number, rank, apart)
        backward(optimizer, loss / parts)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def backward(optimizer: Any, loss: Tensor) -> None:
    optimizer.backward(loss) if isinstance(optimizer, ZeroOptimizer) else loss.backward()


def plain(make: Make = adamw, max_norm: float = math.inf, count: int = 4) -> dict[str, Tensor]:
    """What torch alone makes of the model, by names as `result` has them."""
    model = model_of()
    optimizer = make(groups_of(model))
    for number in range(count):
        loss_of(model, number).backward()
        if math.isfinite(max_norm):
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}.{key}"] = value.clone()
    return found


def result(model: Odd, optimizer: ZeroOptimizer) -> dict[str, Tensor]:
    """Parameters and optimizer state; every rank calls it."""
    found = {name: p.detach().clone() for name, p in model.state_dict().items()}
    for name, entries in optimizer.export_state().items():
        values = {f"{name}.{k}": v for k, v in entries.items() if isinstance(v, Tensor)}
        found |= {name: value.clone() for name, value in values.items()}
    return found


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of what is not the same to the bit."""
    names = [n for n in expected if n not in found or not torch.equal(found[n], expected[n])]
    return names + [n for n in found if n not in expected]
