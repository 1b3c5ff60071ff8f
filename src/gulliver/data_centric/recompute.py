"""Keeps or recomputes blocks, as chosen for each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gulliver.errors import GulliverError
from gulliver.memory.activations import wrap_call
from gulliver.parallel.pipeline.stage import Stage
from gulliver.planner.model import (
    check_uncompiled,
    has_switch,
    recomputable_blocks,
    recompute_blocks,
)


class RecomputeSwitch:
    """Selects the blocks that subsequent forward passes recompute."""

    def __init__(self, model: nn.Module, kinds: Sequence[tuple[str, int]]) -> None:
        self._model, self._on = model, set[str]()
        self.paths = _by_kind(recomputable_blocks(model), kinds)
        every = [path for paths in self.paths for path in paths]
        check_uncompiled(model, every)
        self._switched = has_switch(model)
        if self._switched:
            recompute_blocks(model, (), every)
            return
        for path in every:
            wrap_call(model.get_submodule(path), self._around(path))

    def set(self, counts: Sequence[int]) -> None:
        """Sets how many blocks of each kind are recomputed, starting with the first."""
        chosen = zip(self.paths, counts, strict=True)
        self._on = {path for paths, count in chosen for path in paths[:count]}
        for path in (p for paths in self.paths for p in paths) if self._switched else ():
            vars(self._model.get_submodule(path))["gradient_checkpointing"] = path in self._on

    def _around(self, path: str) -> Callable[..., Any]:
        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or path not in self._on:
                return inner(*args, **kwargs)
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

        return call


class StageSwitch:
    """Selects the recomputed blocks of a pipeline stage."""

    def __init__(self, stage: Stage, kinds: Sequence[tuple[str, int]]) -> None:
        self._forward = stage.stage_forward
        numbers = {path: number for number, path in enumerate(stage.stack.blocks)}
        found = _by_kind(stage.stack.blocks, kinds)
        self._numbers = [[numbers[path] for path in paths] for paths in found]

    def set(self, counts: Sequence[int]) -> None:
        """Sets how many blocks of each kind are recomputed."""
        chosen = zip(self._numbers, counts, strict=True)
        self._forward.recomputed = {n for numbers, count in chosen for n in numbers[:count]}


def _by_kind(paths: Sequence[str], kinds: Sequence[tuple[str, int]]) -> list[list[str]]:
    """Groups block paths by kind; several kinds are distinguished by the names in the paths."""
    found = [list(paths)] if len(kinds) == 1 else [_named(paths, name) for name, _ in kinds]
    for (name, count), mine in zip(kinds, found, strict=True):
        if len(mine) != count:
            raise GulliverError(
                f"the costs are for {count} blocks {name!r}, but the model has {len(mine)} "
                "recomputable ones; measure the costs of this model, or plan with pac=False and "
                "without kinds"
            )
    return found


def _named(paths: Sequence[str], kind: str) -> list[str]:
    return [path for path in paths if any(part.startswith(kind) for part in path.split("."))]
