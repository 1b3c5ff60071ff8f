"""Checks that all ranks have built the same model, before it is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from gulliver.comm import gather_objects
from gulliver.errors import GulliverError, first_difference

# What each tensor of a model is, by its name.
Signature = dict[str, str]


def check_alike(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuses models that differ between ranks; every rank calls it."""
    mine = _signature(model, optimizer)
    # Digests first: signatures are long, and nearly always the same on all ranks.
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(gather_objects(digest))) > 1:
        raise GulliverError(_difference(gather_objects(mine)))


def _signature(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Signature:
    groups = optimizer.param_groups if optimizer is not None else []
    home = {p: f", in the optimizer's group {n}" for n, g in enumerate(groups) for p in g["params"]}
    found = {"the optimizer": f"a {type(optimizer).__name__}" if optimizer is not None else "none"}
    for name, p in model.named_parameters(remove_duplicate=False):
        trained = home.get(p, "") if p.requires_grad else ", frozen"
        found[f"parameter {name!r}"] = f"{tuple(p.shape)} {p.dtype}{trained}"
    for name, b in model.named_buffers(remove_duplicate=False):
        found[f"buffer {name!r}"] = f"{tuple(b.shape)} {b.dtype}"
    return found


def _difference(every: Sequence[Signature]) -> str:
    found = first_difference(every)
    if found is None:
        return "ranks have built models whose tensors come in different orders: build the same"
    rank, name, first, other = found
    return (
        f"ranks have built different models: {name} is {first or 'not there'} on rank 0 and "
        f"{other or 'not there'} on rank {rank}: build the same on every rank"
    )
