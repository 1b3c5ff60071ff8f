"""Analyses a model for the search, in the dtypes in which it will run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gulliver.booster._model import HALVES, cast_floats, convert, modules_kept
from gulliver.booster.search._facts import Facts
from gulliver.errors import GulliverError
from gulliver.hardware import Device
from gulliver.parallel import state_sizes
from gulliver.plan import analyse


def facts_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batch: Any,
    device: Device,
    precision: str = "bf16",
    on_cpu: bool = False,
) -> Facts:
    """Analyses a model."""
    check_shapes(model)
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    half = HALVES.get(precision)
    followed = model
    if half is not None:
        # Parameters of 16 bits compute as they are; their float32 copies are the optimizer's.
        followed = on_meta(model)
        convert(followed, half, modules_kept(followed))
        batch = cast_floats(batch, half)
    try:
        analysis = analyse(followed, batch, kernels="cpu" if on_cpu else "cuda")
    except GulliverError as error:
        if half is None:
            raise
        raise GulliverError(
            f"{error} (parameters and floats of the batch are {precision} here, as a run turns "
            "them; with precision fp32 all keeps its dtype)"
        ) from error
    for opaque in analysis.opaque:
        if not opaque.path:  # neither blocks nor bytes of it are known
            raise GulliverError(
                f"{opaque.kind} cannot be planned: it depends on its data ({opaque.where}: "
                f"{opaque.reason}); put that into a module of its own, which then stays whole"
            )
    tensors = [t for t in _tensors(batch) if t.ndim]
    trained, states = _trained(model, optimizer)
    sizes = tensors[0].shape[0] if tensors else 1
    tokens = max((t.shape[1] for t in tensors if t.ndim == 2), default=0)
    item, copied = (4, False) if half is None else (2, True)
    numbers = sizes, tokens, device, states, item, copied, trained
    return Facts(model, analysis, *numbers, optimizer=optimizer)


def check_shapes(model: nn.Module) -> None:
    """Refuses parameters and buffers without shapes (lazy modules)."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise GulliverError(
                f"{name!r} of a {kind} has no shape yet: run the model once on a batch, or give "
                "the module its sizes"
            )


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model on meta."""
    own = [*model.parameters(), *model.buffers()]
    memo: dict[int, Any] = {}
    for tensor in own:
        empty = tensor.detach().to("meta")
        kind = nn.Parameter(empty, tensor.requires_grad) if _is_parameter(tensor) else empty
        memo[id(tensor)] = kind
    return copy.deepcopy(model, memo)


def _is_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _tensors(batch: Any) -> list[torch.Tensor]:
    values = batch.values() if isinstance(batch, dict) else batch
    values = values if isinstance(values, list | tuple) or hasattr(values, "mapping") else (values,)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[int, int]:
    """Trained elements, and the numbers that their optimizer keeps for each."""
    if optimizer is None:
        return 0, 0
    count = most = 0
    for group in optimizer.param_groups:
        for parameter in (p for p in group["params"] if p.requires_grad):
            count += parameter.numel()
            most = max(most, len(state_sizes(optimizer, group, parameter.shape)))
    return count, most
