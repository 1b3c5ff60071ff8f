"""Calls of modules with something around them, such as computing again in backward.

What is around replaces `forward` of one module, or its compiled call. Copies of the module have a
plain call again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gulliver._compat import compiled_call, replace_compiled_call

Around = Callable[..., Any]
"""Called with the call, its positional and its keyword arguments."""


class AroundCall:
    """Call of a module with something around it."""

    # [Note: copies] A function in the place of `forward` is shared by the copies of a module, whose
    # calls would all run the first one. So a copy, such as an average of the weights, gets what is
    # inside, which is copied with it.

    def __init__(self, call: Callable[..., Any], around: Around) -> None:
        self._call, self.around = call, around
        update_wrapper(self, call)  # its signature is read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.around(self._call, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._call, memo)


def wrap_call(module: nn.Module, around: Around) -> None:
    """Puts something around a module's calls; one that is compiled by itself stays compiled."""
    compiled = compiled_call(module)
    if compiled is not None:
        replace_compiled_call(module, AroundCall(compiled, around))
    else:
        module.forward = AroundCall(module.forward, around)


def recompute_modules(model: nn.Module, paths: Iterable[str]) -> None:
    """Makes backward compute modules again instead of keeping what they computed."""
    # Random numbers are drawn as they were in the forward.
    for path in paths:
        wrap_call(model.get_submodule(path), _again)


def _again(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return call(*args, **kwargs)
    return checkpoint(call, *args, use_reentrant=False, **kwargs)
