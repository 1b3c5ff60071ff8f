"""The cells of tensor parallelism: models x modes x ranks, and one process to hold them to.

`errors_of(world, family, mode, dtype)` runs a model on a rank, with batches of two lengths, and
returns its errors; `rows(pool)` gives the lines of a table of them.
`tests/parallel/test_tensor.py` asserts each cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import World
from gulliver.comm.groups import RankGroup
from gulliver.memory import region_of
from gulliver.memory.parts import Region
from gulliver.parallel.tensor import apply_tensor, plan_tensor
from tests.hybrid.hybrid_models import DECODERS, FAMILIES, batch, build, precise_loss

BARS = {torch.float64: 1e-12, torch.float32: 1e-5}
MODES = (None, "split_gather", "ring")
BATCHES = ((12, False), (9, True))
"""Tokens, and whether a sample is padded."""


@dataclass(frozen=True)
class Cell:
    """A model cut over ranks."""

    family: str
    mode: Any
    ranks: int


def cells(families: tuple[str, ...] = FAMILIES, ranks: tuple[int, ...] = (2, 3, 4)) -> list[Cell]:
    """All that is supported: the STDiT's tokens are cut by sequence parallelism instead."""
    return [
        Cell(family, mode, size)
        for family in families
        for mode in (MODES if family != "stdit3" else MODES[:1])
        for size in ranks
    ]


def rank_group_of(world: World) -> RankGroup:
    """All ranks of the world."""
    return RankGroup(tuple(range(world.size)), world.rank, None)


def part(whole: Tensor, region: Region | None) -> Tensor:
    """What a rank holds of a whole tensor."""
    if region is None:
        return whole
    runs = [whole.narrow(region.dim, start, stop - start) for start, stop in region.runs]
    return torch.cat(runs, region.dim)


def backward(model: nn.Module, family: str, data: dict[str, Tensor]) -> list[Tensor]:
    """Output and loss; gradients are left at the parameters."""
    model.zero_grad()
    out = model(**data)
    logits = out if isinstance(out, Tensor) else out.logits
    loss = precise_loss(family, logits, data)
    loss.backward()
    return [logits.detach(), loss.detach()]


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest element (of near-zeros, to a thousandth)."""
    if not bool(found.isfinite().all()):
        return float("inf")
    scale = max(float(expected.abs().max()), 1e-3) if expected.numel() else 1.0
    return float((found - expected).abs().max()) / scale if found.numel() else 0.0


def compare(model: nn.Module, whole: nn.Module, family: str, data: Any) -> dict[str, float]:
    """Errors of output, loss and every gradient of this rank's parameters."""
    expected, found = backward(whole, family, data), backward(model, family, data)
    errors = {"output": relative(found[0], expected[0]), "loss": relative(found[1], expected[1])}
    wholes, parts = dict(whole.named_parameters()), dict(model.named_parameters())
    assert wholes.keys() == parts.keys()
    for name, parameter in parts.items():
        grad = wholes[name].grad
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None and parameter.grad is not None:
            errors[name] = relative(parameter.grad, part(grad, region_of(parameter)))
    return errors


def errors_of(
    world: World, family: str, mode: Any, dtype: torch.dtype, checkpointing: bool = False
) -> dict[str, float]:
    """The worst errors of a model on this rank: output, loss, gradients."""
    whole, model = build(family, dtype), build(family, dtype)
    apply_tensor(model, plan_tensor(model, world.size), rank_group_of(world), mode)
    if checkpointing:
        model.gradient_checkpointing_enable()
    worst = {"output": 0.0, "loss": 0.0, "gradients": 0.0}
    for length, padded in BATCHES:
        padded = padded and family in (*DECODERS, "t5", "bert")
        data = batch(family, length=length, padded=padded, dtype=dtype)
        for name, error in compare(model, whole, family, data).items():
            kind = name if name in worst else "gradients"
            worst[kind] = max(worst[kind], error)
    return worst


HEADER = (
    "| model | sequence | ranks | output, 64 | gradients, 64 | output, 32 | gradients, 32 | |\n"
    + "|---" * 8
    + "|\n"
)
"""Of a table of `rows`: errors in float64 and in float32."""


def rows(pool: Any, asked: list[Cell] | None = None) -> Iterator[str]:
    """A line for each cell: the largest error on the worst rank."""
    for cell in asked or cells():
        shown, holds = [], True
        for dtype, bar in BARS.items():
            found = pool.run(errors_of, cell.ranks, cell.family, cell.mode, dtype)
            worst = [max(f[kind] for f in found) for kind in ("output", "gradients")]
            holds &= max(worst) <= bar
            shown += [f"{error:.1e}" for error in worst]
        head = f"| {cell.family} | {cell.mode or 'whole'} | {cell.ranks} | "
        yield f"{head}{' | '.join(shown)} | {'' if holds else '**over**'} |"
