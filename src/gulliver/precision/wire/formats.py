"""The wire formats: bits per element, block size, and the resulting error.

| name | bits | an element is | error of a cast of normal numbers |
|---|---|---|---|
| identity, fp32 | its own | unchanged | none |
| bf16 | 16 | 8 bits of mantissa, without a scale | 0.17 % |
| fp8 | 8 | e4m3 times the block's scale | 2.7 % |
| fp8_e5m2 | 8 | e5m2 times the block's scale | 5.2 % |
| int8 | 8 | a multiple of 1/127 of the block's largest magnitude | 0.6 % |
| int4 | 4 | a multiple of 1/7 of the block's largest magnitude | 12 % |

A block is 256 consecutive elements with one float32 scale: 1.6 % of an fp8 block. Its
largest element becomes the largest number of the format, so nothing overflows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gulliver.errors import GulliverError, check_known

BLOCK = 256
BLOCKS = (64, 128, 256, 512, 1024)
SCALE_BYTES = 4
LEAST_SCALE = 2.0**-126
"""Minimum scale, the smallest normal number, which avoids divisions by zero."""


@dataclass(frozen=True)
class ElementKind:
    """Element type of a format."""

    bits: int  # Bits of an element
    largest: float  # Largest number before it is scaled
    mantissa: int  # Bits behind the leading one; 0 of whole numbers
    least_exponent: int  # Exponent of the least normal number
    typical: float  # Relative Frobenius error of normally distributed elements in blocks of 256
    # Dtype that elements are cast to; None if bits are packed here.
    dtype: torch.dtype | None

    @property
    def floats(self) -> bool:
        return self.mantissa > 0


KINDS = {
    "bf16": ElementKind(16, 0.0, 7, -126, 0.0017, torch.bfloat16),
    "fp8": ElementKind(8, 448.0, 3, -6, 0.027, torch.float8_e4m3fn),
    "fp8_e5m2": ElementKind(8, 57344.0, 2, -14, 0.052, torch.float8_e5m2),
    "int8": ElementKind(8, 127.0, 0, 0, 0.0064, torch.int8),
    "int4": ElementKind(4, 7.0, 0, 0, 0.12, None),
}
_ALIASES = {"fp32": "identity", "none": "identity", "fp8_e4m3": "fp8"}
NAMES = ("identity", *KINDS)


@dataclass(frozen=True)
class WireFormat:
    """A wire format."""

    name: str  # Name, of `NAMES`
    block: int = BLOCK  # Number of elements that share a scale

    def __str__(self) -> str:
        return self.name + ("" if self.block == BLOCK else f":{self.block}")

    @property
    def kind(self) -> ElementKind:
        return KINDS[self.name]

    @property
    def scaled(self) -> bool:
        return self.name in KINDS and self.name != "bf16"

    @property
    def code(self) -> int:
        """Unique number of the format from 0 to 31; part of message tags."""
        names = [name for name in KINDS if name != "bf16"]
        if self.name not in names:
            return 0 if self.name == "identity" else 1
        return 2 + names.index(self.name) * len(BLOCKS) + BLOCKS.index(self.block)

    def of(self, tensor: Tensor, numel: int | None = None) -> WireFormat:
        """Returns this format, or the identity for integers and tensors that would not shrink."""
        # Integers must stay exact, and tensors that would not shrink are left alone. Both ends of a
        # message know shape and dtype, so both decide the same.
        if self.name == "identity" or not tensor.dtype.is_floating_point:
            return IDENTITY
        count = tensor.numel() if numel is None else numel
        return self if packed_bytes(count, self) < count * tensor.element_size() else IDENTITY

    def ratio(self, itemsize: int = 4) -> float:
        """Returns the packed size of a large tensor relative to its unpacked size, at most 1."""
        if self.name not in KINDS:
            return 1.0
        each = self.kind.bits / 8 + (SCALE_BYTES / self.block if self.scaled else 0)
        return min(1.0, each / itemsize)


IDENTITY = WireFormat("identity")
"""Leaves elements unchanged."""


def wire_format(text: str | WireFormat) -> WireFormat:
    """Parses a format such as ``fp8``, or ``fp8:128`` for another block size.

    Raises:
        GulliverError: the name or the block size is unknown.
    """
    if isinstance(text, WireFormat):
        return _checked(text)
    name, _, block = text.partition(":")
    size = int(block) if block.isdigit() else BLOCK if not block else 0
    found = _checked(WireFormat(_ALIASES.get(name, name), size))
    return IDENTITY if found.name == "identity" else found


def _checked(wire: WireFormat) -> WireFormat:
    check_known("wire format", wire.name, NAMES)
    if wire.block not in BLOCKS:
        known = ", ".join(map(str, BLOCKS))
        raise GulliverError(
            f"block size {wire.block} of wire format {wire.name} must be one of {known}"
        )
    return wire


def packed_bytes(numel: int, wire: WireFormat, itemsize: int = 4) -> int:
    if wire.name == "identity":
        return numel * itemsize
    scales = SCALE_BYTES * -(-numel // wire.block) if wire.scaled else 0
    return -(-(scales + -(-numel * wire.kind.bits // 8)) // 4) * 4


@dataclass(frozen=True)
class ErrorBound:
    """Error bound for one element."""

    relative: float  # Share of the element itself
    of_largest: float  # Share of the largest element of its block
    absolute: float  # What is lost of numbers near the least normal float32
    typical: float  # Relative Frobenius error of many normally distributed elements

    def limit(self, tensor: Tensor, block: int = BLOCK) -> Tensor:
        size = tensor.abs().double()
        padded = torch.nn.functional.pad(size, (0, -size.numel() % block)).view(-1, block)
        largest = padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: size.numel()]
        return self.relative * size + self.of_largest * largest + self.absolute


def error_bound(wire: WireFormat) -> ErrorBound:
    """Returns the error bound of a format for finite elements."""
    if wire.name == "identity":
        return ErrorBound(0.0, 0.0, 0.0, 0.0)
    kind = wire.kind
    # Multiplying by the scale rounds too, when packing and when unpacking.
    slack = 1 + 2.0**-10
    half = 2.0 ** -(kind.mantissa + 1) * slack if kind.floats else 0.0
    if not wire.scaled:
        return ErrorBound(half, 0.0, 2.0**-126, kind.typical)
    least = 2.0 ** (kind.least_exponent - kind.mantissa) if kind.floats else 1.0
    share = least / 2 / kind.largest * slack + 2.0**-22
    return ErrorBound(half, share, LEAST_SCALE * kind.largest, kind.typical)
