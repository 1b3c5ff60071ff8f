"""Matmuls with quantized weights, native if `gulliver.precision.int8._kernels` is built."""

from __future__ import annotations

import importlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gulliver._compat import uncompiled
from gulliver.errors import GulliverError, nearest
from gulliver.hardware.probe import kept_seconds
from gulliver.precision.int8.formats import GROUP, from_int4, from_int8

INTERFACE = 2
"""Version of the extension's interface, incremented on both sides when calls change."""
INSTRUCTIONS = ("avx512-vnni", "avx2", "none")
"""Values of ``$GULLIVER_INT8``; by default the first that the processor supports."""


def kernels_problem() -> str | None:
    """Why native kernels are not available; None if they are."""
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
    """Returns the instruction set, and its products of int8 and of float rows; None without."""
    if kernels_problem() is not None:
        return None
    built: Any = importlib.import_module("gulliver.precision.int8._kernels")
    name = os.environ.get("GULLIVER_INT8") or built.instructions()[0]
    # Also without Python around it: a serving engine's decoder multiplies with the same weights.
    return name, built.Table(name), importlib.import_module("gulliver.serve._decoder")


# The kernels that a quantised product may run on, and which of them does, by measurement.
#
# | kernel | activations | taken from | |---|---|---| | native | int8 by row, or as they are |
# ``native/int8_*.cpp``, one pass over the weights | | int_mm | int8 by row | `torch._int_mm`,
# scales applied after it | | int8pack | bfloat16 as they are | `torch._weight_int8pack_mm`, of
# inputs that 16 divides only | | dequantised | as they are | `torch.nn.functional.linear` on
# pieces of the weight |
#
# All read the one int8 matrix that is kept. In float32 int8pack is naive, and not used. [Note:
# same bits] Integer sums are exact, and `native` and `int_mm` round what is around them in the
# same order: a choice that changes from run to run changes no output, but for outliers, whose few
# products may be summed in another order. Each row is quantised by itself, so that no sample sees
# another of its batch.


MODES = ("int8", "int8_dynamic", "int4")
KINDS = {"int8": 3, "int4": 4}
"""Kinds of weights by their numbers in `native/decoder.hpp`."""
PIECE = 16 << 20
"""Elements of a weight that are dequantised at once."""
TINY = 1e-36
TURNS = 5
"""Minimum rounds of a measurement, and rounds without improvement that end it."""
NEWS = 0.97
"""Share of the best seconds so far that is news."""
PATIENCE_S = 0.15
INT8PACK_INPUTS = 16
"""Multiple of inputs that torch's `_weight_int8pack_mm` needs."""
MOST_ROWS = 512
"""Rows above which measurements of fewer rows are reused."""


Kernel = Callable[["Stored", Tensor, Tensor | None, Tensor | None], Tensor]


