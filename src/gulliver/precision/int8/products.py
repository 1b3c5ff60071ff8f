"""Matmuls with quantized weights, native if `gulliver.precision.int8._kernels` is built."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver._compat import uncompiled
from gulliver.errors import GulliverError, nearest
from gulliver.precision.int8.formats import GROUP, from_int4, from_int8

INTERFACE = 2
"""Version of the extension's interface, incremented on both sides when calls change."""
INSTRUCTIONS = ("avx512-vnni", "avx2", "none")
"""Values of ``$GULLIVER_INT8``; default: the first that the processor supports."""


def kernels_problem() -> str | None:
    """Returns why native kernels are unavailable; None if they are available."""
    try:
        built = importlib.import_module("gulliver.precision.int8._kernels")
        importlib.import_module("gulliver.serve._decoder")
    except ImportError as error:
        return f"its extension is not built ({error})"
    if built.INTERFACE != INTERFACE:
        return "its extension has another version: rebuild it with pip install -e ."
    wanted = os.environ.get("GULLIVER_INT8", "")
    if wanted and wanted not in INSTRUCTIONS:
        raise GulliverError(f"GULLIVER_INT8={wanted!r} is unknown: {nearest(wanted, INSTRUCTIONS)}")
    if wanted == "none":
        return "GULLIVER_INT8=none"
    names = built.instructions()
    if not names:
        return "this processor has neither AVX512-VNNI nor AVX2"
    if wanted and wanted not in names:
        return f"this processor has no {wanted}"
    return None


@cache
def native_table() -> tuple[str, Any, Any] | None:
    """Returns the instruction set and the extensions for int8 and float rows; None if not built."""
    if kernels_problem() is not None:
        return None
    built: Any = importlib.import_module("gulliver.precision.int8._kernels")
    name = os.environ.get("GULLIVER_INT8") or built.instructions()[0]
    # Also called without Python: the serving engine's native decoder multiplies these weights.
    return name, built.Table(name), importlib.import_module("gulliver.serve._decoder")


# Kernels of quantized products.
#
# | kernel | activations | taken from |
# |---|---|---|
# | native | int8 by row (int8_dynamic) | ``native/int8_*.cpp``, one pass over the weights |
# | native | as they are (int8, int4) | ``native/decoder.inl``, as above |
# | int_mm | int8 by row | `torch._int_mm`, scales applied after it |
# | dequantised | as they are | `torch.nn.functional.linear` on pieces of the weight |
#
# All read the same int8 matrix. [Note: same bits] Integer sums are exact, and `native` and `int_mm`
# apply scales in the same order; only the few products of outliers may be summed in another order.
# Each row is quantized separately, so a sample does not depend on others of its batch.


MODES = ("int8", "int8_dynamic", "int4")
KINDS = {"int8": 3, "int4": 4}
"""Kinds of weights by their numbers in `native/decoder.hpp`."""
PIECE = 16 << 20
"""Number of elements of a weight that are dequantized at a time."""
TINY = 1e-36
MOST_ROWS = 128
"""Rows above which dequantized products beat native ones with unrounded activations."""


