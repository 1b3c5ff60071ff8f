"""FP8 training: scaled casts, linear layers, and which layers of a model take them.

Ranks that share a dim of a layer pass the reduction of its magnitudes (`SharedDims`). Seconds are
predicted in `gulliver.hardware`.
"""

from gulliver.precision.fp8._cast import (
    FORWARD,
    GRADIENT,
    Scaled,
    encode,
    magnitude,
    scale_of,
)
from gulliver.precision.fp8._convert import (
    Conversion,
    check_hardware,
    check_layers,
    convert_to_fp8,
    fp8_events,
    fp8_histories,
    has_units,
    restore_histories,
    revert_fp8,
    state_of,
)
from gulliver.precision.fp8._linear import MULTIPLE, linear, matmul
from gulliver.precision.fp8._select import (
    Layer,
    Selection,
    is_transposed,
    linear_layers,
    select_layers,
    takes_fp8,
)
from gulliver.precision.fp8._state import (
    COPIES,
    NOT_SHARED,
    SCALINGS,
    LayerState,
    Recipe,
    SharedDims,
)

__all__ = [
    "COPIES",
    "FORWARD",
    "GRADIENT",
    "MULTIPLE",
    "NOT_SHARED",
    "SCALINGS",
    "Conversion",
    "Layer",
    "LayerState",
    "Recipe",
    "Scaled",
    "Selection",
    "SharedDims",
    "check_hardware",
    "check_layers",
    "convert_to_fp8",
    "encode",
    "fp8_events",
    "fp8_histories",
    "has_units",
    "is_transposed",
    "linear",
    "linear_layers",
    "magnitude",
    "matmul",
    "restore_histories",
    "revert_fp8",
    "scale_of",
    "select_layers",
    "state_of",
    "takes_fp8",
]
