"""Native kernels of the extension `gulliver.serve._decoder`, if it was built.

Models supported by `gulliver.serve.decoder` run full steps in it; others only use its paged
attention and its matmuls of few rows.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.errors import GulliverError, nearest

INTERFACE = 1
"""Version of the extension's interface; incremented on both sides when its calls change."""
EXTENSION = "gulliver.serve._decoder"
VARIABLES = "GULLIVER_DECODER", "GULLIVER_PAGES", "GULLIVER_ROWS"
"""Variables that select instructions; the later ones are old names."""
INSTRUCTIONS = ("avx512", "avx2", "none")
"""Values of these variables; the default is the first that the processor supports."""
LANES = 16
"""Divisor of supported head sizes."""
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Dtypes that native code reads, with their numbers there."""


@dataclass(frozen=True)
class Native:
    """The extension, and the instruction set that it uses."""

    name: str
    built: Any
    kernel: Any


def native_problem() -> str | None:
    """Returns why native code is not used; None if it is used."""
    try:
        built: Any = importlib.import_module(EXTENSION)
    except ImportError as error:
        return f"its extension is not built ({error})"
    if built.INTERFACE != INTERFACE:
        return "its extension was built from another version; rebuild it with pip install -e ."
    variable = next((name for name in VARIABLES if os.environ.get(name)), VARIABLES[0])
    wanted = os.environ.get(variable, "")
    if wanted and wanted not in INSTRUCTIONS:
        raise GulliverError(f"{variable}={wanted!r} is unknown: {nearest(wanted, INSTRUCTIONS)}")
    if wanted == "none":
        return f"{variable}=none"
    names = built.instructions()
    if not names:
        return "this processor has neither AVX512 nor AVX2"
    if wanted and wanted not in names:
        return f"this processor has no {wanted}"
    return None


@cache
def native() -> Native | None:
    """Returns the extension; None if it is not used."""
    if native_problem() is not None:
        return None
    built: Any = importlib.import_module(EXTENSION)
    wanted = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), None)
    name = wanted or built.instructions()[0]
    return Native(name, built, built.Kernel(name))


@dataclass(frozen=True)
class PagedSpan:
    """A span as seen by the layers."""

    # Index of its first token among the packed ones.
    first: int
    count: int
    # Keys in the cache before them.
    start: int
    # Block table [blocks], up to its last token.
    blocks: Tensor
    # Mask of a tree [count, count]: the new tokens that each sees; None for a chain.
    mask: Tensor | None
    # Positions of its tokens [count], in a tree not one after another.
    positions: Tensor


class NativeAttention:
    """Attention in native code."""

    def __init__(self, found: Native) -> None:
        self.name, self._built, self._kernel = found.name, found.built, found.kernel

    def prepare(self, pieces: Sequence[PagedSpan], positions: Tensor) -> Any:
        """Prepares the sequences of a batch, once for all layers."""
        return self._built.Sequences(
            *([getattr(piece, name) for piece in pieces] for name in ("first", "count", "start")),
            *([piece.blocks.tolist() for piece in pieces], positions.tolist()),
            [[] if piece.mask is None else piece.mask.flatten().tolist() for piece in pieces],
        )

    def takes(self, dtype: torch.dtype, dim: int) -> bool:
        """Whether the kernel supports this dtype and head size."""
        return dtype in KINDS and dim % LANES == 0

    def run(
        self,
        prepared: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        scale: float,
        window: int | None,
        slopes: Tensor | None,
    ) -> None:
        """Writes the attention of the prepared sequences to `out`; see `Pages.attend`."""
        wide = query.float()
        if wide.stride(-1) != 1:
            wide = wide.contiguous()
        made = out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
        if slopes is not None:
            slopes = slopes.to(torch.float32).contiguous()
        sizes = [
            *(KINDS[keys.dtype], wide.stride(0), wide.stride(1), wide.shape[0], keys.shape[1]),
            *(keys.shape[3], keys.shape[2]),
        ]
        self._kernel.attend(
            *(prepared, *(tensor.data_ptr() for tensor in (wide, made, keys, values)), sizes),
            *(scale, window or 0, 0 if slopes is None else slopes.data_ptr()),
            torch.get_num_threads(),
        )
        if made is not out:
            out.copy_(made)


@cache
def native_attention() -> NativeAttention | None:
    """Returns the native attention; None if it is not available."""
    found = native()
    return None if found is None else NativeAttention(found)


# Linear layers of a served model on a few rows, by the same extension.
#
# A step that continues some sequences multiplies a few rows with all weights, and takes as long as
# reading them should. Products of BLAS are made for many rows: on the processors that were tried
# they take up to twice that. Where the kernel was built, `take_few_rows` lets plain linear layers
# use it; their weights stay as they are, and products of many rows stay torch's.


MOST_ROWS = 128
"""Maximum rows for the kernel; with more, torch uses the cache better."""


class FewRows:
    """Native matmul for few rows."""

    def __init__(self, found: Native) -> None:
        self.name, self._kernel = found.name, found.kernel

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the kernel supports a product: few float32 rows on the CPU, without gradient."""
        return (
            0 < x.numel() <= MOST_ROWS * x.shape[-1]
            and all(_plain(t) for t in (x, weight))
            and (bias is None or _plain(bias))
            and x.shape[-1] % LANES == 0
            and not torch.is_grad_enabled()
        )

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Returns ``x @ weight.T + bias``."""
        rows, inputs = x.numel() // x.shape[-1], x.shape[-1]
        out = x.new_empty(*x.shape[:-1], len(weight))
        address = 0 if bias is None else bias.data_ptr()
        matrix = [weight.data_ptr(), 0, address, len(weight), inputs, KINDS[weight.dtype]]
        threads = torch.get_num_threads()
        self._kernel.multiply(x.data_ptr(), out.data_ptr(), rows, matrix, threads)
        return out


def _plain(tensor: Tensor) -> bool:
    """Whether the kernel can read a tensor: float32, contiguous, on the CPU."""
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
    )


@cache
def few_rows() -> FewRows | None:
    """Returns the kernel for few rows; None if it is not available."""
    found = native()
    return None if found is None else FewRows(found)


def take_few_rows(model: nn.Module) -> Callable[[], None]:
    """Makes a model's linear layers use the kernel, until the returned function is called."""
    # Layers that are quantized, sharded or have a custom forward are unchanged.
    kernel = few_rows()
    if kernel is None:
        return lambda: None
    plain: list[Any] = [layer for layer in model.modules() if type(layer) is nn.Linear]
    layers = [layer for layer in plain if "forward" not in vars(layer)]
    for layer in layers:
        layer.forward = _forward(layer, kernel)

    def give_back() -> None:
        for layer in layers:
            layer.__dict__.pop("forward", None)

    return give_back


def _forward(layer: Any, kernel: FewRows) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        # Looked up at each call: streamed weights lie elsewhere in each step.
        weight, bias = layer.weight, layer.bias
        if kernel.takes(x, weight, bias):
            return kernel.linear(x, weight, bias)
        return F.linear(x, weight, bias)

    return forward
