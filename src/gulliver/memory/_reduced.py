"""What stands in ``parameter.grad`` when the gradient itself has left for its shard.

None would be wrong in two ways: `torch.nn.utils.clip_grad_norm_` would find nothing and clip
nothing, and ``model.zero_grad()`` could not be noticed. So there is a stand-in of the right
shape and of one element's memory. It reads as nan, and refuses norms and changes in
place with a line that says what to do instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError

ADVICE = (
    "gradients were reduced to the ranks' shards and are no longer in the parameters: use "
    "optimizer.clip_grad_by_norm, clip_grad_by_value, zero_grad, step and full_gradients of the "
    "optimizer that boost returned (accelerate, Trainer: accelerator.clip_grad_norm_, "
    "clip_grad_value_, and optimizer.full_gradients)"
)


class ReducedGradient(Tensor):
    """Says that a parameter's gradient lies in the ranks' shards."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses norms and in-place changes; the rest sees nan."""
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        # Not everything is refused: torch.compile looks at the gradients of what it traces.
        if in_place or "norm" in name:
            raise GulliverError(ADVICE)
        return super().__torch_function__(func, types, args, kwargs or {})


def reduced_gradient(parameter: Tensor) -> ReducedGradient:
    """A stand-in for the gradient of `parameter`."""
    nan = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape).as_subclass(ReducedGradient)
