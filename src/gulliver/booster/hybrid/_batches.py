"""Ranks that share one model must read one batch: whether they do is looked at, not hoped for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gulliver.comm import Line
from gulliver.parallel.pipeline import agree


def watch_batches(model: nn.Module, line: Line) -> None:
    """Compares what a model is called with over the ranks that share it, at every call."""
    if line.size == 1:
        return

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = given[0].device if given else torch.device("cpu")
        agree({"args": args, **kwargs}, "", line, device, check=True)

    # Before others change what is given.
    model.register_forward_pre_hook(compare, prepend=True, with_kwargs=True)
