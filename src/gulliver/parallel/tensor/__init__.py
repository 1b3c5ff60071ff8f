"""Tensor parallelism: layers sharded over ranks, with plain local parameters.

    plan = plan_tensor(model, 4)          # from the model's own plan, its family, or rules=
    apply_tensor(model, plan, line)       # in place; sequence="split_gather" shards activations too

`plan` chooses a style for each module from `styles`; `apply` replaces modules with the `layers`,
whose communication is in `entry` and `collectives`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.layout.even import split_evenly as deal  # noqa: F401
    from gulliver.layout.even import split_evenly as split_evenly
    from gulliver.parallel.tensor.apply import apply_tensor as apply_tensor
    from gulliver.parallel.tensor.collectives import split as split
    from gulliver.parallel.tensor.loss import cross_entropy as cross_entropy
    from gulliver.parallel.tensor.plan import plan_tensor as plan_tensor
    from gulliver.parallel.tensor.styles import STYLES as STYLES

__getattr__, __dir__ = lazy_exports(__name__)
