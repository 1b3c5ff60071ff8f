"""Blocks of any model: the parts that are computed again, or whose activations leave.

A model of transformers says which they are, and has a switch for each. In any other model they are
found by form: what lies in its innermost lists of several modules.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import nn

from gulliver._compat import compiled_call, is_batch_norm
from gulliver.errors import GulliverError
from gulliver.memory import recompute_modules

LISTS = (nn.ModuleList, nn.Sequential)
NO_BLOCKS = (
    "there are no blocks to compute again: they are those of a pipeline, or of "
    "gradient_checkpointing_enable, or modules of several layers each, without batch norms, in a "
    "Sequential or ModuleList; group single layers, or wrap the blocks with torch.utils.checkpoint "
    "before boost"
)


def has_switch(model: nn.Module) -> bool:
    """Whether a model computes its blocks again by itself when it is told to."""
    return hasattr(model, "gradient_checkpointing_enable")


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Paths of the blocks of a model, as registered; none where it has no several of them.

    A block has several layers: single ones of torch have nothing to keep but their input. Modules
    of a block's class that lie in no list are blocks, too.
    """
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
    if isinstance(module, nn.ModuleList | nn.ModuleDict):  # nobody calls it
        return False
    if hasattr(module, "base_layer"):  # a layer with adapters beside it
        return False
    single = type(module).__module__.startswith("torch.nn") and not list(module.children())
    return not single and any(True for _ in module.parameters())


def recomputable_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the blocks that backward can compute again.

    The innermost ones that transformers offers, ``""`` for a model that offers none and has the
    switch, else those of `blocks_of` without running statistics, which would take a batch twice.
    """
    if not has_switch(model):
        return tuple(p for p in blocks_of(model) if not _has_statistics(model.get_submodule(p)))
    offering = [p for p, m in model.named_modules() if hasattr(m, "gradient_checkpointing")]
    if not offering:
        return ("",)
    return tuple(p for p in offering if not any(o.startswith(f"{p}.") for o in offering))


def offloadable_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the blocks that are chosen for one by one where activations may leave."""
    known = recomputable_blocks(model) if has_switch(model) else ()
    return known if known and known != ("",) else blocks_of(model)


def _has_statistics(module: nn.Module) -> bool:
    return any(is_batch_norm(m) for m in module.modules())


def recompute_blocks(model: nn.Module, paths: Sequence[str], offering: Iterable[str]) -> None:
    """Lets backward compute blocks again instead of keeping what they computed.

    Args:
        model: model that has them.
        paths: paths of the blocks.
        offering: paths of all blocks that could be, of `recomputable_blocks`.
    """
    if not has_switch(model):
        recompute_modules(model, paths)
        return
    with warnings.catch_warnings(action="ignore"):  # names that transformers has newer ones for
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    for path in set(offering) - set(paths):
        vars(model.get_submodule(path))["gradient_checkpointing"] = False


def check_uncompiled(model: nn.Module, paths: Iterable[str]) -> None:
    """Refuses to compute blocks again that are compiled, where a wrapper would have to do it.

    Raises:
        GulliverError: naming the block.
    """
    for path in () if has_switch(model) else paths:
        if any(compiled_call(m) is not None for m in model.get_submodule(path).modules()):
            raise GulliverError(
                f"block {path!r} is compiled and cannot be computed again as a whole: wrap what is "
                "inside with torch.utils.checkpoint before it is compiled"
            )
