"""Linear layers of a served model on a few rows, by the extension `gulliver.serve._rows`.

A step that continues some sequences multiplies a few rows with all weights, and takes as long as
reading them should. Products of BLAS are made for many rows: on the processors that were tried they
take up to twice that. Where the kernel was built, `take_few_rows` lets plain linear layers use it;
their weights stay as they are, and products of many rows stay torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gulliver.serve._native import LANES, load_kernel, problem_of

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


def rows_problem() -> str | None:
    """Says why there is no kernel for few rows; None where there is."""
    return problem_of("gulliver.serve._rows", "GULLIVER_ROWS")


@cache
def few_rows() -> FewRows | None:
    """Returns the kernel for few rows; None where there is none."""
    found = load_kernel("gulliver.serve._rows", "GULLIVER_ROWS")
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
