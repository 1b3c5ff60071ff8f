"""The three products of a linear layer, with either layout of its weight.

A weight is ``[outputs, inputs]``, or ``[inputs, outputs]`` where it is *transposed*, as in GPT-2's
Conv1D. Tensors have any number of leading dims; shapes below are of what those make as rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Returns ``x @ weight.T + bias``: [rows, outputs]."""
    return F.linear(x, weight.t() if transposed else weight, bias)


def input_gradient(
    grad: Tensor, weight: Tensor, transposed: bool, into: Tensor | None = None
) -> Tensor:
    """Returns ``grad @ weight``: [rows, inputs]; added to `into` where that is given."""
    matrix = weight.t() if transposed else weight
    if into is None:
        return grad @ matrix
    rows(into).addmm_(rows(grad), matrix)
    return into


def weight_gradient(grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
    """Returns ``grad.T @ x`` in the weight's layout."""
    return rows(x).t() @ rows(grad) if transposed else rows(grad).t() @ rows(x)


def bias_gradient(grad: Tensor) -> Tensor:
    """Returns the sum of the rows: [outputs]."""
    return rows(grad).sum(0)


def rows(x: Tensor) -> Tensor:
    """Flattens all dims but the last into one."""
    return x.reshape(-1, x.shape[-1])


class Sum:
    """A sum of terms in float32 or wider, so that partial sums are not rounded to 16 bits."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, term: Tensor) -> None:
        """Adds a term."""
        if self._total is None:
            self._total = term.to(term.dtype if term.dtype.itemsize > 2 else torch.float32)
        else:
            self._total.add_(term)

    def value(self, dtype: torch.dtype) -> Tensor:
        """Returns the sum in a dtype; at least one term was added."""
        assert self._total is not None
        return self._total.to(dtype)
