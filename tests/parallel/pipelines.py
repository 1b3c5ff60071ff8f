"""Small pipelines, and one process beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import World
from gulliver.comm.groups import ALONE, RankGroup
from gulliver.parallel.pipeline import Pipeline, cut, make_stage, stack_of, stages_by_rank
from gulliver.parallel.pipeline.stage import checkpoint_blocks
from tests.hybrid import hybrid_models
from tests.references import computed_once

BAR = 1e-12


class Residual(nn.Module):
    """A block of a plain stack."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def plain(layers: int = 6, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Blocks of different sizes."""
    torch.manual_seed(3)
    return nn.Sequential(*(Residual(6, 3 + 4 * (n % 3)) for n in range(layers))).to(dtype)


def build(family: str, layers: int) -> Any:
    if family == "plain":
        return plain(layers)
    return hybrid_models.build(family, layers=layers)


def batch_of(family: str, size: int, seed: int = 0, length: int = 12) -> Any:
    if family == "plain":
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(size, length, 6, generator=generator, dtype=torch.float64)
    return hybrid_models.batch(family, size, seed, length)


def criterion(family: str) -> Callable[[Any, Any], Tensor]:
    """A mean over samples, in the dtype of the model."""

    def loss(outputs: Any, given: Any) -> Tensor:
        if family in ("plain", "stdit3"):
            ramp = torch.linspace(-1, 1, outputs[0].numel(), dtype=outputs.dtype)
            return (outputs - ramp.view_as(outputs[0])).square().mean()
        return hybrid_models.precise_loss(family, outputs.logits, given)

    return loss


def rank_group_of(world: World) -> RankGroup:
    return RankGroup(tuple(range(world.size)), world.rank) if world.size > 1 else ALONE


def pipeline_of(
    world: World,
    model: nn.Module,
    style: str = "1f1b",
    micro_batches: int | None = None,
    chunks: int | None = None,
    at: list[int] | None = None,
    **stack: Any,
) -> Pipeline:
    numbers = stages_by_rank(style, world.size, chunks)
    found = stack_of(model, **stack)
    cuts = cut(model, found, sum(map(len, numbers)), at=at)
    stage = make_stage(model, found, cuts, rank_group_of(world), numbers)
    stage.share_tied()
    return Pipeline(stage, style, micro_batches)


def call(model: nn.Module, data: Any) -> Any:
    return model(**data) if isinstance(data, dict) else model(data)


@computed_once
def reference(family: str, layers: int, data: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Loss, gradients and outputs of one process."""
    model = build(family, layers)
    outputs = call(model, data)
    loss = criterion(family)(outputs, data)
    loss.backward()
    gradients = {n: grad_of(p) for n, p in model.named_parameters()}
    return loss.detach(), gradients, getattr(outputs, "logits", outputs).detach()


def grad_of(parameter: Tensor) -> Tensor:
    """Zeros where there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def gradients_of(pipe: Pipeline) -> dict[str, Tensor]:
    """This rank's, tied ones summed."""
    found = {n: grad_of(p) for n, p in pipe.stage.named_parameters().items() if p.requires_grad}
    pipe.stage.sum_tied({n: g for n, g in found.items() if n in pipe.stage.tied})
    return found


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3))


def one_step(
    world: World, family: str, style: str, layers: int, size: int, **options: Any
) -> tuple[float, dict[str, float]]:
    """Errors of the loss and of each of this rank's gradients."""
    recompute = options.pop("recompute", False)
    data = batch_of(family, size)
    loss, wanted, _ = reference(family, layers, data)
    pipe = pipeline_of(world, build(family, layers), style, **options)
    if recompute:
        checkpoint_blocks(pipe.stage)
    found = pipe.run(data, criterion(family))
    assert found["outputs"] is None
    gradients = gradients_of(pipe)
    errors = {n: difference(g, wanted[n]) for n, g in gradients.items()}
    assert set(wanted) >= set(errors)
    return difference(found["loss"], loss), errors


def check(results: list[tuple[float, dict[str, float]]], family: str, layers: int) -> None:
    """All losses and gradients are exact, and no gradient is missing."""
    names = {n for n, p in build(family, layers).named_parameters() if p.requires_grad}
    for loss, errors in results:
        assert loss <= BAR
        assert errors, "a stage has parameters"
        assert max(errors.values()) <= BAR, max(errors.items(), key=lambda e: e[1])
    assert set().union(*(errors for _, errors in results)) == names
