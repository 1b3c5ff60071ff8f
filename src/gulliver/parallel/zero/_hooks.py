"""Hooks on the model's own call, and around compiled parts of it.

Waiting for parameters needs no hooks, see `_gatherer.py`. Two things do: a pass of stage 3 begins
and ends with the model's call, and a compiled region must find its parameters there when it is
entered, because what it reads is not seen from Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gulliver._compat import compiled_call, is_compiled, replace_compiled_call
from gulliver.errors import GulliverError
from gulliver.parallel.zero._gatherer import Gatherer

if TYPE_CHECKING:
    from gulliver.parallel.zero._optimizer import ZeroOptimizer


class _Calls:
    """Enters and leaves passes with the calls of a model."""

    def __init__(self, optimizer: ZeroOptimizer | None) -> None:
        self._optimizer = optimizer
        self._open: list[tuple[Gatherer, Any]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Calls:
        return _Calls(None)  # a copy of the model has its parameters whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GulliverError(
            "a model of stage 3 cannot be pickled, its parameters are shards: save it with "
            "booster.save_model(model, path)"
        )

    def enter(self, module: nn.Module, args: Any) -> None:
        if self._optimizer is None:
            return
        gatherer = self._optimizer.gatherer
        gatherer.enter_forward()
        context = saved_tensors_hooks(gatherer.pack, gatherer.unpack)
        context.__enter__()
        self._open.append((gatherer, context))

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if not self._open:
            return
        gatherer, context = self._open.pop()
        context.__exit__(None, None, None)
        gatherer.leave_forward()


def watch_calls(model: nn.Module, optimizer: ZeroOptimizer) -> None:
    """Registers what the stage of the optimizer needs."""
    for module in model.modules():
        if is_compiled(module):
            waiting = _waiting(module, optimizer)
            module.register_forward_pre_hook(lambda *_, wait=waiting: wait(), prepend=True)
        inner = compiled_call(module)
        if inner is not None:
            replace_compiled_call(module, _after(_waiting(module, optimizer), inner))
    if optimizer.stage == 3:
        calls = _Calls(optimizer)
        model.register_forward_pre_hook(calls.enter, prepend=True)
        model.register_forward_hook(calls.leave, always_call=True)


def _waiting(region: nn.Module, optimizer: ZeroOptimizer) -> Callable[[], None]:
    parameters = {id(p) for p in region.parameters()}

    def wait() -> None:
        gatherer = optimizer.gatherer
        for sharded in gatherer.chunks:
            if any(id(p) in parameters for p in sharded.chunk.parameters.values()):
                gatherer.use(sharded)

    return wait


def _after(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable(recursive=False)
    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return call(*args, **kwargs)

    return both
