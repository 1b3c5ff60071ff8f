"""A step of a loop written for pipelines, where each rank has the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.parallel import BoostedOptimizer

Criterion = Callable[[Any, Any], Tensor]


def own_loss(outputs: Any, batch: Any) -> Tensor:
    """The loss that a model computes itself: its ``loss``, or an output of one number."""
    if isinstance(outputs, Tensor) and not outputs.ndim:
        return outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is None:
        raise GulliverError(
            "the model's outputs have no loss: pass a criterion(outputs, batch), or batches with "
            "labels for a model that computes its loss from them"
        )
    return loss


def call(model: nn.Module, batch: Any) -> Any:
    """A model's outputs for a batch: a dict of keyword arguments, a tuple, or one tensor."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def run_whole(
    batch: Any,
    model: nn.Module,
    criterion: Criterion | None,
    optimizer: BoostedOptimizer | None,
    return_outputs: bool,
) -> dict[str, Any]:
    """Forward, and with an optimizer backward; as `Booster.execute_pipeline` returns them."""
    with torch.set_grad_enabled(optimizer is not None):
        outputs = call(model, batch)
        wanted = optimizer is not None or criterion is not None
        loss = (criterion or own_loss)(outputs, batch) if wanted else None
        # As a pipeline returns it: the model's own loss, also where nobody asked for one.
        if loss is None and isinstance(getattr(outputs, "loss", None), Tensor):
            loss = outputs.loss
    if optimizer is not None and loss is not None:
        optimizer.backward(loss)
    return {
        "loss": None if loss is None else loss.detach(),
        "outputs": outputs if return_outputs else None,
    }
