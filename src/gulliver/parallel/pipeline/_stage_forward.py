"""The stage forward: the model's own forward, in which blocks of other stages do nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gulliver.errors import GulliverError
from gulliver.parallel.pipeline._meta import find_form, to_meta
from gulliver.parallel.pipeline._stack import Stack

Carry = tuple[Tensor, ...]
"""What one stage hands to the next."""


# [Note: the model's own forward] Tracing or rewriting a model into stages fails where its forward
# computes masks, positions or rotary tables before the blocks. So the model is called as ever, with
# the whole micro-batch, and its own code makes these. What is different is what its blocks do
# (`StageForward.block`):
#
# - a block before the stage's first returns the hidden state that it got;
# - the first block of the stage is given the hidden state that the stage before sent;
# - after the last block of the stage the forward is left, by an exception that carries the hidden
#   state out (`StageEnd`), so that nothing behind it runs. On the last stage it runs to its end.
#
# In place of modules around the blocks that lie elsewhere are placeholders (`_placeholders.py`).
# They return NaN, not zeros: what they return is replaced before it is used, and if it should leak
# into a block by another way, that is seen and refused by name (`_refuse_leaks`) rather than
# trained on.
#
# In an encoder-decoder the finished output of the encoder, the *memory*, travels with the hidden
# state (`StageForward.around_memory`). What is carried over the cut before block b is
#
#     (hidden,) inside the first list
#     (memory,) between the lists
#     (hidden, memory) inside the second list
class StageEnd(Exception):
    """Ends the forward of a stage that is not the last."""

    def __init__(self, carry: Carry) -> None:
        super().__init__("the forward of a stage is done")
        self.carry = carry


@dataclass
class ForwardState:
    """The state of a running forward."""

    start: int  # Number of the stage's first block
    stop: int  # Number of its last block, plus one
    last: bool  # Whether the model ends with this stage
    # Received hidden state for the first block; None where the stage begins with modules.
    hidden: Tensor | None
    memory: Tensor | None  # Output of the first list's module (an encoder), received or computed
    live: bool  # Whether this stage's own computation has begun
    look: bool  # Whether to look for what leaks past the received tensors
    # Modules of other stages that were asked for something before the blocks.
    elsewhere: list[str] = field(default_factory=list)


class StageForward:
    """Decides what a model's blocks do on one rank when they are called."""

    def __init__(self, stack: Stack, bounds: tuple[int, ...]) -> None:
        self.stack, self.bounds = stack, bounds
        self.state: ForwardState | None = None
        self.extra = stack.extra
        self.recomputed: Collection[int] = ()

    @property
    def stages(self) -> int:
        """Number of stages of the whole pipeline."""
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
        """Runs one micro-batch through one stage."""
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
                f"the model's forward ended without running block {name!r} of its stage: the "
                "blocks of a pipeline all run, in the order of their list"
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
        """Returns the state of the running forward."""
        if self.state is None:
            raise GulliverError(
                f"the model was called directly, but {name!r} and others lie on other stages of a "
                "pipeline: run it with Pipeline.run, or Booster.execute_pipeline"
            )
        return self.state

    def block(
        self, number: int, block: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Runs block `number`; `call` is what it would do by itself."""
        if self.state is None and self.stages == 1:
            return self._run(number, call, args, kwargs)
        state = self.running(self.stack.blocks[number])
        if not state.start <= number < state.stop:
            return self.pass_by(block, self.stack.blocks[number], args, kwargs)
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
        """Replaces what came through placeholders by the received hidden state."""
        state.live = True
        if state.hidden is None:
            return args, kwargs
        return with_hidden(block, args, kwargs, state.hidden)

    def _run(self, number: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if number not in self.recomputed or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, **kwargs)

    def pass_by(self, block: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Returns a passed-by block's hidden state, in the form of its own output."""
        if self.extra == -1:
            self.extra = find_form(to_meta(block), path, args, kwargs)
        hidden = hidden_of(block, args, kwargs)
        return hidden if self.extra is None else (hidden, *[None] * self.extra)

    def _check_form(self, output: Any, number: int) -> None:
        found = None if isinstance(output, Tensor) else len(output) - 1
        if self.extra not in (-1, found):
            raise GulliverError(
                f"block {self.stack.blocks[number]!r} returns {_form(found)}, not "
                f"{_form(self.extra)}: pass extra={found!r} (of the plugin, or of stack_of)"
            )

    def around_memory(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the module around the first list of blocks, or returns what it has finished."""
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
        """Refuses an output of NaN that modules of other stages have made."""
        # They are no more than suspects: a NaN that came with the hidden state is none of theirs.
        came = [t for t in (state.hidden, state.memory) if t is not None]
        if not state.elsewhere or any(_has_nan(t) for t in came):
            return
        # The loss of a micro-batch without labels is a mean over nothing, and no number.
        found = [tensor for _, tensor in _tensors(output) if tensor.ndim]
        if any(_has_nan(tensor) for tensor in found):
            raise GulliverError(
                "the model's output is NaN, and the hidden state that came to its last stage is "
                f"not: what {' or '.join(map(repr, state.elsewhere))} returned, which lies on "
                "another stage, is used behind the blocks too: keep it on every stage "
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
                    "module that lies on another stage: keep that module on every stage "
                    "(everywhere=[...] of the plugin, or of stack_of)"
                )


def _has_nan(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(torch.isnan(tensor).any())


def _form(extra: int | None) -> str:
    return "a tensor" if extra is None else f"a tuple of {extra + 1}"


def _finished(memory: Tensor) -> Any:
    """Wraps a finished encoder's output as Hugging Face models read it."""
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=memory)  # pyright: ignore[reportArgumentType]


def first_of(output: Any) -> Tensor:
    """Returns the hidden state in what a block or an encoder returned."""
    return output if isinstance(output, Tensor) else output[0]


def hidden_of(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns the hidden state among the arguments of a block: the first of its forward."""
    return args[0] if args else kwargs[_first_name(block)]


def with_hidden(
    block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Returns the arguments of a block with another hidden state."""
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
