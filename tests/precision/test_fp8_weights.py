"""FP8 layers multiply by the weights of now, however these were written."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gulliver.precision.fp8 import convert_to_fp8

SCALINGS = ("tensorwise", "rowwise")


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


def pair(scaling: str, seed: int = 0) -> tuple[Pair, Pair]:
    """A model in FP8, and the same of naive layers."""
    torch.manual_seed(seed)
    model = Pair(nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 16))
    naive = Pair(*(NaiveLinear(layer, scaling) for layer in model.children()))  # type: ignore[arg-type]
    convert_to_fp8(model, scaling, emulate=True)
    return model, naive


def assert_same(found: nn.Module, wanted: nn.Module) -> None:
    """Weights may differ by what sums in another order round to."""
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    name: (getattr(torch.optim, name), options)
    for name, options in {
        "SGD": {"lr": 0.3, "momentum": 0.9},
        "Adam": {"lr": 0.01},
        "AdamW": {"lr": 0.01},
        "Adagrad": {"lr": 0.05},
        "Adadelta": {"lr": 1.0},
        "Adafactor": {"lr": 0.01},
        "Adamax": {"lr": 0.01},
        "ASGD": {"lr": 0.3},
        "NAdam": {"lr": 0.01},
        "RAdam": {"lr": 0.01},
        "RMSprop": {"lr": 0.01},
        "Rprop": {"lr": 0.01},
        "Muon": {"lr": 0.01},
        "LBFGS": {"lr": 0.1, "max_iter": 2},
    }.items()
}
KINDS = ("plain", "foreach", "fused")


def made(name: str, kind: str, model: nn.Module) -> torch.optim.Optimizer | None:
    """An optimizer of torch in one of its kinds; None where it has no such kind."""
    cls, options = OPTIMIZERS[name]
    chosen = {} if kind == "plain" else {kind: True}
    if kind == "plain" and name not in ("LBFGS", "Muon"):
        chosen = {"foreach": False}
    try:
        # Muon takes matrices alone.
        taken = [p for p in model.parameters() if name != "Muon" or p.ndim == 2]
        return cls(taken, **options, **chosen)
    except TypeError:
        return None


def two_micro_batches(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    losses = [(model(a) - b).square().mean() for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).sum().detach()


@pytest.mark.parametrize("scaling", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_optimizers_of_torch_train_as_without_copies(name: str, scaling: str) -> None:
    ran = 0
    for kind in KINDS:
        model, naive = pair(scaling)
        mine, theirs = made(name, kind, model), made(name, kind, naive)
        if mine is None or theirs is None:
            continue
        data = torch.Generator().manual_seed(1)
        for _ in range(3):
            x, y = torch.randn(64, 32, generator=data), torch.randn(64, 16, generator=data)
            for one, optimizer in ((model, mine), (naive, theirs)):
                closure = partial(two_micro_batches, one, optimizer, x, y)
                if name == "LBFGS":
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
        assert_same(model, naive)
        ran += 1
    assert ran


class Writes:
    """Random ways in which programs write weights, alike to both models."""

    def __init__(self, draws: random.Random, model: Pair, naive: Pair) -> None:
        self.draws, self.pairs = draws, (model, naive)
        fused = draws.choice(("AdamW", "SGD", "Adagrad"))
        kind = draws.choice(KINDS)
        self.optimizers = [made(fused, kind, one) for one in self.pairs]
        self.average = copy.deepcopy(naive.state_dict())

    def layers(self) -> list[Any]:
        name = self.draws.choice(("first", "second", "last"))
        return [getattr(one, name) for one in self.pairs]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def data(self) -> None:
        for layer in self.layers():
            layer.weight.data.clamp_(-0.1, 0.1)

    def numpy(self) -> None:
        for layer in self.layers():
            layer.weight.detach().numpy()[:] *= 1.5

    def reused(self) -> None:
        """Another parameter, as a rule at the address of the one that is gone."""
        for layer in self.layers():
            values = layer.weight.detach().flip(0).contiguous()
            layer.weight = None
            layer.weight = nn.Parameter(values)
        self.optimizers = [made("AdamW", "fused", one) for one in self.pairs]

    def assigned(self) -> None:
        for layer in self.layers():
            layer.weight.data = 0.7 * layer.weight.detach()

    def loaded(self) -> None:
        for one in self.pairs:
            one.load_state_dict(self.average)

    def averaged(self) -> None:
        """Evaluates with averaged weights, as an EMA does, and puts the own ones back."""
        x, found = torch.randn(4, 32, generator=torch.Generator().manual_seed(7)), []
        for one in self.pairs:
            own = {n: p.detach().clone() for n, p in one.named_parameters()}
            with torch.no_grad():
                for n, p in one.named_parameters():
                    p.data.copy_(self.average[n])
                found.append(one(x))
                for n, p in one.named_parameters():
                    p.data.copy_(own[n])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

    def called(self) -> None:
        """Calls with weights that are made for the call, at addresses of earlier ones."""
        factor, found = self.draws.uniform(0.5, 2), []
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(8))
        for one in self.pairs:
            fresh = {n: (factor * p).detach() for n, p in one.named_parameters()}
            with torch.no_grad():
                found.append(functional_call(one, fresh, (x,)))
            del fresh
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)

    def choices(self) -> list[Callable[[], None]]:
        mine = [self.step, self.data, self.numpy, self.reused, self.assigned]
        return [*mine, self.loaded, self.averaged, self.called]


def one_program(seed: int) -> None:
    """Trains both models with the same random writes between and within the steps."""
    draws = random.Random(seed)
    scaling = draws.choice(SCALINGS)
    model, naive = pair(scaling, seed)
    writes = Writes(draws, model, naive)
    buffer = torch.zeros(8, 32, requires_grad=True)  # filled in place, as loaders do
    for _ in range(8):
        values = torch.randn(8, 32, generator=torch.Generator().manual_seed(draws.getrandbits(30)))
        buffer.detach().numpy()[:] = values.numpy()
        again, found = draws.random() < 0.3, []
        for one in (model, naive):
            y = checkpoint(one, buffer, use_reentrant=False) if again else one(buffer)
            found.append(y.detach())
            y.square().sum().backward()
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
        for a, b in zip(model.parameters(), naive.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert (a.grad - b.grad).norm() <= 1e-3 * b.grad.norm() + 1e-6, (seed, scaling)
        for _ in range(draws.randrange(3)):
            draws.choice(writes.choices())()


def test_random_programs_give_what_layers_without_copies_give(full: bool) -> None:
    for seed in range(1000 if full else 20):
        one_program(seed)
