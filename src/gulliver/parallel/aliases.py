"""Detects distinct tensors of a model that share memory, which sharding would separate.

Sharding moves every parameter into its own chunk. A parameter that a model holds under two names
moves as one; two parameters made of one tensor's memory would train apart from then on.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gulliver.errors import GulliverError
from gulliver.parallel.optimizer import named_trainables
from gulliver.parallel.zero.elementwise import is_boosted


def check_unshared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rejects a trained parameter that shares memory with another parameter or a buffer."""
    trained = {id(p) for p in named_trainables(model, optimizer)}
    parameters = {n: p for n, p in model.named_parameters() if not is_boosted(p)}
    buffers = dict(model.named_buffers())
    found = [(*_extent(t), name, t) for name, t in [*parameters.items(), *buffers.items()]]
    open_: list[tuple[int, str, Tensor]] = []
    for begin, end, name, tensor in sorted(found, key=lambda item: item[:3]):
        open_ = [item for item in open_ if item[0] > begin]
        for _, other_name, other in open_:
            moved = id(tensor) in trained or id(other) in trained
            if moved and _overlap(tensor, other):
                raise _refused(other_name, name, parameters)
        if end > begin:
            open_.append((end, name, tensor))


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First and last address of a tensor's memory, which may have holes; nothing on meta."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0, 0
    return tensor.data_ptr(), tensor.data_ptr() + _span(tensor) * tensor.itemsize


def _span(tensor: Tensor) -> int:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share an element; columns of one table share none."""
    if one.device != other.device:
        return False
    size = one.itemsize
    apart = one.data_ptr() - other.data_ptr()
    if not apart or size != other.itemsize or apart % size:
        return True
    shift = apart // size
    begin = min(0, shift)
    taken = torch.zeros(max(_span(other), shift + _span(one)) - begin, dtype=torch.bool)
    taken.as_strided(other.shape, other.stride(), -begin).fill_(True)
    return bool(taken.as_strided(one.shape, one.stride(), shift - begin).any())


def _refused(first: str, second: str, parameters: dict[str, nn.Parameter]) -> GulliverError:
    both = first in parameters and second in parameters
    if not both and second in parameters:
        first, second = second, first
    kind = "parameter" if both else "buffer"
    remedy = (
        f"tie the parameters themselves, model.{second} = model.{first}"
        if both
        else "clone the buffer, or read the parameter in its place"
    )
    return GulliverError(
        f"{kind} {second!r} shares memory with parameter {first!r}, which sharding would break: "
        f"{remedy} (TorchDDPPlugin supports it)"
    )
