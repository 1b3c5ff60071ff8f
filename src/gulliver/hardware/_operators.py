"""What one operator of torch costs: FLOPs as torch counts them, bytes, and seconds on a device.

FLOPs are those of `torch.utils.flop_counter`: products of matrices, convolutions and attention; all
else is charged by the bytes that it moves. Torch has no formula for the attention kernel of CPUs,
which computes what the kernels of GPUs do and takes theirs, nor for grouped products of experts and
for LSTMs on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gulliver.hardware._cluster import Device
from gulliver.hardware._costs import memory_seconds, roofline_seconds

aten = torch.ops.aten
ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Attention kernels of CPUs, and those of GPUs that compute the same."""
ROWS = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""Operators that read as much of their first tensor as they give."""
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Operators that make memory and do not touch it."""


@cache
def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """Formulas for the FLOPs of operators, called with arguments and ``out_val``, their output."""
    from torch.utils.flop_counter import FlopCounterMode

    formulas = dict(FlopCounterMode(display=False).flop_registry)
    formulas.setdefault(aten._grouped_mm, _grouped_flops)
    formulas.setdefault(aten.mkldnn_rnn_layer, partial(_recurrent_flops, 1))
    formulas.setdefault(aten.mkldnn_rnn_layer_backward, partial(_recurrent_flops, 2))
    return formulas | {mine: formulas[other] for mine, other in ON_CPU.items()}


def _grouped_flops(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of products of which each row, column or term belongs to one group, as one expert's."""
    groups = one.shape[0] if one.ndim == 3 and other.ndim == 2 else 1
    return 2 * one.numel() * other.shape[-1] // groups


def _recurrent_flops(
    products: int, rows: Tensor, inner: Tensor, outer: Tensor, *_: Any, **__: Any
) -> int:
    """FLOPs of a layer of an LSTM: each row of the input, and of the state, by a matrix of gates.

    A backward has two products for each of the forward, of the rows' gradient and the matrix'.
    """
    return products * 2 * (rows.numel() // rows.shape[-1]) * (inner.numel() + outer.numel())


def operator_flops(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of a call of an operator; 0 where it multiplies no matrices."""
    formula = flop_formulas().get(operator.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def operator_bytes(
    operator: Any, taken: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[int, int]:
    """Bytes that a call of an operator reads and writes, if each is touched once."""
    packet = operator.overloadpacket
    if packet in EMPTY:
        return 0, 0
    written = sum(touched_bytes(tensor) for tensor in given)
    if packet in ROWS:
        return written + sum(touched_bytes(tensor) for tensor in taken[1:]), written
    return sum(touched_bytes(tensor) for tensor in taken), written


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor; those that a stretched dim repeats count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def operator_seconds(
    device: Device, flops: int, read: int, written: int, fresh: bool, dtype: str
) -> float:
    """Seconds of a call of an operator that is no view."""
    # A CPU fetches the lines of its cache before they are written; GPUs do not.
    twice = fresh and device.to_device_rate is None and not flops
    moved = read + (2 if twice else 1) * written
    if flops:
        return roofline_seconds(device, flops, moved, dtype)
    return memory_seconds(device, moved)
