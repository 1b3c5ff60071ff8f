"""Models that are larger than memory: built on meta and filled chunk by chunk.

A parameter on meta becomes a stretched nan, which takes no memory, until its chunk is made; then it
is filled from a folder, or by the modules' own ``reset_parameters``, in torch's order. At no time
is more of the model in memory than the limit allows, and a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from gulliver.booster._spread import read_sharded
from gulliver.checkpoint import match_huggingface
from gulliver.comm import broadcast_object
from gulliver.errors import GulliverError
from gulliver.parallel import ZeroOptimizer


def check_meta(
    model: nn.Module, weights: str | None, dtypes: Mapping[str, torch.dtype] | None = None
) -> None:
    """Refuses a model on meta that nothing would fill."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise GulliverError(
                f"buffer {name!r} is on meta, where its values are lost: build the model under "
                "gulliver.booster.lazy_parameters(), which leaves buffers alone"
            )
    if weights is not None:
        match_huggingface(model, weights, dtypes=dtypes)
        return
    owners: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            other = owners.setdefault(parameter, name)
            if parameter.is_meta and other != name:
                # Of a module that is made in memory the tie says whose values stay; here none does.
                raise GulliverError(
                    f"parameters {other!r} and {name!r} on meta are one, and which module's "
                    "reset_parameters() initialises it is not known: fill it with weights=folder"
                )
        empty = [name for name, p in module.named_parameters(path, recurse=False) if p.is_meta]
        if empty and not hasattr(module, "reset_parameters"):
            raise GulliverError(
                f"parameter {empty[0]!r} is on meta, and {type(module).__name__} has no "
                "reset_parameters() to initialise it: give one, or weights=folder to fill it from"
            )


def lend_shapes(model: nn.Module, device: torch.device) -> list[nn.Module]:
    """Moves parameters on meta to a device as stretched nans, which take no memory."""
    # They stay the same objects, so that an optimizer keeps them.
    # Before any is moved: each module that shares a parameter initialises it, as with torch.
    found = [m for m in model.modules() if any(p.is_meta for p in m.parameters(recurse=False))]
    for parameter in [p for p in model.parameters() if p.is_meta]:
        value = math.nan if parameter.is_floating_point() else 0
        there = torch.full((), value, dtype=parameter.dtype, device=device)
        other = nn.Parameter(there.expand(parameter.shape), parameter.requires_grad)
        vars(other).update(vars(parameter))
        torch.utils.swap_tensors(parameter, other)
    return found


def fill_boosted(
    optimizer: ZeroOptimizer, model: nn.Module, empty: Sequence[nn.Module], weights: str | None
) -> None:
    """Fills a boosted model chunk by chunk; every rank calls it."""
    if weights is not None:
        read_sharded(optimizer, model, Path(weights), strict=True, checked=True)
    elif empty:
        _initialise(empty)
        optimizer.shards.take_writes()


def _initialise(modules: Sequence[nn.Module]) -> None:
    """Initialises modules on all ranks with the random numbers of rank 0."""
    own = _random_state()
    first = broadcast_object(own)
    _set_random_state(first)
    for module in modules:
        module.reset_parameters()  # type: ignore[operator]
    if not all(torch.equal(mine, theirs) for mine, theirs in zip(own, first, strict=True)):
        _set_random_state(own)  # ranks that draw other numbers go on with theirs


def _random_state() -> list[torch.Tensor]:
    device = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *device]


def _set_random_state(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)
