"""FP8 training: scaled casts, linear layers, and the choice of layers.

Ranks that shard a dim of a layer use the maximum of their magnitudes (`SharedDims`). Times are
predicted in `gulliver.hardware`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.precision.fp8.conversion import (
        convert_to_fp8,
        fp8_events,
        revert_fp8,
        state_of,
        takes_fp8,
    )
    from gulliver.precision.fp8.layers import SharedDims, linear

__all__ = [
    "SharedDims",
    "convert_to_fp8",
    "fp8_events",
    "linear",
    "revert_fp8",
    "state_of",
    "takes_fp8",
]

__getattr__, __dir__ = lazy_exports(__name__)
