"""Runs the forward of one rank's stages; infers the shapes of placeholders on meta."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.errors import GulliverError
from gulliver.parallel.pipeline.stack import Stack


def to_meta(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty: Tensor = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=False)
        memo[id(tensor)] = empty
    return copy.deepcopy(module, memo)


def run_on_meta(module: nn.Module, args: Any, kwargs: Any) -> Any:
    with torch.no_grad():
        return module(*map_tensors(args, _empty), **map_tensors(kwargs, _empty))


def run_filled(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Runs a copy of a meta module with arbitrary values; only the output's shape is meaningful."""
    device = device_of(args, kwargs)
    real = copy.deepcopy(module).to_empty(device=device)
    with torch.no_grad():
        for tensor in [*real.parameters(), *real.buffers()]:
            # Not all equal, so that a router has a top-k; without using the random state.
            ramp = torch.arange(tensor.numel(), device=device).view(tensor.shape)
            tensor.copy_(ramp % 7 / 64 if tensor.is_floating_point() else torch.zeros_like(ramp))
        return real(*map_tensors(args, _finite), **map_tensors(kwargs, _finite))


def find_form(module: nn.Module, path: str, args: Any, kwargs: Any) -> int | None:
    """Returns the number of entries after a block's hidden state; None for a plain tensor."""
    try:
        found = run_on_meta(module, args, kwargs)
    except Exception:
        # Shapes depend on values, as in experts: run the module once with arbitrary values.
        try:
            found = run_filled(module, args, kwargs)
        except Exception as error:
            raise GulliverError(
                f"the outputs of block {path!r} depend on the values of its inputs ({error}): pass "
                "extra=... (of the plugin, or of stack_of)"
            ) from error
    if isinstance(found, Tensor):
        return None
    if not isinstance(found, tuple | list) or any(map(_read_later, found[1:])):
        raise GulliverError(
            f"block {path!r} returns more than its hidden state, which stages do not exchange: if "
            "nothing reads it, pass extra=... (of the plugin, or of stack_of)"
        )
    return len(found) - 1


def _read_later(entry: Any) -> bool:
    """Whether a later block may read an entry; attention weights are only collected."""
    if isinstance(entry, tuple | list):
        return any(map(_read_later, entry))
    return isinstance(entry, Tensor) and entry.dim() != SCORES


SCORES = 4


def fill(tensor: Tensor, device: torch.device) -> Tensor:
    value = float("nan") if tensor.is_floating_point() else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)


