"""Marks models with the accelerator that runs them, and hands them to the next optimizer.

A second Trainer may evaluate with a boosted model as it is. The optimizer of a second phase, which
another Trainer brings or which follows `free_memory`, has the parameters given back first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from gulliver.booster import Booster
from gulliver.errors import GulliverError

_KEY = "_gulliver_owned"


class Owner(Protocol):
    """The accelerator that has boosted a model."""

    booster: Booster

    def get_state_dict(
        self, model: nn.Module, unwrap: bool = True, folder: Path | None = None
    ) -> dict[str, Any]: ...
    def has_ended(self, model: nn.Module) -> bool: ...
    def release(self, model: nn.Module) -> None: ...


class _Owned:
    """Entry of a module that names its accelerator; a copy of the module has none."""

    def __init__(self, owner: Owner | None = None) -> None:
        self.owner = owner

    def __deepcopy__(self, memo: dict[int, Any]) -> _Owned:
        return _Owned()

    def __reduce__(self) -> Any:
        return _Owned, ()


def mark_owned(model: nn.Module, owner: Owner | None) -> None:
    """Sets the accelerator that runs a model."""
    # Not by setattr, nor in a table: it lives as long as the model, and is no part of it.
    vars(model)[_KEY] = _Owned(owner)


def owner_of(model: nn.Module) -> tuple[nn.Module, Owner] | None:
    """Finds the part of a model that is boosted, and the accelerator that runs it."""
    for part in model.modules():
        mark = vars(part).get(_KEY)
        if mark is not None and mark.owner is not None:
            return part, mark.owner
    return None


def model_of(optimizer: torch.optim.Optimizer, known: list[nn.Module]) -> nn.Module:
    """Finds the model that an optimizer steps."""
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    found = [model for model in dict.fromkeys(known) if not stepped.isdisjoint(model.parameters())]
    if not found:
        raise GulliverError(
            f"the model of {type(optimizer).__name__} is not prepared: prepare it before, or in "
            "the same call; where it was trained before, make the optimizer anew"
        )
    if len(found) > 1 or not stepped.issubset(found[0].parameters()):
        raise GulliverError(
            f"{type(optimizer).__name__} steps parameters of several models: give each model an "
            "optimizer, or put them into one nn.ModuleList"
        )
    return found[0]


def take_over(model: nn.Module, optimizer: torch.optim.Optimizer, taker: Owner) -> None:
    """Ends an earlier phase of a model, so that the new optimizer gets plain parameters."""
    found = owner_of(model)
    if found is None:
        return
    part, owner = found
    if owner is taker and not owner.has_ended(part):
        raise GulliverError(
            "the model has an optimizer already: one with several groups does what several do; "
            "for a second phase end the first with accelerator.free_memory(model, optimizer)"
        )
    if getattr(owner.booster.plugin, "memory", None) is not None:
        raise GulliverError(
            "the model was trained under a memory limit, which has no room to give it back whole: "
            "save it (trainer.save_model, accelerator.save_model), load a new model from there and "
            "train that"
        )
    before = list(model.parameters())
    owner.release(part)
    fresh: dict[Any, nn.Parameter] = dict(zip(before, model.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [fresh.get(p, p) for p in group["params"]]
    for old in [p for p in optimizer.state if p in fresh]:
        optimizer.state[fresh[old]] = optimizer.state.pop(old)
