"""Losses of the micro-batches of a pipeline, weighted, as the last stage's forwards end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.parallel.pipeline._batch import MicroBatch, Weights

Criterion = Callable[[Any, Any], Tensor]


class Losses:
    """Collects the weighted loss of each micro-batch as the last stage's forwards end."""

    def __init__(
        self,
        micros: list[MicroBatch],
        weights: Weights,
        criterion: Criterion | None,
        scale: float,
        optional: bool,
    ) -> None:
        self._micros, self._weights = micros, weights
        self._criterion, self._scale, self._optional = criterion, scale, optional
        self._terms: list[Tensor] = []
        self.uncounted = False

    @property
    def given(self) -> list[float] | None:
        """Weights of a criterion's losses; None where they are not known."""
        return self._weights.given

    def __call__(self, output: Any, number: Tensor) -> Tensor:
        micro = int(number)
        loss, weights = self._of(output, self._micros[micro].given)
        if loss is None:
            return torch.zeros(())
        weight = weights[micro]
        # A mean over nothing is no number; what counts nothing has no gradient either.
        term = loss * weight if weight else _nothing(output, loss)
        self._terms.append(term.detach())
        return term * self._scale if self._scale != 1 else term

    def _of(self, output: Any, given: Any) -> tuple[Tensor | None, list[float]]:
        """Returns the loss of a micro-batch, and the weights of all of them."""
        own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(output, Tensor) and not output.ndim:  # as `own_loss` has it without stages
            own = output
        if self._criterion is None:
            if own is None and not self._optional:
                raise GulliverError(
                    "the model's outputs have no loss: pass a criterion(outputs, micro_batch), or "
                    "labels to a model that computes its loss from them"
                )
            return own, self._weights.own
        loss = self._criterion(output, given)
        weights = self._weights.own if loss is own else self._weights.given
        if weights is None:
            self.uncounted, weights = True, self._weights.own
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise GulliverError("a criterion returns one number, the mean over a micro-batch")
        return loss, weights

    def total(self) -> Tensor | None:
        """Returns the batch's loss; None where there was none."""
        return torch.stack(self._terms).sum() if self._terms else None


def _nothing(output: Any, loss: Tensor) -> Tensor:
    """Returns a loss of zero, with a gradient of zero for all that the output came from."""
    # Not a constant: the schedule calls its backward, and earlier stages wait for gradients.
    values = output.values() if isinstance(output, dict) else output
    entries = [output] if isinstance(output, Tensor) else [v for v in values if v is not None]
    for value in entries:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0:
            return value.sum() * 0
    # Only the loss itself came out, and it is a mean over nothing.
    return torch.where(loss.isnan(), 0.0, loss) * 0
