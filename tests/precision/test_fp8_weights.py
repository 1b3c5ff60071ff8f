"""FP8 layers multiply by the weights of now, however these were written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gulliver.precision.fp8 import convert_to_fp8


def quantised(x: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """Rounds to FP8 by the rule of the paper."""
    top = torch.finfo(dtype).max
    size = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = 2.0 ** torch.floor(torch.log2(top / size.clamp(min=2.0**-100)))
    return ((x * scale).clamp(-top, top).to(dtype).float() / scale).float()


class _Naive(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rowwise, dim, e4m3 = rowwise, 1 if rowwise else None, torch.float8_e4m3fn
        return quantised(x, e4m3, dim) @ quantised(weight, e4m3, dim).T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight), grad = ctx.saved_tensors, grads[0]
        g, w = torch.float8_e5m2, torch.float8_e4m3fn
        first, second = (1, 0) if ctx.rowwise else (None, None)
        of_x = quantised(grad, g, first) @ quantised(weight, w, second)
        return of_x, quantised(grad, g, second).T @ quantised(x, w, second), None


class NaiveLinear(nn.Module):
    """The reference: every cast of every call from scratch."""

    def __init__(self, like: nn.Linear, scaling: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.weight.detach().clone())
        self.bias = nn.Parameter(like.bias.detach().clone())
        self.rowwise = scaling == "rowwise"

    def forward(self, x: Tensor) -> Tensor:
        y: Any = _Naive.apply(x, self.weight, self.rowwise)
        return y + self.bias


class Pair(nn.Module):
    """Two layers that share their input, and one after them."""

    def __init__(self, first: nn.Module, second: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = first, second, last

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        return self.last(torch.tanh(self.first(h) * self.second(h)))


def _stepped(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    optimizer.step()  # without a new version of the weights


def _numpy(model: Any) -> None:
    model.second.weight.detach().numpy()[:] *= 1.5


def _reused(model: Any) -> None:
    """Another parameter, as a rule at the address of the one that is gone."""
    values = model.last.weight.detach().flip(0).contiguous()
    model.last.weight = None
    model.last.weight = nn.Parameter(values)


def _assigned(model: Any) -> None:
    model.first.weight.data = 0.7 * model.first.weight.detach()


def _loaded(model: Any) -> None:
    model.load_state_dict({n: 0.9 * p.detach() for n, p in model.named_parameters()})


WRITES: list[Callable[[Any], None]] = [
    _stepped,
    lambda model: model.first.weight.data.clamp_(-0.1, 0.1),
    _numpy,
    _reused,
    _assigned,
    _loaded,
]


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_weight_writes_take_effect_at_once(scaling: str) -> None:
    torch.manual_seed(0)
    model = Pair(nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 16))
    naive = Pair(*(NaiveLinear(layer, scaling) for layer in model.children()))  # type: ignore[arg-type]
    convert_to_fp8(model, scaling, emulate=True)
    buffer = torch.zeros(8, 32, requires_grad=True)  # filled in place, as loaders do
    for step, write in enumerate([*WRITES, *WRITES]):
        buffer.detach().numpy()[:] = torch.randn(8, 32).numpy()
        found, called = [], []
        for one in (model, naive):
            one.zero_grad()
            y = checkpoint(one, buffer, use_reentrant=False) if step % 2 else one(buffer)
            found.append(y.detach())
            y.square().sum().backward()
            # Weights that are made for the call, at addresses of earlier ones.
            fresh = {n: (1.3 * p).detach() for n, p in one.named_parameters()}
            with torch.no_grad():
                called.append(functional_call(one, fresh, (buffer,)))
            del fresh
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(*called, rtol=1e-4, atol=1e-5)
        for a, b in zip(model.parameters(), naive.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert (a.grad - b.grad).norm() <= 1e-3 * b.grad.norm() + 1e-6, step
        write(model)
        with torch.no_grad():
            for a, b in zip(model.parameters(), naive.parameters(), strict=True):
                b.copy_(a)
