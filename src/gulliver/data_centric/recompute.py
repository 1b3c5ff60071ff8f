"""Keeps, recomputes or offloads blocks, chosen again for each micro-batch.

A micro-batch says how many blocks of each kind are recomputed and offloaded. Offloaded blocks are
spaced evenly, so that the blocks between them hide the transfers; of the rest, the first ones are
recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from gulliver._compat import is_compiled
from gulliver.comm.world import current_world
from gulliver.errors import GulliverError
from gulliver.memory.activations import ActivationOffload, ActivationStack, HostArena, wrap_call
from gulliver.memory.streams import Copier
from gulliver.parallel.pipeline.stage import Stage
from gulliver.parallel.zero.optimizer import ZeroOptimizer
from gulliver.planner.model import (
    check_uncompiled,
    has_switch,
    recomputable_blocks,
    recompute_blocks,
)


class RecomputeSwitch:
    """Selects the blocks that the next forwards recompute or offload."""

    def __init__(
        self,
        model: nn.Module,
        kinds: Sequence[tuple[str, int]],
        offload: ActivationOffload | None = None,
    ) -> None:
        self._model, self._on, self._away = model, set[str](), set[str]()
        self._offload = offload
        if offload is not None:
            if is_compiled(model):
                raise GulliverError(
                    "activations of a model that is compiled as a whole cannot move to the host: "
                    "compile its blocks"
                )
            assert isinstance(offload.manager, ActivationStack)
            self._stack = offload.manager
        self.paths = _by_kind(recomputable_blocks(model), kinds)
        every = [path for paths in self.paths for path in paths]
        check_uncompiled(model, every)
        self._switched = has_switch(model)
        if self._switched:
            recompute_blocks(model, (), every)
        if self._switched and offload is None:
            return
        for path in every:
            module = model.get_submodule(path)
            wrap_call(module, self._around(path, module))

    def set(self, counts: Sequence[int], offloaded: Sequence[int] = ()) -> None:
        """Sets the blocks to recompute and to offload from now on."""
        self.settle()
        if any(offloaded) and self._offload is None:
            raise GulliverError("blocks are to move to the host, and there is no memory for them")
        counts_away = tuple(offloaded) or (0,) * len(self.paths)
        self._on, self._away = set(), set()
        moving = [number for number, count in enumerate(counts_away) if count]
        for number, (paths, again, away) in enumerate(
            zip(self.paths, counts, counts_away, strict=True)
        ):
            shift = moving.index(number) / len(moving) if away else 0.0
            chosen = [paths[place] for place in spread(len(paths), away, shift)]
            rest = [path for path in paths if path not in chosen]
            self._away.update(chosen)
            self._on.update(rest[:again])
        for path in (p for paths in self.paths for p in paths) if self._switched else ():
            vars(self._model.get_submodule(path))["gradient_checkpointing"] = path in self._on

    def settle(self) -> None:
        """Frees offloads of deleted graphs and flushes pending ones."""
        if self._offload is not None:
            self._offload.sweep()
            # The next shape has other sizes: reset the layout of the arena.
            self._offload.forget_unused()
            self._stack.leave()

    def _around(self, path: str, module: nn.Module) -> Callable[..., Any]:
        def call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            grad = torch.is_grad_enabled()
            if grad and path in self._away:
                return self._moved(module, inner, *args, **kwargs)
            if not grad or path not in self._on or self._switched:
                return inner(*args, **kwargs)
            return checkpoint(inner, *args, use_reentrant=False, **kwargs)

        return call

    def _moved(
        self, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Calls a block whose activations are offloaded; its inputs stay."""
        assert self._offload is not None
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._stack.begin()
        with self._offload.saving(module, given):
            return inner(*args, **kwargs)


def spread(count: int, chosen: int, shift: float = 0.0) -> list[int]:
    """`chosen` evenly spaced positions of a row of `count`."""
    return [int((number + shift) * count / chosen) for number in range(chosen)]


def offload_for(
    planner: Any, optimizer: ZeroOptimizer, copier: Copier | None
) -> ActivationOffload | None:
    """Activation offload for a planner with host memory; None without."""
    host = getattr(planner.costs, "host", None)
    if host is None or not getattr(planner, "pac", True):
        return None
    if optimizer.shards.manager is not None:
        raise GulliverError(
            "activations are planned to move to the host beside a memory limit, which moves them "
            "under its own budget: plan with costs without host=, or boost without memory_limit="
        )
    device = current_world().device
    if copier is None and device.type != "cuda":
        raise GulliverError(
            f"activations are planned to move to the host, and this rank computes on its {device}, "
            "whose memory is the host's: plan with costs without host=, or on GPUs"
        )
    stack = ActivationStack(HostArena(host.locked, device, copier), device)
    gatherer = optimizer.shards.gatherer
    return ActivationOffload(stack, outer=(gatherer.pack, gatherer.unpack))


class StageSwitch:
    """Selects the recomputed blocks of a pipeline stage."""

    def __init__(
        self,
        stage: Stage,
        kinds: Sequence[tuple[str, int]],
        offload: ActivationOffload | None = None,
    ) -> None:
        if offload is not None:
            raise GulliverError(
                "activations that move to the host are not supported with stages of a pipeline: "
                "plan with costs without host="
            )
        self._forward = stage.stage_forward
        numbers = {path: number for number, path in enumerate(stage.stack.blocks)}
        found = _by_kind(stage.stack.blocks, kinds)
        self._numbers = [[numbers[path] for path in paths] for paths in found]

    def set(self, counts: Sequence[int], offloaded: Sequence[int] = ()) -> None:
        """Sets how many blocks of each kind are recomputed from now on."""
        assert not any(offloaded), "refused when the loader is made"
        chosen = zip(self._numbers, counts, strict=True)
        self._forward.recomputed = {n for numbers, count in chosen for n in numbers[:count]}

    def settle(self) -> None:
        """Does nothing: stages offload nothing."""


def _by_kind(paths: Sequence[str], kinds: Sequence[tuple[str, int]]) -> list[list[str]]:
    """Paths of the blocks of each kind; with several kinds, those whose path names it."""
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
