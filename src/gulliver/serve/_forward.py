"""A packed batch through a model: its inputs, and logits of the rows that are wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gulliver.serve._batch import Batch


def inputs_of(batch: Batch, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Packed tokens [T] of a batch, and the rows [R] of which logits are wanted."""
    # Of parts of prompts none are: one row is computed since none cannot be asked for.
    tokens = torch.tensor([t for span in batch.spans for t in span.tokens], device=device)
    rows, end = [], 0
    for span in batch.spans:
        end += len(span.tokens)
        rows += range(end - span.outputs, end)
    return tokens, torch.tensor(rows or [0], device=device)


def arguments_of(model: Any, positions: Tensor, wanted: Tensor) -> dict[str, Any]:
    """Arguments of a model's forward besides its packed tokens."""
    known: dict[str, Any] = {"use_cache": False, "logits_to_keep": wanted}
    # BLOOM has no positions: its slopes are in its attention.
    return (
        known if model.config.model_type == "bloom" else known | {"position_ids": positions[None]}
    )


def forward(model: Any, tokens: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
    """Runs a model on packed tokens [T]; returns logits [R, V] of the wanted rows, in float32."""
    return model(tokens[None], **arguments_of(model, positions, wanted)).logits[0].float()
