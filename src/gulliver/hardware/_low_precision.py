"""Costs of a linear layer in FP8, and the size from which that pays.

| pass over an operand | bytes an element, compiled |
|---|---|
| largest magnitude | one read |
| cast, for both products that it is in | one read, two writes of a byte: units read along the sum |
| the same, row-wise | each twice: the scales of the two products differ |
| delayed | one read for both: the scale is there before |

Operands are the input and the gradient of the output; weights too, in each micro-batch where the
layer is compiled, as its casts stand in the graph. Products are half as long where the rate of FP8
is twice that of 16 bits. So a layer pays when its products are long beside its operands: a product
grows with the third power of a side, operands with the second. Outputs are of 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from gulliver.errors import GulliverError
from gulliver.hardware._cluster import Device
from gulliver.hardware._costs import BACKWARD_OF_LINEAR, matmul_seconds, memory_seconds

FP8 = "float8_e4m3fn"
ITEM = 2
"""Bytes of an element in high precision."""
STEP, LARGEST = 16, 1 << 16
"""Sides of square layers that are looked at for the least one that pays."""


@dataclass(frozen=True)
class Fp8Seconds:
    """Seconds of a linear layer, forward and backward."""

    # Seconds in 16 bits.
    plain: float
    # Seconds of the products in FP8.
    products: float
    # Seconds of magnitudes and casts.
    casts: float

    @property
    def gain(self) -> float:
        """Times that FP8 is faster."""
        return self.plain / (self.products + self.casts)


def fp8_seconds(
    device: Device, tokens: int, inputs: int, outputs: int, scaling: str = "tensorwise"
) -> Fp8Seconds:
    """Seconds of a linear layer in 16 bits and in FP8, from measured or described rates.

    Args:
        device: device with rates of bfloat16 and of FP8.
        tokens: number of rows.
        inputs: number of inputs.
        outputs: number of outputs.
        scaling: ``tensorwise``, ``rowwise`` or ``delayed``.

    Raises:
        GulliverError: the device has no rate for FP8.
    """
    if FP8 not in device.matmul:
        raise GulliverError(
            f"{device.name} has no FP8 rate: FP8 needs units for it, as an H100 or a 4090 has; "
            "where there are some, gulliver probe measures them"
        )
    products = 1 + BACKWARD_OF_LINEAR
    plain = products * matmul_seconds(device, tokens, inputs, outputs, "bfloat16")
    quick = products * _product(device, tokens, inputs, outputs)
    sizes = tokens * inputs, tokens * outputs, inputs * outputs
    return Fp8Seconds(plain, quick, sum(_casts(device, size, scaling) for size in sizes))


def fp8_break_even(device: Device, tokens: int, scaling: str = "tensorwise") -> int | None:
    """Least side of a square layer that is faster in FP8; None where none is."""

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
    # The result is not of FP8: what it weighs more than that is moved as well.
    more = (ITEM - 1) * tokens * outputs / device.memory_rate
    return max(
        matmul_seconds(device, tokens, inputs, outputs, FP8),
        memory_seconds(device, tokens * inputs + inputs * outputs + tokens * outputs) + more,
    )


def _casts(device: Device, size: int, scaling: str) -> float:
    both = memory_seconds(device, (ITEM + 2) * size)
    if scaling == "delayed":
        return both
    magnitude = memory_seconds(device, ITEM * size)
    if scaling == "rowwise":
        return 2 * (magnitude + memory_seconds(device, (ITEM + 1) * size))
    return magnitude + both
