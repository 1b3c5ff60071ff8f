"""Models that are never whole: built without memory, filled with each rank's part.

Build the model under `lazy_parameters`, make its optimizer, and boost both with
``HybridParallelPlugin(weights=folder)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from gulliver.checkpoint import load_huggingface
from gulliver.comm import raise_on_any_rank
from gulliver.errors import GulliverError
from gulliver.parallel.tensor import materialize


@contextmanager
def lazy_parameters() -> Iterator[None]:
    """Inside, modules that are built have their parameters on meta, which takes no memory.

    Buffers are made as ever, because their values come from no file. Parameters are made one at a
    time and let go, so no more than the largest is ever there.
    """
    # Not torch.device("meta"): buffers would be made there as well, and their values be lost.
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            grad = parameter.requires_grad
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def check_lazy(model: nn.Module, weights: Path | None) -> None:
    """Refuses a model on meta that nothing would fill."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise GulliverError(
                f"buffer {name!r} is on meta, and no file has its values: build the model under "
                "gulliver.booster.lazy_parameters(), which leaves buffers alone"
            )
    if weights is not None:
        return
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise GulliverError(
                f"parameter {name!r} is on meta: pass HybridParallelPlugin(weights=folder) to "
                "fill it from"
            )


def fill(model: nn.Module, weights: Path, aliases: Mapping[str, str], device: torch.device) -> None:
    """Reads this rank's part of a Hugging Face folder; every rank calls it."""
    materialize(model, device)
    tied = {name: first for name, first in aliases.items() if name != first}
    raise_on_any_rank(
        lambda: load_huggingface(model, weights, elsewhere=list(aliases), aliases=tied)
    )
