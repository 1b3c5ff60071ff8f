"""Attention of the extension `gulliver.serve._paged`, where it was built: reads blocks in place."""

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
"""Version of the extensions' interface; both sides count up when their calls change."""
INSTRUCTIONS = ("avx512", "avx2", "none")
"""Values of the variables that choose instructions; without, the first that the processor has."""
LANES = 16
"""Head sizes are multiples of it."""


@dataclass(frozen=True)
class PagedSpan:
    """A span as the layers see it."""

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


@dataclass(frozen=True)
class Prepared:
    """Sequences of a batch as the kernel takes them; the tensors hold what `where` points at."""

    sequences: int
    where: list[int]
    tensors: tuple[Tensor, ...]


class NativeAttention:
    """The kernel, by the instructions that it uses."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self._kernel = name, kernel

    def prepare(self, pieces: Sequence[Any], positions: Tensor) -> Prepared:
        """Lays out the sequences of a batch (`PagedSpan` or alike), once for all layers."""
        tables = [0]
        trees, places, sizes = [], [], 0
        for piece in pieces:
            tables.append(tables[-1] + len(piece.blocks))
            places.append(sizes if piece.mask is not None else -1)
            if piece.mask is not None:
                trees.append(piece.mask.to(torch.uint8).flatten())
                sizes += piece.mask.numel()
        tensors = (
            *(torch.tensor([getattr(p, name) for p in pieces]) for name in _BY_PIECE),
            torch.tensor(tables),
            torch.cat([piece.blocks for piece in pieces]),
            positions,
            torch.tensor(places),
            torch.cat(trees) if trees else torch.zeros(1, dtype=torch.uint8),
        )
        return Prepared(len(pieces), [t.data_ptr() for t in tensors], tensors)

    def takes(self, dtype: torch.dtype, dim: int) -> bool:
        """Whether keys and values of this dtype and size of a head are the kernel's."""
        return dtype in (torch.float32, torch.bfloat16) and dim % LANES == 0

    def run(
        self,
        prepared: Prepared,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        scale: float,
        window: int | None,
        slopes: Tensor | None,
    ) -> None:
        """Writes the attention of the prepared sequences to `out`; see `Pages.attend`."""
        if query.stride(-1) != 1:
            query = query.contiguous()
        if slopes is not None:
            slopes = slopes.to(torch.float32).contiguous()
        sizes = [
            *(query.stride(0), query.stride(1), query.shape[0], keys.shape[1]),
            *(keys.shape[3], keys.shape[2], prepared.sequences),
        ]
        self._kernel.run(
            *(tensor.data_ptr() for tensor in (query, out, keys, values)),
            *(query.dtype == torch.bfloat16, keys.dtype == torch.bfloat16, sizes, prepared.where),
            *(scale, window or 0, 0 if slopes is None else slopes.data_ptr()),
        )


_BY_PIECE = ("first", "count", "start")


ATTENTION = "gulliver.serve._paged", "GULLIVER_PAGES"
ROWS = "gulliver.serve._rows", "GULLIVER_ROWS"
"""Extensions, and the variables that choose their instructions."""


def problem_of(extension: str, variable: str) -> str | None:
    """Says why an extension with kernels is not used; None where it is."""
    try:
        built = importlib.import_module(extension)
    except ImportError as error:
        return f"its extension is not built ({error})"
    if built.INTERFACE != INTERFACE:
        return "its extension is of another version: pip install -e . builds it again"
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


def load_kernel(extension: str, variable: str) -> tuple[str, Any] | None:
    """Returns an extension's instructions and kernel; None where there is none."""
    if problem_of(extension, variable) is not None:
        return None
    built: Any = importlib.import_module(extension)
    name = os.environ.get(variable) or built.instructions()[0]
    return name, built.Kernel(name)


@cache
def native_attention() -> NativeAttention | None:
    """Returns the attention kernel; None where there is none."""
    found = load_kernel(*ATTENTION)
    return None if found is None else NativeAttention(*found)


# Linear layers of a served model on a few rows, by the extension `gulliver.serve._rows`.
#
# A step that continues some sequences multiplies a few rows with all weights, and takes as long as
# reading them should. Products of BLAS are made for many rows: on the processors that were tried
# they take up to twice that. Where the kernel was built, `take_few_rows` lets plain linear layers
# use it; their weights stay as they are, and products of many rows stay torch's.


MOST_ROWS = 128
"""Most rows for which the kernel is taken: more stay in the cache worse than torch's blocks."""


class FewRows:
    """The kernel, by the instructions that it uses."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name, self._kernel = name, kernel

    def takes(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether a product is the kernel's: few rows of float32 on the CPU, and no gradient."""
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
        where = (t.data_ptr() for t in (x, weight))
        self._kernel.run(
            *(*where, 0 if bias is None else bias.data_ptr()),
            *(out.data_ptr(), rows, inputs, len(weight)),
        )
        return out


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is what the kernel reads: float32, in order, on the CPU."""
    return (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
    )


@cache
def few_rows() -> FewRows | None:
    """Returns the kernel for few rows; None where there is none."""
    found = load_kernel(*ROWS)
    return None if found is None else FewRows(*found)


def take_few_rows(model: nn.Module) -> Callable[[], None]:
    """Makes linear layers of a model use the kernel, until the returned function is called."""
    # Layers that are quantised, cut or have a forward of their own are left alone.
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
