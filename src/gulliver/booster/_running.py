"""What runs: the plan as it is now, and what its steps take and hold."""

from __future__ import annotations

from gulliver.parallel import BoostedOptimizer
from gulliver.plan import Comparison, Plan


class Running:
    """A boosted model's plan beside its optimizer.

    Args:
        planned: plan as it was applied.
        optimizer: optimizer of the model.
    """

    def __init__(self, planned: Plan, optimizer: BoostedOptimizer) -> None:
        self.planned, self.optimizer = planned, optimizer

    @property
    def plan(self) -> Plan:
        return self.planned

    def compare(self) -> Comparison:
        return Comparison(())
