"""FLOPs, bytes and memory of a training step, analyzed before it runs.

For example:

    from gulliver.plan import analyse
    found = analyse(model, {"input_ids": ids, "labels": ids})
    found.flops, found.saved.activations, found.peak, found.seconds(cluster.device)
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.plan.analysis.records import Operator as Operator
    from gulliver.plan.analysis.records import Value as Value
    from gulliver.plan.analysis.step import analyse as analyse

__getattr__, __dir__ = lazy_exports(__name__)