Kernel = Callable[["Stored", Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass
class Stored:
    """A quantized weight and the data for its matmul."""

    mode: str  # One of `MODES`
    values: Tensor  # Int8 ``[outputs, inputs]``, or int4 bytes ``[outputs, inputs / 2]``
    scales: Tensor  # Float32 ``[outputs]``, or for int4 float16 ``[outputs, groups, 2]``
    sums: Tensor | None  # Sums of the rows of values, int32; None for int4
    inputs: int
    threshold: float  # Magnitude from which on an activation is not quantised

    def __post_init__(self) -> None:
        self.outputs = self.values.shape[0]


# `len` of a tensor takes microseconds; shape[0] does not.


def product(w: Stored, x: Tensor, bias: Tensor | None, largest: Tensor | None = None) -> Tensor:
    """Multiplies rows by a quantized weight.

    Args:
        w: quantized weight.
        x: activations ``[rows, inputs]``.
        bias: bias ``[outputs]``, or None.
        largest: each full row's largest magnitude below the threshold, if `x` has only a shard of
            the inputs.
    """
    if torch.compiler.is_compiling():  # a graph ends here, and goes on behind
        return _outside_graphs(w, x, bias, largest)
    if not x.numel():
        y = x.new_zeros(x.shape[0], w.outputs)
        return y if bias is None else y + bias
    return KERNELS[chosen_kernel(w, x.shape[0], x.device)](w, x, bias, largest)


_outside_graphs: Kernel = uncompiled(product)


def chosen_kernel(w: Stored, rows: int, device: torch.device) -> str:
    """Returns the name of the kernel for a number of rows."""
    native = native_table() is not None if device.type == "cpu" else False
    if w.mode == "int8_dynamic":
        return "native" if native else "int_mm" if _takes_int_mm(w, device) else "dequantised"
    whole = w.inputs % (16 if w.mode == "int8" else GROUP) == 0
    return "native" if native and whole and rows <= MOST_ROWS else "dequantised"


def _takes_int_mm(w: Stored, device: torch.device) -> bool:
    # With a single input, torch mistakes the layout of the transposed weight: wrong sums.
    return (device.type == "cpu" and w.inputs > 1) or (
        device.type == "cuda" and w.inputs % 8 == 0 and w.outputs % 8 == 0
    )


# --- the kernels ---------------------------------------------------------------------------------


def _native(w: Stored, x: Tensor, bias: Tensor | None, largest: Tensor | None) -> Tensor:
    table = native_table()
    assert table is not None
    given = x.float().contiguous()
    out = given.new_empty(given.shape[0], w.outputs)
    added = bias if bias is not None and bias.dtype == torch.float32 else None
    if w.mode != "int8_dynamic":
        table[2].multiply(
            *(table[0].partition("-")[0], given.data_ptr(), out.data_ptr(), given.shape[0]),
            [
                *(
                    w.values.data_ptr(),
                    w.scales.data_ptr(),
                    0 if added is None else added.data_ptr(),
                ),
                *(w.outputs, w.inputs, KINDS[w.mode]),
            ],
            torch.get_num_threads(),
        )
        return _added(out, bias, added).to(x.dtype)
    table[1].run(
        given.data_ptr(),
        out.data_ptr(),
        given.shape[0],
        w.inputs,
        w.outputs,
        w.values.data_ptr(),
        w.scales.data_ptr(),
        0 if w.sums is None else w.sums.data_ptr(),
        0 if added is None else added.data_ptr(),
        0 if largest is None else largest.data_ptr(),
        w.threshold,
    )
    return _added(out, bias, added).to(x.dtype)


def _added(out: Tensor, bias: Tensor | None, added: Tensor | None) -> Tensor:
    """Adds a bias that the kernels did not add because it is not float32."""
    return out if bias is None or added is not None else out + bias


def largest_in_rows(x: Tensor, threshold: float) -> Tensor:
    """Returns each row's largest magnitude below a threshold, in float32."""
    size = x.float().abs()
    return torch.where(size < threshold, size, 0.0).amax(1)


def _int_mm(w: Stored, x: Tensor, bias: Tensor | None, largest: Tensor | None) -> Tensor:
    values = x.float()
    inside = values.abs() < w.threshold  # a NaN is not
    kept = values if bool(inside.all()) else values.where(inside, 0.0)
    largest = kept.abs().amax(1) if largest is None else largest
    # Divides two tensors: 127.0 / largest would multiply by a rounded reciprocal.
    inverse = torch.where(largest > TINY, torch.full_like(largest, 127.0) / largest, 0.0)
    rounded = (kept * inverse[:, None]).round_().to(torch.int8)
    # On CUDA, torch._int_mm needs more than 16 rows.
    short = max(0, 17 - x.shape[0]) if x.is_cuda else 0
    rounded = F.pad(rounded, (0, 0, 0, short)) if short else rounded
    sums = torch._int_mm(rounded, w.values.t())[: x.shape[0]].float()
    y = sums.mul_((largest / 127.0)[:, None] * w.scales)
    if kept is not values:
        outliers = values.where(~inside, 0.0)
        columns = (~inside).any(0).nonzero().squeeze(1)
        y += (outliers[:, columns] @ w.values[:, columns].float().t()) * w.scales
    y = y if bias is None else y + bias
    return y.to(x.dtype)


def _dequantised(w: Stored, x: Tensor, bias: Tensor | None, largest: Tensor | None) -> Tensor:
    y = torch.empty(x.shape[0], w.outputs, dtype=x.dtype, device=x.device)
    step = max(1, PIECE // w.inputs)
    for start in range(0, w.outputs, step):
        rows = slice(start, start + step)
        if w.mode == "int4":
            y[:, rows] = F.linear(x, from_int4(w.values[rows], w.scales[rows], x.dtype))
        elif x.dtype is torch.float16:  # whose sums of whole numbers would end at 65504
            y[:, rows] = F.linear(x, from_int8(w.values[rows], w.scales[rows], x.dtype))
        else:
            # Whole numbers up to 127 are exact in any dtype: the scales come after the sum.
            piece = F.linear(x, w.values[rows].to(x.dtype))
            y[:, rows] = piece.float() * w.scales[rows]
    return y if bias is None else y + bias.to(y.dtype)


KERNELS: dict[str, Kernel] = {
    "native": _native,
    "int_mm": _int_mm,
    "dequantised": _dequantised,
}
