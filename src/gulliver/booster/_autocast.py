"""Mixed precision: a model's own call runs under autocast.

By hooks, not by a wrapped forward: a deep copy of the model (an average of its weights, say) takes
hooks along, while a wrapped forward would go on calling the model that it was copied from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gulliver.errors import GulliverError, nearest

PRECISIONS = {"bf16": torch.bfloat16}


def check_precision(name: Any) -> None:
    """Refuses a precision that is not supported."""
    if name is not None and name not in PRECISIONS:
        raise GulliverError(
            f"mixed_precision={name!r} is not supported: {nearest(str(name), PRECISIONS)} (or None)"
        )


class _Autocast:
    """Enters autocast before a call and leaves it after, also when the call fails."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._open: list[Any] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        context = torch.autocast(self._device, self._dtype)
        context.__enter__()
        self._open.append(context)

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._open.pop().__exit__(None, None, None)


def autocast_calls(model: nn.Module, device: str, precision: str) -> None:
    """Runs every call of `model` under autocast; its parameters stay as they are."""
    hooks = _Autocast(device, PRECISIONS[precision])
    model.register_forward_pre_hook(hooks.enter, prepend=True)
    model.register_forward_hook(hooks.leave, always_call=True)
