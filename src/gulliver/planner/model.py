"""Prepares a model for sharding: converts its dtype, and broadcasts values from rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from gulliver._compat import compiled_call, is_batch_norm
from gulliver.comm.collectives import broadcast
from gulliver.errors import GulliverError, nearest
from gulliver.memory.activations import recompute_modules
from gulliver.parallel.optimizer import has_stepped

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Normalizations that may keep running statistics.
RUNNING = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def no_optimizer() -> torch.optim.Optimizer:
    """An optimizer without parameters, for models that are only evaluated."""
    return torch.optim.SGD([{"params": []}], lr=0.0)


def check_modules(model: nn.Module, sharded: bool) -> None:
    """Rejects lazy modules and, if parameters are sharded, TorchScript."""
    for name, module in model.named_modules():
        if any(is_lazy(p) for p in module.parameters(recurse=False)):
            raise GulliverError(
                f"{name or 'the model'} ({type(module).__name__}) has parameters without shapes: "
                "run it on a batch before boost"
            )
        if sharded and isinstance(module, torch.jit.ScriptModule):
            raise GulliverError(
                f"{name or 'the model'} is TorchScript, which reads parameters before they are "
                "gathered: boost the original module, or use TorchDDPPlugin"
            )


def check_unstepped(optimizer: torch.optim.Optimizer) -> None:
    """Rejects an optimizer that already has state, because its dtype would not match the model."""
    if has_stepped(optimizer):
        raise GulliverError(
            "the optimizer has stepped before boost, but precision converts the model; boost it "
            "before the first step"
        )


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtypes of all parameters, by name; a tied parameter appears under each name."""
    return {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}


def narrow_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Dtypes, by name, of parameters with a narrower range than their float32 master weights."""
    # The range of bfloat16 is nearly float32's; to check the rest, every resumed run would read all
    # values twice.
    return {name: dtype for name, dtype in dtypes_of(model).items() if dtype is torch.float16}


def broadcast_all(tensors: Iterable[Tensor]) -> None:
    """Broadcasts tensors of any memory layout and dtype from rank 0."""
    with torch.no_grad():
        for tensor in tensors:
            flat = tensor.detach().contiguous().view(-1)
            if flat.numel() and not tensor.is_meta:
                broadcast(flat.view(torch.uint8))  # backends do not know every dtype
                tensor.detach().copy_(flat.view(tensor.shape))


def modules_kept(model: nn.Module) -> tuple[str, ...]:
    """Paths of modules with running statistics, which would stop changing in 16 bits."""
    return tuple(
        path
        for path, module in model.named_modules()
        if isinstance(module, RUNNING) and module.track_running_stats
    )


def converted(model: nn.Module, kept: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that `convert` converts, by name: parameters and persistent buffers."""
    # As in Hugging Face's ``from_pretrained(dtype=)``, non-persistent buffers keep their dtype:
    # tables that modules compute with, such as rotary frequencies, are too inexact in 16 bits.
    for path, module in model.named_modules():
        if path in kept:
            continue
        tables = module._non_persistent_buffers_set
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.is_floating_point() and name not in tables:
                yield f"{path}.{name}" if path else name, tensor


def check_range(model: nn.Module, dtype: torch.dtype, kept: Collection[str]) -> None:
    """Rejects finite values that overflow in `dtype`; arguments as in `convert`."""
    for name, tensor in converted(model, kept):
        wider = torch.finfo(tensor.dtype).max > torch.finfo(dtype).max
        if not wider or tensor.is_meta or not tensor.numel():
            continue
        values = tensor.detach()
        # One pass without a copy; more only if values are NaN or infinite.
        if torch.stack(torch.aminmax(values)).to(dtype).isfinite().all():
            continue
        lost = values.isfinite() & ~values.to(dtype).isfinite()
        if lost.any():
            half = next(half for half, other in HALVES.items() if other is dtype)
            raise GulliverError(
                f"precision={half!r} cannot represent {name!r}: {values[lost][0].item()} is beyond "
                f"{torch.finfo(dtype).max:g}; scale it, or use another precision"
            )


def convert(model: nn.Module, dtype: torch.dtype, kept: Collection[str]) -> None:
    """Converts a model and its inputs to `dtype`; see `converted`."""
    for _, tensor in converted(model, kept):
        tensor.data = tensor.data.to(dtype)

    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    model.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_floats(entry, dtype) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast_floats(entry, dtype) for entry in value)
    return value


