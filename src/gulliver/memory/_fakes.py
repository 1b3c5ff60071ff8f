"""Fakes of the tensors of a model, which have no memory, and running it so that no trace stays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from gulliver._compat import private_tables


@contextmanager
def without_traces(model: nn.Module, hooks: bool) -> Iterator[None]:
    """Puts back attributes of modules, their hooks and random states."""
    gradients = [(p, p.grad) for p in model.parameters()]
    numbers, arrays = random.getstate(), np.random.get_state()
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in list(model.modules()):
                stack.enter_context(private_tables(module, hooks))
            yield
    finally:
        random.setstate(numbers)
        np.random.set_state(arrays)
        for parameter, gradient in gradients:
            parameter.grad = gradient


class FakeTensors:
    """Tensors of the same form as given ones, made under a fake mode; what is tied stays tied."""

    def __init__(self, device: str | None = None) -> None:
        self._made: dict[Tensor, Tensor] = {}
        self._device = device

    def of(self, tensor: Tensor) -> Tensor:
        """The fake of a tensor; of one on meta, on the CPU."""
        made = self._made.get(tensor)
        if made is not None:
            return made
        device = self._device or ("cpu" if tensor.is_meta else tensor.device)
        # A parameter whose shard is elsewhere is one element, stretched: its shape is what counts.
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        self._made[tensor] = made.requires_grad_(tensor.requires_grad)
        return made
