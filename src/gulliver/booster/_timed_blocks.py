"""Times the blocks of a model on meta one by one, with random weights.

The formula counts matrix products. Everything else in a block (norms, activations, rotations,
casts, small kernels) takes as long in 16 bits, where products are fast. So one block of each kind
gets random weights, inputs of the right shapes, and is timed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gulliver.booster._blocks import offloadable_blocks
from gulliver.booster._measure import TURNS, timed
from gulliver.hardware import kept_seconds
from gulliver.memory import FreedMemory, activation_peak

ROOM = 4
"""A block, its gradients and what it computes with may take this part of the memory."""
DEVIATION = 0.02
"""Standard deviation of the weights of a block that is timed."""
Seconds = tuple[float, float]
"""Seconds of a forward, and of its backward."""


class _Seen(Exception):
    """All that was looked for has been seen."""


class _Call(nn.Module):
    """A call of a block with keyword arguments that stay."""

    def __init__(self, block: nn.Module, keywords: Mapping[str, Any]) -> None:
        super().__init__()
        self.block, self.keywords = block, keywords

    def forward(self, *args: Any) -> Any:
        return self.block(*args, **self.keywords)


def time_blocks(
    model: nn.Module, sample: Mapping[str, Any], room: int, limited: bool
) -> dict[str, Seconds]:
    """Times the blocks of a model, one of each kind."""
    paths = offloadable_blocks(model)
    kinds = dict[Any, list[str]]()
    for path in paths:
        kinds.setdefault(_kind(model.get_submodule(path)), []).append(path)
    largest = max((_block_bytes(model.get_submodule(path)) for path in paths), default=0)
    if not paths or 2 * largest > room // ROOM:
        return {}
    # The last of a kind: the first one may get an input without gradient.
    calls = _calls(model, sample, [found[-1] for found in kinds.values()])
    seconds = dict[str, Seconds]()
    for kind, found in kinds.items():
        if found[-1] not in calls:
            return {}
        args, keywords = calls[found[-1]]
        facts = {"block": str(kind), "call": str(_shapes((args, keywords))), "limited": limited}

        def measure(path: str = found[-1], args: Any = args, keywords: Any = keywords) -> Seconds:
            return _measured(model.get_submodule(path), args, keywords, limited)

        seconds |= dict.fromkeys(found, kept_seconds(facts, measure))
    return seconds


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """A key that is equal for blocks of equal cost."""
    parameters = block.named_parameters()
    sizes = ((name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in parameters)
    return repr(block), *sizes


def _block_bytes(block: nn.Module) -> int:
    return sum(p.nbytes for p in block.parameters())


def _calls(
    model: nn.Module, sample: Mapping[str, Any], paths: Sequence[str]
) -> dict[str, tuple[Any, Any]]:
    """Arguments of blocks in a forward, as tensors without memory."""
    found = dict[str, tuple[Any, Any]]()

    def watch(path: str) -> Callable[..., None]:
        def seen(_: nn.Module, args: Any, keywords: Any) -> None:
            found[path] = args, keywords
            if len(found) == len(paths):
                raise _Seen

        return seen

    def prepare(model: nn.Module) -> None:
        for path in paths:
            block = model.get_submodule(path)
            block.register_forward_pre_hook(watch(path), with_kwargs=True)

    activation_peak(model, (), sample, prepare=prepare)
    return found


def _shapes(call: Any) -> Any:
    def shape(tensor: Tensor) -> Any:
        return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad

    return [shape(t) for t in pytree.tree_leaves(call) if isinstance(t, Tensor)]


def _measured(block: nn.Module, args: Any, keywords: Any, limited: bool) -> Seconds:
    """Median seconds of a block on the device of this rank."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    freed = FreedMemory() if limited else None
    try:
        with torch.random.fork_rng():
            real = copy.deepcopy(block).to_empty(device=device)
            for tensor in (*real.parameters(), *real.buffers()):
                _fill(tensor)
            args, keywords = pytree.tree_map_only(
                Tensor, lambda tensor: _real(tensor, device), (args, keywords)
            )
            call = _Call(real, keywords)
            turns = [timed(call, args, None) for _ in range(TURNS + 1)][1:]
    finally:
        if freed is not None:
            freed.close()
    return median(forward for forward, _ in turns), median(backward for _, backward in turns)


def _fill(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.normal_(0, DEVIATION) if tensor.is_floating_point() else tensor.zero_()


def _real(fake: Tensor, device: torch.device) -> Tensor:
    """A real tensor like a fake one; masks allow everything."""
    made = torch.ones(fake.shape, dtype=fake.dtype, device=device)
    return (_fill(made) if fake.is_floating_point() else made).requires_grad_(fake.requires_grad)