# Mixed precision: a model's own call runs under autocast.
#
# By hooks, not by a wrapped forward: a deep copy of the model (such as an average of its weights)
# has its own hooks, but a wrapped forward would still call the original model.


PRECISIONS = {"bf16": torch.bfloat16}


def check_precision(name: Any) -> None:
    if name is not None and name not in PRECISIONS:
        raise GulliverError(
            f"mixed_precision={name!r} is not supported: {nearest(str(name), PRECISIONS)} (or None)"
        )


class _Autocast:
    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._open: list[Any] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        context = torch.autocast(self._device, self._dtype)
        context.__enter__()
        self._open.append(context)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def autocast_calls(model: nn.Module, device: str, precision: str) -> None:
    """Runs every call of `model` under autocast; parameters keep their dtype."""
    hooks = _Autocast(device, PRECISIONS[precision])
    model.register_forward_pre_hook(hooks.enter, prepend=True)
    model.register_forward_hook(hooks.leave, always_call=True)


# Blocks of a model, which are recomputed or whose activations are offloaded.
#
# A transformers model names its blocks and has a switch for each. In other models they are the
# modules in the innermost lists.


LISTS = (nn.ModuleList, nn.Sequential)
NO_BLOCKS = (
    "no blocks to recompute were found: put modules of several layers without batch norms into a "
    "Sequential or ModuleList, or wrap blocks with torch.utils.checkpoint before boost"
)


def has_switch(model: nn.Module) -> bool:
    return hasattr(model, "gradient_checkpointing_enable")


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Paths of a model's blocks; empty if there are fewer than two."""
    # A block has several layers, because single torch layers only save their input. Modules of a
    # block's class outside of lists are also blocks.
    found = _within(model, "")
    paths = dict(model.named_modules())
    kinds = {type(paths[path]) for path in found} - set(LISTS)
    for path, module in paths.items():
        near = [p for p in found if f"{p}.".startswith(f"{path}.") or path.startswith(f"{p}.")]
        if type(module) in kinds and not near:
            found.append(path)
    return tuple(found) if len(found) > 1 else ()


def _within(module: nn.Module, path: str) -> list[str]:
    found = list[str]()
    for name, child in module.named_children():
        own = f"{path}.{name}" if path else name
        inner = _within(child, own)
        if len(inner) < 2 and isinstance(module, LISTS) and _is_block(child):
            inner = [own]
        found += inner
    return found


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # it is never called
        return False
    if hasattr(module, "base_layer"):  # a layer with adapters
        return False
    single = type(module).__module__.startswith("torch.nn") and not list(module.children())
    return not single and any(True for _ in module.parameters())


def recomputable_blocks(model: nn.Module) -> tuple[str, ...]:
    # The innermost ones that transformers names, ``""`` for a model that names none but has the
    # switch, otherwise those of `blocks_of` without running statistics, which recomputation would
    # update twice.
    if not has_switch(model):
        return tuple(p for p in blocks_of(model) if not _has_statistics(model.get_submodule(p)))
    offering = [p for p, m in model.named_modules() if hasattr(m, "gradient_checkpointing")]
    if not offering:
        return ("",)
    return tuple(p for p in offering if not any(o.startswith(f"{p}.") for o in offering))


def offloadable_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the blocks whose activations can be offloaded individually."""
    known = recomputable_blocks(model) if has_switch(model) else ()
    return known if known and known != ("",) else blocks_of(model)


def _has_statistics(module: nn.Module) -> bool:
    return any(is_batch_norm(m) for m in module.modules())


def recompute_blocks(model: nn.Module, paths: Sequence[str], offering: Iterable[str]) -> None:
    if not has_switch(model):
        recompute_modules(model, paths)
        return
    with warnings.catch_warnings(action="ignore"):  # old names that transformers has replaced
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    for path in set(offering) - set(paths):
        vars(model.get_submodule(path))["gradient_checkpointing"] = False


def check_uncompiled(model: nn.Module, paths: Iterable[str]) -> None:
    """Rejects compiled blocks that could only be recomputed through a wrapper."""
    for path in () if has_switch(model) else paths:
        if any(compiled_call(m) is not None for m in model.get_submodule(path).modules()):
            raise GulliverError(
                f"block {path!r} is compiled and cannot be recomputed as a whole: wrap its modules "
                "with torch.utils.checkpoint before compiling"
            )