def device_of(*values: Any) -> torch.device:
    found: list[Tensor] = []
    map_tensors(values, found.append)
    return found[0].device if found else torch.device("cpu")


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        made = {key: map_tensors(entry, function) for key, entry in value.items()}
        return made if type(value) is dict else _like(value, made)
    if isinstance(value, tuple | list):
        entries = [map_tensors(entry, function) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    return value


def _like(value: Mapping[str, Any], made: dict[str, Any]) -> Any:
    try:
        return type(value)(**made)
    except TypeError:
        return made


def _finite(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num() if tensor.is_floating_point() else tensor


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


# Forward of a stage: the model's own forward, in which blocks of other stages do nothing.


Carry = tuple[Tensor, ...]
"""Tensors that one stage sends to the next."""


# [Note: the model's own forward] Tracing or rewriting a model into stages fails if its forward
# computes masks, positions or rotary tables before the blocks. So the model is called as usual,
# with the full micro-batch, and its own code computes these. Only its blocks behave differently
# (`StageForward.block`):
#
# - a block before the stage's first returns its hidden state unchanged;
# - the first block of the stage gets the hidden state that the previous stage sent;
# - after the last block of the stage, an exception with the hidden state ends the forward
#   (`StageEnd`), so that nothing after it runs. On the last stage the forward runs to its end.
#
# Placeholders replace modules around the blocks that are on other stages. They return NaN, which
# is normally replaced before it is used; if it leaks into a block, this is detected and rejected
# (`_refuse_leaks`).
#
# In an encoder-decoder, the output of the encoder, the *memory*, is sent together with the hidden
# state (`StageForward.around_memory`). The tensors sent between stages before block b are
#
#     (hidden,) inside the first list
#     (memory,) between the lists
#     (hidden, memory) inside the second list
class StageEnd(Exception):
    """Raised to end the forward of every stage but the last; carries the tensors to send."""

    def __init__(self, carry: Carry) -> None:
        super().__init__("the stage's forward has ended")
        self.carry = carry


@dataclass
class ForwardState:
    """State of the forward that is running."""

    start: int  # Index of the stage's first block
    stop: int  # Index of its last block, plus one
    last: bool  # Whether the model ends with this stage
    # Received hidden state for the first block; None if the stage begins with other modules.
    hidden: Tensor | None
    memory: Tensor | None  # Output of the first list's module (an encoder), received or computed
    live: bool  # Whether the stage's own computation has begun
    look: bool  # Whether to check for placeholder outputs in arguments of blocks
    # Modules of other stages that were called before the blocks.
    elsewhere: list[str] = field(default_factory=list)


class StageForward:
    """Runs a model's forward with only the blocks of one stage."""

    def __init__(self, stack: Stack, bounds: tuple[int, ...]) -> None:
        self.stack, self.bounds = stack, bounds
        self.state: ForwardState | None = None
        self.extra = stack.extra
        self.recomputed: Collection[int] = ()

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    def forward(
        self,
        call: Callable[..., Any],
        stage: int,
        carry: Carry,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        look: bool = False,
    ) -> Any:
        self.state = state = self._new_state(stage, carry, look)
        try:
            output = call(*args, **kwargs)
        except StageEnd as end:
            return end.carry
        finally:
            self.state = None
        if not state.last or not state.live:
            name = self.stack.blocks[state.stop - 1 if state.live else state.start]
            raise GulliverError(
                f"the model's forward ended without running block {name!r} of its stage: a "
                "pipeline must run all blocks in order"
            )
        if look:
            self._refuse_leak_behind(state, output)
        return output

    def _new_state(self, stage: int, carry: Carry, look: bool) -> ForwardState:
        start, stop = self.bounds[stage], self.bounds[stage + 1]
        border = self.stack.border
        hidden, memory = None, None
        if stage > 0 and start == border:
            (memory,) = carry
        elif stage > 0:
            hidden, memory = carry if border and start > border else (carry[0], None)
        last = stage == self.stages - 1
        return ForwardState(start, stop, last, hidden, memory, stage == 0, look)

    def running(self, name: str) -> ForwardState:
        if self.state is None:
            raise GulliverError(
                f"the model was called directly, but {name!r} and others are on other pipeline "
                "stages: run it with Pipeline.run, or Booster.execute_pipeline"
            )
        return self.state

    def block(
        self, number: int, block: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self.state is None and self.stages == 1:
            return self._run(number, call, args, kwargs)
        state = self.running(self.stack.blocks[number])
        if not state.start <= number < state.stop:
            return self.skip_block(block, self.stack.blocks[number], args, kwargs)
        if number == state.start:
            args, kwargs = self._enter(state, block, args, kwargs)
        if state.look:
            self._refuse_leaks(state, number, hidden_of(block, args, kwargs), args, kwargs)
        output = self._run(number, call, args, kwargs)
        self._check_form(output, number)
        leaves = number == state.stop - 1 and not state.last
        if leaves and state.stop != self.stack.border:
            hidden = first_of(output)
            raise StageEnd((hidden,) if state.memory is None else (hidden, state.memory))
        return output

    def _enter(
        self, state: ForwardState, block: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        state.live = True
        if state.hidden is None:
            return args, kwargs
        return with_hidden(block, args, kwargs, state.hidden)

    def _run(self, number: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number not in self.recomputed or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, **kwargs)

    def skip_block(self, block: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Passes the hidden state through a skipped block, in the form of the block's output."""
        if self.extra == -1:
            self.extra = find_form(to_meta(block), path, args, kwargs)
        hidden = hidden_of(block, args, kwargs)
        return hidden if self.extra is None else (hidden, *[None] * self.extra)

    def _check_form(self, output: Any, number: int) -> None:
        found = None if isinstance(output, Tensor) else len(output) - 1
        if self.extra not in (-1, found):
            raise GulliverError(
                f"block {self.stack.blocks[number]!r} returns {_form(found)}, not "
                f"{_form(self.extra)}: pass extra={found!r} to the plugin or to stack_of"
            )

    def around_memory(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.state is None and self.stages == 1:
            return call(*args, **kwargs)
        state = self.running(self.stack.memory or "")
        if state.start >= self.stack.border:
            assert state.memory is not None, "stages of the second list are handed the memory"
            state.live = state.start == self.stack.border
            return _finished(state.memory)
        output = call(*args, **kwargs)
        state.memory = first_of(output)
        if state.stop == self.stack.border and not state.last:
            raise StageEnd((state.memory,))
        return output

    def _refuse_leak_behind(self, state: ForwardState, output: Any) -> None:
        # Their use does not prove it, because the hidden state itself may contain NaN.
        came = [t for t in (state.hidden, state.memory) if t is not None]
        if not state.elsewhere or any(_has_nan(t) for t in came):
            return
        # The loss of a micro-batch without labels is a mean over nothing, which is NaN.
        found = [tensor for _, tensor in _tensors(output) if tensor.ndim]
        if any(_has_nan(tensor) for tensor in found):
            raise GulliverError(
                f"the model's output is NaN, because {' or '.join(map(repr, state.elsewhere))} is "
                "on another stage but is used after the blocks: keep it on every stage "
                "(everywhere=[...] of the plugin, or of stack_of)"
            )

    def _refuse_leaks(
        self, state: ForwardState, number: int, hidden: Tensor, args: Any, kwargs: Any
    ) -> None:
        for path, tensor in _tensors((args, kwargs)):
            if tensor is hidden or tensor is state.memory or not tensor.is_floating_point():
                continue
            if _has_nan(tensor):
                raise GulliverError(
                    f"argument {path} of block {self.stack.blocks[number]!r} is computed by a "
                    "module on another stage: keep that module on every stage (everywhere=[...] "
                    "of the plugin, or of stack_of)"
                )


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(torch.isnan(tensor).any())


def _form(extra: int | None) -> str:
    return "a tensor" if extra is None else f"a tuple of {extra + 1}"


def _finished(memory: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=memory)  # pyright: ignore[reportArgumentType]


def first_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def hidden_of(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    return args[0] if args else kwargs[_first_name(block)]


def with_hidden(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, _first_name(block): hidden}


def _first_name(block: nn.Module) -> str:
    return next(iter(inspect.signature(block.forward).parameters))


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            yield from _tensors(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, tuple | list):
        for number, entry in enumerate(value):
            yield from _tensors(entry, f"{path}.{number}" if path else str(number))


# Placeholders for modules of other stages: without parameters, at the same path, with outputs of
# the same shape.
#
# - `PlaceholderBlock`, for a block: returns the hidden state.
# - `Placeholder`, for any other module with parameters: returns tensors full of NaN, with the
#   shape, dtype and device of the module's output. It infers the shape by running a copy of the
#   module on meta, without computation or memory.
# - `own`, for the blocks of this stage: they stay the same objects under the same names, but calls
#   go through the `StageForward`. Their class becomes a subclass of the same name, so that calls
#   are intercepted before hooks, compiled calls and checkpoints of the block.


# [Note: NaN, not zeros] Every stage runs the model's own forward, so a placeholder has to return a
# tensor of the right shape, which is normally replaced before it is used. If it reached a block in
# another way, zeros would silently train on nonsense, but NaN is detected in the block's arguments
# and raises an error that names the argument (`StageForward._refuse_leaks`).
class _OnMeta:
    """Refers to a meta module without registering it as a submodule."""

    def __init__(self, module: nn.Module) -> None:
        found = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.device = found if found.type != "meta" else torch.device("cpu")
        self.module = to_meta(module)


class EmptyModule(nn.Module):
    """Placeholder for a module with parameters or buffers; the placeholder has none."""

    def __init__(self, stage_forward: StageForward, path: str, module: nn.Module) -> None:
        super().__init__()
        self._original = _OnMeta(module)
        self._stage_forward, self._path = stage_forward, path
        self.train(module.training)

    def __getattr__(self, name: str) -> Any:
        # Models read sizes, strides and dtypes of their parameters.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
        found = getattr(self._original.module, name)
        return fill(found, self._original.device) if isinstance(found, Tensor) else found

    def get_parameter(self, target: str) -> nn.Parameter:
        return self._original.module.get_parameter(target)

    def extra_repr(self) -> str:
        return f"in place of {type(self._original.module).__name__}"


class Placeholder(EmptyModule):
    """Placeholder for a module around the blocks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._stage_forward.running(self._path)
        if state.live:
            raise GulliverError(
                f"{self._path!r} is used by stage {self._stage_forward.bounds.index(state.start)} "
                "of the pipeline but is on another stage; name it in everywhere=[...] or "
                "after=[...] (of the plugin, or of stack_of)"
            )
        state.elsewhere.append(self._path)
        device = device_of(args, kwargs)
        try:
            found = run_on_meta(self._original.module, args, kwargs)
        except Exception as error:
            raise GulliverError(
                f"{self._path!r} is on another stage, and its output shape cannot be inferred "
                f"without its values ({error}): keep it on every stage (everywhere=[...] of the "
                "plugin, or of stack_of)"
            ) from error
        return map_tensors(found, lambda tensor: fill(tensor, device))


class PlaceholderBlock(EmptyModule):
    """Placeholder for a block."""

    def __init__(self, stage_forward: StageForward, number: int, block: nn.Module) -> None:
        super().__init__(stage_forward, stage_forward.stack.blocks[number], block)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._stage_forward.running(self._path)
        return self._stage_forward.skip_block(self._original.module, self._path, args, kwargs)


def own(stage_forward: StageForward, number: int, block: nn.Module) -> None:
    vars(block)["_stage_forward"], vars(block)["_number"] = stage_forward, number
    block.__class__ = _asking(type(block))


def own_memory(stage_forward: StageForward, module: nn.Module) -> None:
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
