"""What a step of a plan should take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gulliver.hardware import Cluster
from gulliver.plan import Plan


def predict(
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    cluster: Cluster | None = None,
    sample: Any = None,
) -> Plan:
    return plan
