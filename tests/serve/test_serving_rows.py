"""Products of few rows: the kernel against float64, and who uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gulliver.serve import LocalRunner
from gulliver.serve.kernels import (
    MOST_ROWS,
    FewRows,
    Native,
    few_rows,
    native_problem,
    take_few_rows,
)
from tests.serve.serving_models import tiny


def kernels() -> list[Any]:
    """The kernel by each set of instructions that this processor has."""
    if native_problem():
        return [pytest.param(None, marks=pytest.mark.skip(reason=str(native_problem())))]
    from gulliver.serve import _decoder  # pyright: ignore[reportAttributeAccessIssue]

    return [FewRows(Native(n, _decoder, _decoder.Kernel(n))) for n in _decoder.instructions()]


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("outputs", [1, 6, 131])
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, MOST_ROWS])
def test_products_are_those_of_float64(kernel: FewRows, rows: int, outputs: int) -> None:
    torch.manual_seed(rows * 1000 + outputs)
    # The last weights lie at the end of their memory: nothing behind them is read.
    x, weight, bias = torch.randn(1, rows, 80), torch.randn(outputs, 80), torch.randn(outputs)
    with torch.no_grad():
        assert kernel.takes(x, weight, bias)
        for given in (bias, None):
            want = F.linear(x.double(), weight.double(), None if given is None else given.double())
            got = kernel.linear(x, weight, given)
            assert got.shape == want.shape
            assert (got - want).abs().max() < 2e-5


@pytest.mark.parametrize("kernel", kernels())
def test_numbers_that_are_not_finite_stay_in_their_rows(kernel: FewRows) -> None:
    x, weight = torch.randn(7, 32), torch.randn(9, 32)
    x[3, 5] = float("nan")
    got = kernel.linear(x, weight, None)
    assert got[3].isnan().all()
    assert got[[0, 1, 2, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize("kernel", kernels())
def test_unsupported_matmuls_use_torch(kernel: FewRows) -> None:
    x, weight = torch.randn(4, 32), torch.randn(8, 32)
    assert not kernel.takes(x, weight, None), "gradients are wanted"
    with torch.no_grad():
        assert kernel.takes(x, weight, None)
        assert not kernel.takes(torch.randn(MOST_ROWS + 1, 32), weight, None)
        assert not kernel.takes(torch.randn(0, 32), weight, None)
        assert not kernel.takes(torch.randn(4, 33), torch.randn(8, 33), None)
        assert not kernel.takes(x.bfloat16(), weight.bfloat16(), None)
        assert not kernel.takes(x, torch.randn(32, 8).t(), None)
        assert not kernel.takes(torch.randn(32, 4).t(), weight, None)
        assert not kernel.takes(x, weight, torch.randn(8).double())


def test_a_runner_gives_linear_layers_back() -> None:
    model = tiny("llama")
    layer = model.model.layers[0].mlp.up_proj
    runner = LocalRunner(model, cache_tokens=64)
    assert ("forward" in vars(layer)) == (few_rows() is not None)
    runner.close()
    assert "forward" not in vars(layer)


def test_layers_with_a_forward_of_their_own_keep_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Linear(4, 4))
    own = model[0].forward = lambda input: input
    give_back = take_few_rows(model)
    give_back()
    assert model[0].forward is own
    assert "forward" not in vars(model[1])