@dataclass
class Stored:
    """A quantized weight and the data for its matmul."""

    mode: str  # One of `MODES`
    values: Tensor  # Int8 ``[outputs, inputs]``, or int4 bytes ``[outputs, inputs / 2]``
    scales: Tensor  # Float32 ``[outputs]``, or ``[outputs, groups]``
    sums: Tensor | None  # Sums of the rows of values, int32; None for int4
    inputs: int
    threshold: float  # Magnitude from which on an activation is not quantised
    # Kernels by rows, dtype and threads: a call at one row has no time to ask again.
    known: dict[tuple[Any, ...], Kernel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outputs = self.values.shape[0]


_chosen: dict[tuple[Any, ...], str] = {}
_log = logging.getLogger("gulliver")


# Of a tensor `len` takes microseconds, and shape[0] does not.


def product(w: Stored, x: Tensor, bias: Tensor | None, largest: Tensor | None = None) -> Tensor:
    """Returns the product of rows with a quantized weight.

    Args:
        w: quantised weight.
        x: activations ``[rows, inputs]``.
        bias: bias ``[outputs]``, or None.
        largest: largest magnitude below the threshold of each full row, if `x` is a shard of its
            inputs.
    """
    if torch.compiler.is_compiling():  # a graph ends here, and goes on behind
        return _outside_graphs(w, x, bias, largest)
    if not x.numel():
        y = x.new_zeros(x.shape[0], w.outputs)
        return y if bias is None else y + bias
    asked = x.shape[0], x.dtype, torch.get_num_threads()
    kernel = w.known.get(asked)
    if kernel is None:
        kernel = w.known[asked] = KERNELS[chosen_kernel(w, x.shape[0], x.dtype, x.device)]
    return kernel(w, x, bias, largest)


_outside_graphs: Kernel = uncompiled(product)


def chosen_kernel(w: Stored, rows: int, dtype: torch.dtype, device: torch.device) -> str:
    """Returns the fastest kernel for a number of rows, measured if unknown."""
    rows = min(MOST_ROWS, 1 << (rows - 1).bit_length())
    shape = (w.mode, w.outputs, w.inputs, rows, dtype, device, torch.get_num_threads())
    if shape not in _chosen:
        names = _candidates(w, rows, dtype, device)
        _chosen[shape] = names[0] if len(names) == 1 else _measured(w, shape, names)
    return _chosen[shape]


def chosen_kernels() -> dict[tuple[Any, ...], str]:
    """Returns this process's choices by mode, outputs, inputs, rows, dtype and device."""
    return dict(_chosen)


def forget_kernels() -> None:
    """Clears this process's choices; measurements on disk stay."""
    _chosen.clear()


def _candidates(w: Stored, rows: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    native = native_table() if device.type == "cpu" else None
    # Weights alone are quantized: in whole vectors, or groups.
    fits = w.mode == "int8_dynamic" or w.inputs % (16 if w.mode == "int8" else GROUP) == 0
    names = ["native"] if native is not None and fits else []
    if w.mode == "int8_dynamic" and _takes_int_mm(w, device):
        names.append("int_mm")
    # With other inputs torch reads past the ends of rows: wrong sums, or a crash.
    whole = w.inputs % INT8PACK_INPUTS == 0
    if w.mode == "int8" and dtype == torch.bfloat16 and device.type == "cpu" and whole:
        names.append("int8pack")
    # Against int8 activations it never wins, but where nothing else can.
    return names if w.mode == "int8_dynamic" and names else [*names, "dequantised"]


def _takes_int_mm(w: Stored, device: torch.device) -> bool:
    # Of one input, torch takes the transposed weight for one of another layout: wrong sums.
    return (device.type == "cpu" and w.inputs > 1) or (
        device.type == "cuda" and w.inputs % 8 == 0 and w.outputs % 8 == 0
    )


def _measured(w: Stored, shape: tuple[Any, ...], names: list[str]) -> str:
    """Times the candidates on this weight, unless cached on this machine."""
    mode, outputs, inputs, rows, dtype, device, _ = shape
    native = native_table()

    def measure() -> tuple[float, ...]:
        x = torch.randn(rows, inputs, dtype=torch.float32).to(device, dtype)
        best = dict.fromkeys(names, math.inf)
        turns, calm, end = 0, 0, time.perf_counter() + PATIENCE_S
        # On a busy machine the first turns may all be disturbed.
        while turns < TURNS or (calm < TURNS and time.perf_counter() < end):
            turns, calm = turns + 1, calm + 1
            for name in names:
                begun = time.perf_counter()
                KERNELS[name](w, x, None, None)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                took = time.perf_counter() - begun
                calm = calm if took > NEWS * best[name] else 0
                best[name] = min(best[name], took)
        return tuple(best.values())

    facts = {
        "what": "int8 kernels 2",
        "shape": (mode, outputs, inputs, rows, str(dtype), device.type),
        "kernels": (*names, native[0] if native else ""),
    }
    seconds = kept_seconds(facts, measure, len(names))
    took = dict(zip(names, seconds, strict=True))
    name = min(names, key=took.__getitem__)
    shown = ", ".join(f"{other} {s * 1e6:.0f} us" for other, s in took.items())
    _log.info("%s %dx%d, %d rows of %s: %s (%s)", mode, outputs, inputs, rows, dtype, name, shown)
    return name


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
    """Adds a bias of another dtype than float32, which kernels have not added."""
    return out if bias is None or added is not None else out + bias


def largest_in_rows(x: Tensor, threshold: float) -> Tensor:
    """Returns the largest magnitude below a threshold of each row, in float32."""
    size = x.float().abs()
    return torch.where(size < threshold, size, 0.0).amax(1)


def _int_mm(w: Stored, x: Tensor, bias: Tensor | None, largest: Tensor | None) -> Tensor:
    values = x.float()
    inside = values.abs() < w.threshold  # a NaN is not
    kept = values if bool(inside.all()) else values.where(inside, 0.0)
    largest = kept.abs().amax(1) if largest is None else largest
    # Tensor by tensor: 127.0 / largest would be a product with a rounded reciprocal.
    inverse = torch.where(largest > TINY, torch.full_like(largest, 127.0) / largest, 0.0)
    rounded = (kept * inverse[:, None]).round_().to(torch.int8)
    # CUDA's takes more than 16 rows only.
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


def _int8pack(w: Stored, x: Tensor, bias: Tensor | None, largest: Tensor | None) -> Tensor:
    assert x.dtype == torch.bfloat16, "naive in other dtypes"
    y = torch._weight_int8pack_mm(x, w.values, torch.ones_like(w.scales, dtype=x.dtype))
    y = y.float() * w.scales
    return (y if bias is None else y + bias).to(x.dtype)


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
    "int8pack": _int8pack,
    "dequantised": _dequantised,
}
