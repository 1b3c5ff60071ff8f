"""FLOPs, bytes and memory of a training step, found before it runs.

For example:

    from gulliver.plan import analyse
    found = analyse(model, {"input_ids": ids, "labels": ids})
    found.flops, found.saved.activations, found.peak, found.seconds(cluster.device)
"""

from gulliver.plan.analysis._analyse import analyse
from gulliver.plan.analysis._records import (
    BACKWARD,
    FORWARD,
    OPAQUE,
    RECOMPUTE,
    Analysis,
    Cost,
    ModuleCosts,
    Opaque,
    Operator,
    Saved,
    Value,
)

__all__ = [
    "BACKWARD",
    "FORWARD",
    "OPAQUE",
    "RECOMPUTE",
    "Analysis",
    "Cost",
    "ModuleCosts",
    "Opaque",
    "Operator",
    "Saved",
    "Value",
    "analyse",
]
