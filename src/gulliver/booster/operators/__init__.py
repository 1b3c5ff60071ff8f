"""Plans that shard each operator of a model, and keep, recompute or offload what it saves.

For example:

    plan = find_operators(model, batch, cluster, {"data": 2, "tensor": 2}, memory="8GiB")
    booster = Booster(plan=plan)
"""

from gulliver.booster.operators._apply import check_operators, share_operators
from gulliver.booster.operators._plan import (
    Program,
    axes_of,
    batch_of,
    find_operators,
    form_of,
    link_of,
    plan_from,
    problem_of,
)
from gulliver.booster.operators._problem import Problem

__all__ = [
    "Problem",
    "Program",
    "axes_of",
    "batch_of",
    "check_operators",
    "find_operators",
    "form_of",
    "link_of",
    "plan_from",
    "problem_of",
    "share_operators",
]
