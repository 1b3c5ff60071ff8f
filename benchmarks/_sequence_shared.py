"""What the parts of the sequence benchmark share: sizes, tensors, clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._harness import Spread
from gulliver.comm import barrier
from gulliver.hardware.attention import AttentionShape as Shape

MIB = 1 << 20
PARTS = ("bytes", "overlap", "levels", "peers")


@dataclass(frozen=True)
class Options:
    """Sizes of the run."""

    heads: int = 4
    head_dim: int = 64
    local: int = 2048  # Tokens of each rank
    overlap_heads: int = 1
    overlap_local: int = 5120
    """Tokens of each rank where overlap is measured: the more, the less of a core sending takes."""
    ratios: tuple[float, ...] = (0.33, 1.0, 3.0)
    """Of sending alone over computing alone; the links are shaped so."""
    level_heads: int = 8
    level_local: int = 256
    """Tokens of each rank on two levels: few, as two ranks share a core there."""
    uplink: str = "100mbit"
    rounds: int = 5
    parts: tuple[str, ...] = PARTS
    quick: bool = False  # Small sizes, to see that it runs; the bars of times need not hold
    keep: bool = False  # Write benchmarks/results

    def sized(self) -> Options:
        """These, or the quick ones."""
        if not self.quick:
            return self
        small: dict[str, Any] = {"local": 256, "overlap_local": 2048, "level_local": 64}
        return replace(self, **small, rounds=2)


def shape_of(options: Options, ranks: int, local: int, heads: int | None = None) -> Shape:
    """A sequence of so many tokens on each of the ranks."""
    heads = options.heads if heads is None else heads
    return Shape(1, heads, heads, ranks * local, options.head_dim)


def tensors(shape: Shape, ranks: int) -> list[Tensor]:
    """This rank's q, k, v and the gradient of the output."""
    size = shape.batch, shape.heads, shape.length // ranks, shape.head_dim
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, k, v, grad = (torch.randn(size, generator=generator) for _ in range(4))
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


def settled() -> None:
    """All ranks are here, and nothing is left in their sockets."""
    barrier()
    time.sleep(0.1)
    barrier()


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds of a call that all ranks begin together."""
    barrier()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def slowest(ranks: list[Mapping[str, tuple[float, ...]]]) -> dict[str, Spread]:
    return {
        name: Spread(tuple(map(max, zip(*(rank[name] for rank in ranks), strict=True))))
        for name in ranks[0]
    }


def milli(spread: Spread) -> str:
    return f"{spread.shown('.0f', 1e-3)} ms"
