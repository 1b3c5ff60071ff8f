"""Blocks that are computed again in backward or not, as each micro-batch says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gulliver.booster._blocks import (
    check_uncompiled,
    has_switch,
    recomputable_blocks,
    recompute_blocks,
)
from gulliver.errors import GulliverError
from gulliver.memory import wrap_call
from gulliver.parallel.pipeline import Stage


class RecomputeSwitch:
    """Says of the next forward which blocks its backward computes again.

    Blocks of a kind are alike, so of each kind it takes the first ones.

    Args:
        model: boosted model.
        kinds: name and number of the blocks of each kind, in the order in which they are counted.

    Raises:
        GulliverError: the model has other blocks, or compiled ones.
    """

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
        """Lets so many blocks of each kind be computed again, in forwards from here on."""
        chosen = zip(self.paths, counts, strict=True)
        self._on = {path for paths, count in chosen for path in paths[:count]}
        for path in (p for paths in self.paths for p in paths) if self._switched else ():
            vars(self._model.get_submodule(path))["gradient_checkpointing"] = path in self._on

    def _around(self, path: str) -> Callable[..., Any]:
        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if path not in self._on or not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

        return call


class StageSwitch:
    """The same for the blocks that a stage of a pipeline has.

    Args:
        stage: stage of this rank.
        kinds: name and number of the blocks of each kind of the whole model.

    Raises:
        GulliverError: the model has other blocks.
    """

    def __init__(self, stage: Stage, kinds: Sequence[tuple[str, int]]) -> None:
        self._forward = stage.stage_forward
        numbers = {path: number for number, path in enumerate(stage.stack.blocks)}
        found = _by_kind(stage.stack.blocks, kinds)
        self._numbers = [[numbers[path] for path in paths] for paths in found]

    def set(self, counts: Sequence[int]) -> None:
        """Lets so many blocks of each kind be computed again, in forwards from here on."""
        chosen = zip(self._numbers, counts, strict=True)
        self._forward.recomputed = {n for numbers, count in chosen for n in numbers[:count]}


def _by_kind(paths: Sequence[str], kinds: Sequence[tuple[str, int]]) -> list[list[str]]:
    """Paths of the blocks of each kind: of one kind all, of several those named after it."""
    found = [list(paths)] if len(kinds) == 1 else [_named(paths, name) for name, _ in kinds]
    for (name, count), mine in zip(kinds, found, strict=True):
        if len(mine) != count:
            raise GulliverError(
                f"the costs know {count} blocks {name!r}, and of the model {len(mine)} can be "
                "computed again: measure costs of this model, or plan with pac=False and no kinds"
            )
    return found


def _named(paths: Sequence[str], kind: str) -> list[str]:
    return [path for path in paths if any(part.startswith(kind) for part in path.split("."))]
