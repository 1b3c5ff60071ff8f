"""Forward and backward of a share of clips through a model that is cut into stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.booster import Booster
from gulliver.parallel import BoostedOptimizer
from gulliver.video._batches import VideoBatch
from gulliver.video._rectified_flow import RectifiedFlow

TARGET, COUNTS = "target", "counts"
"""Inputs that the loss reads and the model does not take."""


def hide_targets(model: nn.Module) -> None:
    """Drops what a micro-batch holds for the loss alone before the model's forward."""

    def hide(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {n: v for n, v in kwargs.items() if n not in (TARGET, COUNTS)}

    # Before the hooks of sequence parallelism, which refuse what they do not know.
    model.register_forward_pre_hook(hide, with_kwargs=True, prepend=True)


def run_stages(
    booster: Booster,
    model: nn.Module,
    optimizer: BoostedOptimizer | None,
    flow: RectifiedFlow,
    batch: VideoBatch,
    micro_batches: int,
    scale: float,
) -> Tensor:
    """Runs a share through the pipeline; every rank of the model calls it."""
    held = len(batch.latents)
    # Each micro-batch has a sample: where there are too few, some are shown again and not counted.
    number = torch.arange(max(held, micro_batches), device=batch.latents.device)
    given = stage_inputs(flow, batch, number % held)
    given[COUNTS] = (number < held).to(batch.latents.dtype) * batch.weight
    # The pipeline takes the mean over all rows.
    criterion = partial(stage_loss, flow, len(number) * scale)
    done = booster.execute_pipeline(iter([given]), model, criterion, optimizer)
    return done["loss"].double() / scale


def stage_inputs(flow: RectifiedFlow, batch: VideoBatch, rows: Tensor) -> dict[str, Any]:
    """What stages are called with, and what the loss reads: some clips of a batch, by number."""
    shown = flow.point(batch.latents, batch.noise, batch.timesteps, batch.generate)
    return {
        "x": shown[rows],
        "timestep": batch.timesteps[rows],
        **batch.model_inputs(rows),
        TARGET: (batch.latents - batch.noise)[rows],
    }


def stage_loss(
    flow: RectifiedFlow, factor: float, output: Tensor, micro: dict[str, Tensor]
) -> Tensor:
    """The mean loss of a micro-batch, times a factor; clips count as they are told to."""
    errors = flow.error(output, micro[TARGET], micro["x_mask"])
    return (errors * micro.get(COUNTS, 1.0)).mean() * factor
