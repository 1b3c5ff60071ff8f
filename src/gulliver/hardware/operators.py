"""Costs of torch operators: FLOPs, bytes, and seconds on a device.

FLOPs of matrix products, convolutions and attention come from `torch.utils.flop_counter`; other
operators are charged for their bytes. Formulas that torch lacks are added here: CPU attention
kernels, grouped matmuls of experts, and LSTMs on CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gulliver.errors import GulliverError
from gulliver.hardware.cluster import Cluster, Device
from gulliver.hardware.costs import (
    BACKWARD_OF_LINEAR,
    copy_seconds,
    matmul_seconds,
    memory_seconds,
    point_to_point_seconds,
    roofline_seconds,
)

aten = torch.ops.aten
ON_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}
"""CPU attention kernels, and the equivalent GPU kernels."""
ROWS = {aten.embedding, aten.index, aten.index_select, aten.gather}
"""Operators that read as many bytes of their first tensor as they return."""
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Operators that allocate memory without accessing it."""


@cache
def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """FLOP formulas by operator, called with its arguments and its output as ``out_val``."""
    from torch.utils.flop_counter import FlopCounterMode

    formulas = dict(FlopCounterMode(display=False).flop_registry)
    formulas.setdefault(aten._grouped_mm, _grouped_flops)
    formulas.setdefault(aten.mkldnn_rnn_layer, partial(_recurrent_flops, 1))
    formulas.setdefault(aten.mkldnn_rnn_layer_backward, partial(_recurrent_flops, 2))
    return formulas | {mine: formulas[other] for mine, other in ON_CPU.items()}


