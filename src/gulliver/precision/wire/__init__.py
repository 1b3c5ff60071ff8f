"""Wire formats of messages: bf16, and blocks of fp8, int8 or int4 with scales.

wire = wire_format("fp8")                       # or "fp8:128", "int8", ...
packed = pack(tensor, wire)                     # flat uint8 of length `packed_bytes`
same = unpack(packed, wire, tensor.numel())     # within `error_bound` of the tensor
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.precision.wire.formats import IDENTITY as IDENTITY
    from gulliver.precision.wire.formats import error_bound as error_bound
    from gulliver.precision.wire.formats import wire_format as wire_format
    from gulliver.precision.wire.packing import nonfinite_blocks as nonfinite_blocks

__getattr__, __dir__ = lazy_exports(__name__)
