"""Placeholder modules for modules of other stages: no parameters, the same path, the same shapes.

- `PlaceholderBlock`, for a block: hands the hidden state on.
- `Placeholder`, for any other module that holds parameters: returns tensors of the shape, dtype and
  device that the module would return, full of NaN. It finds the shape by running a copy of the
  module on meta, where nothing is computed and nothing is stored.
- `own`, for the blocks of this stage: they stay the objects they are, under their own names, but
  go through the `StageForward` when they are called. Their class becomes a subclass of the same
  name, so that the call is caught before hooks, compiled calls and checkpoints of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.parallel.pipeline._meta import device_of, fill, map_tensors, run_on_meta, to_meta
from gulliver.parallel.pipeline._stage_forward import StageForward


# [Note: NaN, not zeros] Every stage runs the model's own forward, so a module that lies elsewhere
# has to return something of the right shape. What it returns is replaced before it is used. If it
# should reach a block by another way all the same, zeros would train silently on nonsense; NaN is
# seen in the block's arguments, and refused by the argument's name (`StageForward._refuse_leaks`).
class _OnMeta:
    """Keeps a module on meta, out of sight of `nn.Module`, which would register its parameters."""

    def __init__(self, module: nn.Module) -> None:
        found = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.device = found if found.type != "meta" else torch.device("cpu")
        self.module = to_meta(module)


class EmptyModule(nn.Module):
    """A module without tensors in place of one with some."""

    def __init__(self, stage_forward: StageForward, path: str, module: nn.Module) -> None:
        super().__init__()
        self._original = _OnMeta(module)
        self._stage_forward, self._path = stage_forward, path
        self.train(module.training)

    def __getattr__(self, name: str) -> Any:
        # Models look at sizes, strides and dtypes of what they own.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        found = getattr(self._original.module, name)
        return fill(found, self._original.device) if isinstance(found, Tensor) else found

    def get_parameter(self, target: str) -> nn.Parameter:
        """Returns a parameter of the module that was here, without its values, on meta."""
        return self._original.module.get_parameter(target)

    def extra_repr(self) -> str:
        """Returns the class of the module that was here."""
        return f"in place of {type(self._original.module).__name__}"


class Placeholder(EmptyModule):
    """A placeholder of a module around the blocks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns NaN in the shape of what the module would return."""
        state = self._stage_forward.running(self._path)
        if state.live:
            raise GulliverError(
                f"{self._path!r} is used by stage {self._stage_forward.bounds.index(state.start)} "
                "of the pipeline and lies on another: name it in everywhere=[...] or after=[...] "
                "(of the plugin, or of stack_of)"
            )
        state.elsewhere.append(self._path)
        device = device_of(args, kwargs)
        try:
            found = run_on_meta(self._original.module, args, kwargs)
        except Exception as error:
            raise GulliverError(
                f"{self._path!r} lies on another stage, and what shape it returns cannot be found "
                f"without its values ({error}): keep it on every stage (everywhere=[...] of "
                "the plugin, or of stack_of)"
            ) from error
        return map_tensors(found, lambda tensor: fill(tensor, device))


class PlaceholderBlock(EmptyModule):
    """A placeholder of a block."""

    def __init__(self, stage_forward: StageForward, number: int, block: nn.Module) -> None:
        super().__init__(stage_forward, stage_forward.stack.blocks[number], block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the hidden state, in the form in which the block would return its own."""
        self._stage_forward.running(self._path)
        return self._stage_forward.pass_by(self._original.module, self._path, args, kwargs)


def own(stage_forward: StageForward, number: int, block: nn.Module) -> None:
    """Makes a block go through the `StageForward` when it is called."""
    vars(block)["_stage_forward"], vars(block)["_number"] = stage_forward, number
    block.__class__ = _asking(type(block))


def own_memory(stage_forward: StageForward, module: nn.Module) -> None:
    """Makes the module around the first list of blocks go through the `StageForward`."""
    vars(module)["_stage_forward"] = stage_forward
    module.__class__ = _remembering(type(module))


@cache
def _asking(kind: type[nn.Module]) -> type[nn.Module]:
    def ask(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = kind.__call__.__get__(self)
        return vars(self)["_stage_forward"].block(vars(self)["_number"], self, call, args, kwargs)

    return _subclass(kind, ask)


@cache
def _remembering(kind: type[nn.Module]) -> type[nn.Module]:
    def ask(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = kind.__call__.__get__(self)
        return vars(self)["_stage_forward"].around_memory(call, args, kwargs)

    return _subclass(kind, ask)


def _subclass(kind: type[nn.Module], call: Callable[..., Any]) -> type[nn.Module]:
    fields = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), fields)
