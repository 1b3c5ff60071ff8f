"""What stands where a module of another stage was: no parameters, the same place, the same shape.

- `GhostBlock`, for a block: hands the hidden state on.
- `Ghost`, for any other module that holds parameters: returns tensors of the shape, dtype and
  device that the module would return, full of NaN. It finds the shape by running a copy of the
  module on meta, where nothing is computed and nothing is stored.
- `own`, for the blocks of this stage: they stay the objects they are, under their own names, but
  are asked through the `Conductor` when they are called. Their class becomes a subclass of the
  same name, so that the call is caught before hooks, compiled calls and checkpoints of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.parallel.pipeline._conductor import Conductor
from gulliver.parallel.pipeline._hollow import device_of, fill, map_tensors, run_hollow, to_meta


class _Twin:
    """Keeps a module out of sight of the module that holds it."""

    def __init__(self, module: nn.Module) -> None:
        found = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.device = found if found.type != "meta" else torch.device("cpu")
        self.module = to_meta(module)


class Hollow(nn.Module):
    """A module without tensors that answers for one that had some."""

    def __init__(self, conductor: Conductor, path: str, module: nn.Module) -> None:
        super().__init__()
        self._twin = _Twin(module)
        self._conductor, self._path = conductor, path
        self.train(module.training)

    def __getattr__(self, name: str) -> Any:
        # Models look at sizes, strides and dtypes of what they own.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        found = getattr(self._twin.module, name)
        return fill(found, self._twin.device) if isinstance(found, Tensor) else found

    def get_parameter(self, target: str) -> nn.Parameter:
        """A parameter of the module that was here, without its values, on meta."""
        return self._twin.module.get_parameter(target)

    def extra_repr(self) -> str:
        """The class of the module that was here."""
        return f"in place of {type(self._twin.module).__name__}"


class Ghost(Hollow):
    """In place of a module around the blocks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """NaN, in the shape of what the module would return.

        Raises:
            GulliverError: the module's result is needed on this stage.
        """
        passage = self._conductor.running(self._path)
        if passage.live:
            raise GulliverError(
                f"{self._path!r} is used by stage {self._conductor.bounds.index(passage.start)} "
                "of the pipeline and lies on another: name it in everywhere=[...] or after=[...] "
                "(of HybridParallelPlugin, or stack_of)"
            )
        device = device_of(args, kwargs)
        try:
            found = run_hollow(self._twin.module, args, kwargs)
        except Exception as error:
            raise GulliverError(
                f"{self._path!r} lies on another stage, and what shape it returns cannot be found "
                f"without its values ({error}): keep it on every stage (everywhere=[...] of "
                "HybridParallelPlugin, or stack_of)"
            ) from error
        return map_tensors(found, lambda tensor: fill(tensor, device))


class GhostBlock(Hollow):
    """In place of a block."""

    def __init__(self, conductor: Conductor, number: int, block: nn.Module) -> None:
        super().__init__(conductor, conductor.stack.blocks[number], block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state, in the form in which the block would return its own."""
        self._conductor.running(self._path)
        return self._conductor.pass_by(self._twin.module, self._path, args, kwargs)


def own(conductor: Conductor, number: int, block: nn.Module) -> None:
    """Lets a block ask the conductor when it is called."""
    vars(block)["_conductor"], vars(block)["_number"] = conductor, number
    block.__class__ = _asking(type(block))


def own_memory(conductor: Conductor, module: nn.Module) -> None:
    """Lets the module around the first list of blocks ask the conductor when it is called."""
    vars(module)["_conductor"] = conductor
    module.__class__ = _remembering(type(module))


@cache
def _asking(kind: type[nn.Module]) -> type[nn.Module]:
    def ask(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = kind.__call__.__get__(self)
        return vars(self)["_conductor"].block(vars(self)["_number"], self, call, args, kwargs)

    return _subclass(kind, ask)


@cache
def _remembering(kind: type[nn.Module]) -> type[nn.Module]:
    def ask(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = kind.__call__.__get__(self)
        return vars(self)["_conductor"].around_memory(call, args, kwargs)

    return _subclass(kind, ask)


def _subclass(kind: type[nn.Module], call: Callable[..., Any]) -> type[nn.Module]:
    fields = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), fields)
