"""Hooks on the model's own call, and around compiled parts of it.

Waiting for parameters needs no hooks, see `gather.py`. Two things do: a pass of stage 3 begins
and ends with the model's call, and a compiled region must find its parameters there when it is
entered, because what it reads is not seen from Python. Where the model itself is compiled, before
boost or after, that is all of them. What else is compiled after boost, such as a function, is not
known here: it is compiled around whatever reads a parameter that waits, which is right, but slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from gulliver._compat import (
    can_hook_saving,
    compiled_call,
    is_compiled,
    is_transformed,
    outside_transforms,
    replace_compiled_call,
    replace_recomputed,
    untransformed,
)
from gulliver.errors import GulliverError
from gulliver.memory import PendingParameter, hide_from_compilers
from gulliver.parallel.zero._gatherer import Gatherer, refer
from gulliver.parallel.zero._shards import ShardedState
from gulliver.parallel.zero._unfreezing import train_unfrozen


class _Calls:
    """Enters and leaves passes with the calls of a model."""

    def __init__(self, shards: ShardedState | None, model: nn.Module | None = None) -> None:
        self._shards = shards
        self._modules = [] if model is None else list(model.modules())
        self._open: list[tuple[Gatherer, Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        return _Calls(None)  # a copy of the model has its parameters whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._shards is None or self._shards.stage < 3:
            return _Calls, (None,)
        raise GulliverError(
            "a model of stage 3 cannot be pickled, its parameters are shards: save it with "
            "booster.save_model(model, path)"
        )

    def enter(self, module: nn.Module, args: Any) -> None:
        # True in what is traced, whenever that runs: what is compiled reads everything at once.
        self._enter(torch.compiler.is_compiling())

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._leave()

    def _enter(self, whole: bool) -> None:
        if self._shards is None:
            return
        gatherer = self._shards.gatherer
        if gatherer.sharded:
            self._begin(gatherer)
        if whole:
            gatherer.use_together(gatherer.chunks)
        elif is_transformed():
            self._check_wrapped(gatherer)

    def _check_wrapped(self, gatherer: Gatherer) -> None:
        """Refuses pending parameters that `torch.func` has wrapped: reads of them are not seen."""
        if not gatherer.sharded:
            gatherer.finish_all()
        for parameter in self._modules[0].parameters():
            inner = untransformed(parameter)
            if inner is not parameter and type(inner) is PendingParameter:
                raise GulliverError(
                    "torch.func was given parameters that stage 3 has sharded: give it copies, "
                    "such as {name: p.detach().clone() for name, p in model.named_parameters()}"
                )

    def _begin(self, gatherer: Gatherer) -> None:
        assert self._shards is not None
        if self._shards.frozen_trainable:
            train_unfrozen(self._shards)
        for module in self._modules[1:]:
            _wait_before(module, self._shards)
        with outside_transforms():
            gatherer.enter_forward()
        # Inside of `torch.func` hooks cannot be set: then what is used stays until the step.
        hooks = saved_tensors_hooks(gatherer.pack, gatherer.unpack)
        context = hooks if can_hook_saving() else nullcontext()
        # Entered here and left in `leave`, which torch calls for failed forwards, too
        # (`always_call`). Nested calls of the model push one entry each, and pop their own.
        context.__enter__()
        self._open.append((gatherer, context))

    def _leave(self) -> None:
        if not self._open:
            return
        gatherer, context = self._open.pop()
        context.__exit__(None, None, None)
        failed = sys.exc_info()[1]
        try:
            with outside_transforms():
                gatherer.leave_forward()
        except GulliverError as error:
            # What ended the forward ends this too; torch would warn of it.
            if str(error) != str(failed):
                raise


def watch_calls(model: nn.Module, shards: ShardedState) -> list[RemovableHandle]:
    """Registers the hooks that the stage needs on a model."""
    _hide_from_compilers()
    hooks = list[RemovableHandle]()
    for module in model.modules():
        if is_compiled(module):
            waiting = _waiting(module, shards)
            hook = module.register_forward_pre_hook(lambda *_, wait=waiting: wait(), prepend=True)
            hooks.append(hook)
        # What the model itself reads, `_Calls.enter` waits for inside of its call.
        if module is not model:
            _wait_before(module, shards)
    calls = _Calls(shards, model)
    hooks.append(model.register_forward_pre_hook(calls.enter, prepend=True))
    if shards.stage == 3:
        replace_recomputed(refer)
        hooks.append(model.register_forward_hook(calls.leave, always_call=True))
    return hooks


def _wait_before(module: nn.Module, shards: ShardedState) -> None:
    """Makes the compiled call of a module wait for its parameters; once, after boost too."""
    inner = compiled_call(module)
    if inner is not None and not hasattr(inner, "_waits"):
        call = _after(_waiting(module, shards), inner)
        vars(call)["_waits"] = True
        replace_compiled_call(module, call)


@cache
def _hide_from_compilers() -> None:
    """Keeps compilers out of what moves parameters; late, as it takes seconds to import them."""
    for owner, names in ((_Calls, ("_enter", "_leave")), (Gatherer, ("pack", "unpack"))):
        for name in names:
            setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
    hide_from_compilers()


def _waiting(region: nn.Module, shards: ShardedState) -> Callable[[], None]:
    parameters = {id(p) for p in region.parameters()}

    def wait() -> None:
        gatherer = shards.gatherer
        gatherer.use_together(
            [
                sharded
                for sharded in gatherer.chunks
                if any(id(p) in parameters for p in sharded.chunk.parameters.values())
            ]
        )

    return wait


def _after(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable(recursive=False)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return both
