"""Inference with int8 and int4 weights.

    model = gulliver.replace_module(model)            # in place
    print(gulliver.precision.int8.report_of(model))

Packages with layers of their own, such as sharded ones, register them in `REPLACED`;
`gulliver.quantize` reads and writes checkpoints.
"""

from gulliver.precision.int8._formats import (
    GROUP,
    check_int4,
    from_int4,
    from_int8,
    largest_of,
    to_int4,
    to_int8,
)
from gulliver.precision.int8._gptq import round_calibrated
from gulliver.precision.int8._modules import (
    QuantizedConvolution,
    QuantizedEmbedding,
    QuantizedLayer,
    QuantizedLinear,
)
from gulliver.precision.int8._native import kernels_problem, native_table
from gulliver.precision.int8._products import (
    KERNELS,
    MODES,
    Stored,
    chosen_kernel,
    chosen_kernels,
    forget_kernels,
    largest_in_rows,
    product,
)
from gulliver.precision.int8._replace import (
    GROUPED,
    REPLACED,
    Layer,
    Report,
    Rounded,
    Ways,
    layer_bytes,
    linear_modes,
    matrix_of,
    model_bytes,
    quantized_linear,
    replace_module,
    report_of,
)

__all__ = [
    "GROUP",
    "GROUPED",
    "KERNELS",
    "MODES",
    "REPLACED",
    "Layer",
    "QuantizedConvolution",
    "QuantizedEmbedding",
    "QuantizedLayer",
    "QuantizedLinear",
    "Report",
    "Rounded",
    "Stored",
    "Ways",
    "check_int4",
    "chosen_kernel",
    "chosen_kernels",
    "forget_kernels",
    "from_int4",
    "from_int8",
    "kernels_problem",
    "largest_in_rows",
    "largest_of",
    "layer_bytes",
    "linear_modes",
    "matrix_of",
    "model_bytes",
    "native_table",
    "product",
    "quantized_linear",
    "replace_module",
    "report_of",
    "round_calibrated",
    "to_int4",
    "to_int8",
]
