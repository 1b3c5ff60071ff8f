"""FP8 training: scaled casts, linear layers, and the choice of layers.

Ranks that shard a dim of a layer use the maximum of their magnitudes (`SharedDims`). Times are
predicted in `gulliver.hardware`.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.precision.fp8.conversion import convert_to_fp8 as convert_to_fp8
    from gulliver.precision.fp8.conversion import fp8_events as fp8_events
    from gulliver.precision.fp8.conversion import revert_fp8 as revert_fp8
    from gulliver.precision.fp8.conversion import state_of as state_of
    from gulliver.precision.fp8.conversion import takes_fp8 as takes_fp8
    from gulliver.precision.fp8.layers import SharedDims as SharedDims
    from gulliver.precision.fp8.layers import linear as linear

__getattr__, __dir__ = lazy_exports(__name__)