def _grouped_flops(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    groups = one.shape[0] if one.ndim == 3 and other.ndim == 2 else 1
    return 2 * one.numel() * other.shape[-1] // groups


def _recurrent_flops(
    products: int, rows: Tensor, inner: Tensor, outer: Tensor, *_: Any, **__: Any
) -> int:
    return products * 2 * (rows.numel() // rows.shape[-1]) * (inner.numel() + outer.numel())


def operator_flops(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """FLOPs of an operator call; 0 if it has no matrix products."""
    formula = flop_formulas().get(operator.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def operator_bytes(
    operator: Any, taken: Sequence[Tensor], given: Sequence[Tensor]
) -> tuple[int, int]:
    """Bytes read and written by an operator call that accesses each element once."""
    packet = operator.overloadpacket
    if packet in EMPTY:
        return 0, 0
    written = sum(touched_bytes(tensor) for tensor in given)
    if packet in ROWS:
        return written + sum(touched_bytes(tensor) for tensor in taken[1:]), written
    return sum(touched_bytes(tensor) for tensor in taken), written


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's distinct elements; elements repeated by an expanded dim count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def operator_seconds(
    device: Device, flops: int, read: int, written: int, fresh: bool, dtype: str
) -> float:
    """Seconds of an operator call that is not a view."""
    # A CPU fetches cache lines before writing them; GPUs do not.
    twice = fresh and device.to_device_rate is None and not flops
    moved = read + (2 if twice else 1) * written
    if flops:
        return roofline_seconds(device, flops, moved, dtype)
    return memory_seconds(device, moved)


# Costs of a linear layer in FP8, and the size from which FP8 is faster.
#
# | pass over an operand | bytes per element, compiled |
# | --- | --- |
# | largest magnitude | one read |
# | cast, for both products that it is in | one read, two writes of a byte: units read along the sum
# |
# | the same, row-wise | each twice: the scales of the two products differ |
#
# Operands are the input and the gradient of the output; also weights, in each micro-batch if the
# layer is compiled, because the casts are part of the graph. Products take half the time if the FP8
# rate is twice the 16-bit rate. So FP8 is faster if products are long compared with passes over
# operands: products grow with the third power of a side, operands with the second. Outputs have 16
# bits.


FP8 = "float8_e4m3fn"
ITEM = 2  # bytes per element of the 16-bit layer that FP8 is compared with
STEP, LARGEST = 16, 1 << 16  # step and maximum of the layer sides to try for the break-even size


@dataclass(frozen=True)
class Fp8Seconds:
    """Seconds of a linear layer in 16 bits and in FP8, forward and backward."""

    # Seconds in 16 bits.
    plain: float
    # Seconds of the products in FP8.
    products: float
    # Seconds of computing magnitudes and casting.
    casts: float

    @property
    def gain(self) -> float:
        return self.plain / (self.products + self.casts)


def fp8_seconds(
    device: Device, tokens: int, inputs: int, outputs: int, scaling: str = "tensorwise"
) -> Fp8Seconds:
    """Seconds of a linear layer in 16 bits and in FP8, from measured or described rates.

    Raises:
        GulliverError: the device has no rate for FP8.
    """
    if FP8 not in device.matmul:
        raise GulliverError(
            f"{device.name} has no FP8 rate; FP8 needs a GPU such as an H100 or a 4090, whose rate "
            "gulliver probe measures"
        )
    products = 1 + BACKWARD_OF_LINEAR
    plain = products * matmul_seconds(device, tokens, inputs, outputs, "bfloat16")
    quick = products * _product(device, tokens, inputs, outputs)
    sizes = tokens * inputs, tokens * outputs, inputs * outputs
    return Fp8Seconds(plain, quick, sum(_casts(device, size, scaling) for size in sizes))


def fp8_break_even(device: Device, tokens: int, scaling: str = "tensorwise") -> int | None:
    """Smallest side of a square layer that is faster in FP8; None if there is none."""

    def pays(side: int) -> bool:
        return fp8_seconds(device, tokens, side, side, scaling).gain > 1

    if not pays(LARGEST):
        return None
    low, high = 0, LARGEST // STEP
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle * STEP) else (middle, high)
    return high * STEP


def _product(device: Device, tokens: int, inputs: int, outputs: int) -> float:
    # The result is not in FP8, so its additional bytes are moved as well.
    more = (ITEM - 1) * tokens * outputs / device.memory_rate
    return max(
        matmul_seconds(device, tokens, inputs, outputs, FP8),
        memory_seconds(device, tokens * inputs + inputs * outputs + tokens * outputs) + more,
    )


def _casts(device: Device, size: int, scaling: str) -> float:
    magnitude = memory_seconds(device, ITEM * size)
    if scaling == "rowwise":
        return 2 * (magnitude + memory_seconds(device, (ITEM + 1) * size))
    return magnitude + memory_seconds(device, (ITEM + 2) * size)


# Seconds and bytes of embedding lookups: memory, host link, and communication.


PASSES = 4
"""Memory passes over a used row per step: read in forward, written as a gradient, read and written
by the update.
"""


@dataclass(frozen=True)
class LookupLoad:
    """Embedding work of one rank in a step."""

    # Number of row uses, including repetitions.
    rows: float
    # Elements per row.
    width: float
    # Elements of optimizer state per row.
    state: float
    # Rows loaded from the host, and as many written back.
    missed: float
    # Bytes to other ranks in forward; as many return as gradients.
    sent: float


def lookup_seconds(cluster: Cluster, load: LookupLoad) -> dict[str, float]:
    """Returns the seconds of a step's embedding lookups, by component."""
    device = cluster.device
    touched = int(4 * load.rows * (PASSES * load.width + 2 * load.state))
    record = int(4 * load.missed * (load.width + load.state))
    if device.to_device_rate is None:
        fetch = 2 * memory_seconds(device, record) if record else 0.0
    else:
        fetch = copy_seconds(device, record, True) + copy_seconds(device, record, False)
    links = [axis.link for axis in cluster.axes if axis.size > 1]
    slow = min(links, key=lambda link: link.bandwidth) if links else None
    sent = int(load.sent)
    exchange = 2 * point_to_point_seconds(slow, sent) if slow is not None and sent else 0.0
    return {
        "memory": memory_seconds(device, touched) if touched else 0.0,
        "fetch": fetch if record else 0.0,
        "exchange": exchange,
    }
