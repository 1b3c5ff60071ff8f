"""The optimizer of a run: AdamW, whose rate warms up and falls, and which weights decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gulliver.jobs._loop import rate_factor
from gulliver.video._config import TrainConfig


def make_optimizer(
    config: TrainConfig, model: nn.Module
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Makes the optimizer of a model and the schedule of its learning rate."""
    optimizer = torch.optim.AdamW(
        _parameter_groups(model, config.optimizer.weight_decay),
        lr=config.optimizer.learning_rate,
        betas=(0.9, config.optimizer.beta2),
    )
    warmup, final = config.optimizer.warmup, config.optimizer.final_fraction

    def factor(step: int) -> float:
        return rate_factor(step, config.steps, warmup, final=final)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases, norms and tables do not."""
    decayed = [p for p in model.parameters() if p.ndim >= 2 and p.shape[0] > 6]
    others = [p for p in model.parameters() if not (p.ndim >= 2 and p.shape[0] > 6)]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
