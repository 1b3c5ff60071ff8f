"""Inference with int8 and int4 weights.

    model = gulliver.replace_module(model)            # in place
    print(gulliver.precision.int8.report_of(model))

Packages with layers of their own, such as sharded ones, register them in `REPLACED`;
`gulliver.quantize` reads and writes checkpoints.
"""

from typing import TYPE_CHECKING

from gulliver._lazy import lazy_exports

if TYPE_CHECKING:
    from gulliver.precision.int8.products import MODES as MODES
    from gulliver.precision.int8.products import chosen_kernel as chosen_kernel
    from gulliver.precision.int8.products import kernels_problem as kernels_problem
    from gulliver.precision.int8.products import native_table as native_table
    from gulliver.precision.int8.products import product as product
    from gulliver.precision.int8.replace import replace_module as replace_module
    from gulliver.precision.int8.replace import report_of as report_of

__getattr__, __dir__ = lazy_exports(__name__)
