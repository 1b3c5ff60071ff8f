"""The plugin that runs a given plan."""

from __future__ import annotations

import torch
from torch import nn

from gulliver.booster._plugins import Plugin
from gulliver.booster._tiers import plan_tiers
from gulliver.comm import current_world
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster
from gulliver.plan import Plan, check_plan


class PlanPlugin(Plugin):
    """Runs a given plan.

    Args:
        plan: loaded, perhaps edited, or made by a plugin.
        verbose: print the plan when the model is boosted.
    """

    def __init__(self, plan: Plan, verbose: bool = True) -> None:
        self.plan, self.verbose = plan, verbose
        self.takes = ("meta",) if plan.stage == 3 or plan.weights is not None else ()

    def choices(self, ranks: int, precision: str = "none") -> Plan:
        """The plan."""
        # It may have been edited, or made for other machines.
        check_plan(self.plan, ranks)
        device = current_world().device.type
        if self.plan.mesh.device != device:
            raise GulliverError(
                f"{self.plan.describe_field('mesh.device')}, and ranks run on {device}"
            )
        if precision not in ("none", self.plan.precision.autocast):
            raise GulliverError(
                f"{self.plan.describe_field('precision.autocast')}, and Booster(mixed_precision="
                f"{precision!r}): say it in the plan alone"
            )
        return self.plan

    def for_model(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        cluster: Cluster | None,
    ) -> Plan:
        """Decides what happens to activations under a limit, where that is left open."""
        return plan_tiers(plan, model, optimizer, cluster, chosen=False) if plan.limited else plan

    def data_place(self) -> tuple[int, int]:
        """This rank's number among those that read different samples, and how many there are."""
        mesh, rank = self.plan.mesh, current_world().rank
        if self.plan.operators is not None:  # all ranks read one batch, and share what it takes
            return 0, 1
        return rank // (mesh.of("sequence") * mesh.of("tensor")) % mesh.of("data"), mesh.of("data")
