"""Formats in which numbers travel between ranks: bf16, and blocks of fp8, int8 or int4 with scales.

wire = wire_format("fp8")                       # or "fp8:128", "int8:stochastic", ...
packed = pack(tensor, wire)                     # flat uint8, `packed_bytes` of them
same = unpack(packed, wire, tensor.numel())     # within `error_bound` of the tensor
"""

from gulliver.precision.wire._formats import (
    BLOCKS,
    IDENTITY,
    NAMES,
    ErrorBound,
    WireFormat,
    error_bound,
    packed_bytes,
    wire_format,
)
from gulliver.precision.wire._pack import nonfinite_blocks, pack, unpack
from gulliver.precision.wire._rates import PackRates, pack_rates

__all__ = [
    "BLOCKS",
    "IDENTITY",
    "NAMES",
    "ErrorBound",
    "PackRates",
    "WireFormat",
    "error_bound",
    "nonfinite_blocks",
    "pack",
    "pack_rates",
    "packed_bytes",
    "unpack",
    "wire_format",
]
