"""Replays calls of modules without running them: recreates what an equal call left behind.

A replay creates the outputs, one block of memory for everything saved inside, keeps the inputs that
the call kept, and makes the gradients of the inputs in backward. So the bytes before and after the
call are right, and its peak is known from the call that was followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gulliver.plan.analysis._recorder import ModuleCall, Recorder


@dataclass(frozen=True)
class Given:
    """An output tensor of a call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    producer: int

    @classmethod
    def of(cls, tensor: Tensor, producer: int) -> Given:
        """Describes a tensor."""
        place = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
        return cls(*place, tensor.requires_grad, producer)

    def make(self) -> Tensor:
        """Makes a tensor like it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass
class Template:
    """What a call leaves behind."""

    # Path of its module.
    path: str
    # Form of the output.
    spec: Any
    # Leaves of the output: a new tensor, the number of a tensor of the input, or a constant in a
    # tuple of one.
    leaves: list[Any]
    # Numbers of the tensors of the input that it saves.
    inputs: list[int] = field(default_factory=list)
    # Numbers of the new tensors that it saves.
    outputs: list[int] = field(default_factory=list)
    # Other bytes that it saves.
    inside: int = 0
    # Names of the parameters and buffers of its module that it saves.
    own: list[str] = field(default_factory=list)
    # Bytes of the gradients of its parameters.
    gradients: int = 0
    # The call itself; None for one that was never followed.
    call: ModuleCall | None = None
    # First operator of its forward, and the one after the last.
    operators: tuple[int, int] = (0, 0)
    # Number of replays.
    forwards: int = 0
    # Number of replays whose backward ran.
    backwards: int = 0
    # Called when the backward of a replay runs.
    on_backward: Callable[[], None] = lambda: None


def replay(recorder: Recorder, template: Template, tensors: Sequence[Tensor]) -> Any:
    """Replays a call."""
    template.forwards += 1
    recorder.replayed(template, False)
    quiet, recorder.quiet = recorder.quiet, True
    try:
        anchor = torch.empty(0, requires_grad=True)
        made = list(_Replay.apply(recorder, template, anchor, *tensors))  # type: ignore[arg-type]
    finally:
        recorder.quiet = quiet
    leaves = []
    for leaf in template.leaves:
        if isinstance(leaf, Given):
            leaves.append(made.pop(0))
            recorder.given_by(leaves[-1], leaf.producer)
        else:
            leaves.append(tensors[leaf] if isinstance(leaf, int) else leaf[0])
    return pytree.tree_unflatten(leaves, template.spec)


class _Replay(torch.autograd.Function):
    """A call in autograd's graph; the anchor attaches it even if no input needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, template: Template, anchor: Tensor, *tensors: Tensor
    ) -> Any:
        given = [leaf for leaf in template.leaves if isinstance(leaf, Given)]
        made = [leaf.make() for leaf in given]
        ctx.mark_non_differentiable(
            *(t for t, leaf in zip(made, given, strict=True) if not leaf.requires_grad)
        )
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.template, ctx.owner = recorder, template, recorder.running
        ctx.wanted = [
            (tuple(t.shape), t.dtype, t.device) if t.requires_grad else None for t in tensors
        ]
        inside = torch.empty(template.inside, dtype=torch.uint8, device=anchor.device)
        ctx.save_for_backward(
            *(tensors[n] for n in template.inputs), *(made[n] for n in template.outputs), inside
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        recorder, template = ctx.recorder, ctx.template
        template.backwards += 1
        recorder.replayed(template, True, ctx.owner)
        template.on_backward()
        quiet, recorder.quiet = recorder.quiet, True
        try:
            found = [
                None
                if wanted is None
                else torch.empty(wanted[0], dtype=wanted[1], device=wanted[2])
                for wanted in ctx.wanted
            ]
        finally:
            recorder.quiet = quiet
        recorder.gradients += template.gradients
        return None, None, None, *found
