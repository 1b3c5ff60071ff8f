"""What a loop or a model does beside the micro-batches of a planned step is noticed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, DataCentricLoader, DataCentricPlugin
from gulliver.comm import World
from gulliver.data import DataCentricPlanner, Samples
from gulliver.errors import GulliverError
from tests.data_centric.data_centric_costs import line_costs
from tests.pool import Pool

SHAPES = [3, 5] * 6
NO_BACKWARD = (
    "step.backward was not called for a micro-batch; call step.backward(loss) once for each"
)
DATA = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in SHAPES]


class Force(nn.Module):
    """A model whose output is a derivative, which forward takes of its input and of a weight."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(()), persistent=False)
        self.register_buffer("scale", torch.ones(()))
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.seen += len(x)
            self.cache += len(x)
        x = x.double().reshape(-1, 1).requires_grad_()
        energy = self.layers(x).sum()
        of = [x, self.layers[0].weight]
        force, weight = torch.autograd.grad(energy, of, create_graph=True)
        return force.square().mean() + weight.square().mean()


def _loader(world: World, model: nn.Module, **settings: Any) -> tuple[Any, Any, Any]:
    booster = Booster(plugin=DataCentricPlugin(verbose=False, **settings))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    costs = line_costs(lambda n: n, 5)
    planner = DataCentricPlanner(costs, SHAPES, world.size, Samples(6))
    return DataCentricLoader(planner, DATA, model, optimizer), model, optimizer


def _outside(world: World, stages: list[int]) -> list[tuple[str, str, float]]:
    found = []
    for stage in stages:
        loader, model, optimizer = _loader(world, Force(), zero_stage=stage)
        step = next(iter(loader))
        batches: Any = iter(step)
        data = next(batches).data
        step.backward(model(data))
        beside = model(data)
        with pytest.raises(GulliverError) as plain:
            beside.backward()
        with pytest.raises(GulliverError) as spoilt:
            list(batches)
        assert str(spoilt.value) in (str(plain.value), NO_BACKWARD)
        with pytest.raises(GulliverError) as left:
            optimizer.step()
        optimizer.zero_grad()
        found.append((str(plain.value), str(left.value), _error(loader, model, optimizer)))
    return found


def _error(loader: Any, model: Any, optimizer: Any) -> float:
    """Largest error of the gradient of a step, whose model takes derivatives in its forward."""
    plain = Force()
    step = next(iter(loader))
    for batch in step:
        step.backward(model(batch.data))
    samples = [index for _, batch in step.plan for index in batch.samples]
    for index in samples:
        (plain(DATA[index]) / len(samples)).backward()
    gradients = optimizer.full_gradients()
    return max(
        float((gradients[n] - p.grad).abs().max())
        for n, p in plain.named_parameters()
        if p.grad is not None
    )


def test_backward_outside_the_step_is_detected(pool: Pool) -> None:
    for rank in pool.run(_outside, 2, [1, 3]):
        for plain, left, error in rank:
            assert "call step.backward(loss) once for each micro-batch" in plain
            assert "\n" not in plain
            assert "zero_grad()" in left
            assert error <= 1e-12


def _warned(world: World) -> list[list[str]]:
    found = []
    for counts in (False, True):
        loader, model, optimizer = _loader(world, Force(counts))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in loader:
                for batch in step:
                    # The ranks of one step need not have as many samples.
                    step.backward(model(torch.cat([batch.data] * (1 + world.rank))))
                optimizer.step()
                optimizer.zero_grad()
        found.append([str(w.message) for w in caught if "forwards have changed" in str(w.message)])
    return found


def test_saved_buffers_that_ranks_change_for_themselves_are_named_once(pool: Pool) -> None:
    first, second = pool.run(_warned, 2)
    (told,) = first[1]
    assert "seen" in told
    assert (first[0], second) == ([], [[], []])
    assert pool.run(_warned, 1)[0] == [[], []]
