"""Refuses modules that move or convert their parameters while these lie in chunks.

Under stage 3 a parameter is a view of memory that comes and goes: ``.to`` or ``.cpu()`` would make
a whole copy that nobody trains. Below stage 3 the step refuses parameters that were replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from gulliver.errors import GulliverError

DURING = (
    "and {strategy} keeps its parameters where they are: remove the call, or make it in __init__ "
    "or configure_model; batches are moved by Lightning"
)
AFTER = (
    "and a fit of {strategy} has left its parameters sharded: give other Trainers a new module, "
    "with the checkpoint (ckpt_path=)"
)


class _Unmoved:
    """Replaces the method of a module that ``.to``, ``.cpu()`` and others call."""

    def __init__(self, module: nn.Module, message: str) -> None:
        self._module, self._message = module, message

    def __call__(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        raise GulliverError(self._message)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        copy = memo[id(self._module)]  # a copy of the module may be moved
        return type(copy)._apply.__get__(copy)


def refuse_moves(module: nn.Module, strategy: str, why: str = DURING) -> None:
    """Refuses moves of a module and of each part that has parameters."""
    for name, part in module.named_modules():
        if next(part.parameters(), None) is not None:
            told = type(part).__name__ + (f" ({name})" if name else "")
            moves = "is moved or converted (.to, .cpu(), .half() ...)"
            message = f"{told} {moves}, {why.format(strategy=strategy)}"
            # In the instance, so that its class and other modules of it are left alone.
            vars(part)["_apply"] = _Unmoved(part, message)
