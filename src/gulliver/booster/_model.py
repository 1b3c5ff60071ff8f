"""Prepares a model before it is shared: one dtype, equal values on all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from gulliver.comm import broadcast
from gulliver.errors import GulliverError
from gulliver.parallel import has_stepped

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Normalizations that may keep running statistics.
RUNNING = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def no_optimizer() -> torch.optim.Optimizer:
    """An optimizer without parameters, for models that are not trained."""
    return torch.optim.SGD([{"params": []}], lr=0.0)


def check_modules(model: nn.Module, sharded: bool) -> None:
    """Refuses lazy modules and, where parameters are sharded, TorchScript."""
    for name, module in model.named_modules():
        if any(is_lazy(p) for p in module.parameters(recurse=False)):
            raise GulliverError(
                f"{name or 'the model'} ({type(module).__name__}) has parameters without shapes: "
                "run the model on a batch before boost"
            )
        if sharded and isinstance(module, torch.jit.ScriptModule):
            raise GulliverError(
                f"{name or 'the model'} is TorchScript, which reads parameters before they are "
                "gathered: boost the module that it was made from, or use TorchDDPPlugin"
            )


def check_unstepped(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer with state, which would have another dtype than the parameters."""
    if has_stepped(optimizer):
        raise GulliverError(
            "the optimizer has stepped before boost: precision converts the model, so boost first"
        )


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtypes of parameters by all their names."""
    return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}


def narrow_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtypes of parameters whose range is smaller than that of the float32 copies."""
    # The range of bfloat16 is float32's but for its very end: to look at that, every resumed run
    # would read all values twice.
    return {name: dtype for name, dtype in dtypes_of(model).items() if dtype is torch.float16}


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Gives all ranks rank 0's values, for any memory layout and dtype."""
    with torch.no_grad():
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1)
            if flat.numel() and not tensor.is_meta:
                broadcast(flat.view(torch.uint8))  # backends do not know every dtype
                tensor.detach().copy_(flat.view(tensor.shape))


def modules_kept(model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules that keep their dtype: running averages in 16 bits stop moving."""
    return tuple(
        path
        for path, module in model.named_modules()
        if isinstance(module, RUNNING) and module.track_running_stats
    )


def converted(model: nn.Module, kept: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields what `convert` converts, by name: parameters and persistent buffers."""
    # As with Hugging Face's ``from_pretrained(dtype=)`` buffers that are no part of the state dict
    # keep their dtype: tables that modules compute from, such as rotary frequencies, which 16 bits
    # would spoil.
    for path, module in model.named_modules():
        if path in kept:
            continue
        tables = module._non_persistent_buffers_set
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.is_floating_point() and name not in tables:
                yield f"{path}.{name}" if path else name, tensor


def check_range(model: nn.Module, dtype: torch.dtype, kept: Collection[str]) -> None:
    """Refuses values that would become infinite in a dtype; arguments as of `convert`."""
    for name, tensor in converted(model, kept):
        wider = torch.finfo(tensor.dtype).max > torch.finfo(dtype).max
        if not wider or tensor.is_meta or not tensor.numel():
            continue
        values = tensor.detach()
        # One pass that makes no copy; values that are no numbers, or infinite already, take more.
        if torch.stack(torch.aminmax(values)).to(dtype).isfinite().all():
            continue
        lost = values.isfinite() & ~values.to(dtype).isfinite()
        if lost.any():
            half = next(half for half, other in HALVES.items() if other is dtype)
            raise GulliverError(
                f"precision={half!r} cannot hold {name!r}: {values[lost][0].item()} is beyond "
                f"{torch.finfo(dtype).max:g}; scale it, or train with another precision"
            )


def convert(model: nn.Module, dtype: torch.dtype, kept: Collection[str]) -> None:
    """Converts a model and its inputs to `dtype`; see `converted`."""
    for _, tensor in converted(model, kept):
        tensor.data = tensor.data.to(dtype)

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    model.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Converts floating-point tensors, also those in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_floats(entry, dtype) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast_floats(entry, dtype) for entry in value)
    return value
