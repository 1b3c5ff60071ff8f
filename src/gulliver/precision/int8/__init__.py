"""Inference with int8 and int4 weights.

    model = gulliver.replace_module(model)            # in place
    print(gulliver.precision.int8.report_of(model))

Packages with layers of their own, such as sharded ones, register them in `REPLACED`;
`gulliver.quantize` reads and writes checkpoints.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.precision.int8.products import (
        MODES,
        chosen_kernel,
        kernels_problem,
        native_table,
        product,
    )
    from gulliver.precision.int8.replace import replace_module, report_of

__all__ = [
    "MODES",
    "chosen_kernel",
    "kernels_problem",
    "native_table",
    "product",
    "replace_module",
    "report_of",
]

__getattr__, __dir__ = lazy_exports(__name__)
