"""ZeRO is exact: every cell against a plain loop in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from tests import parity
from tests.covering import grid
from tests.parity import CELLS, GRADIENT_BARS, PARAMETER_BARS, WORLDS, Cell, largest_error
from tests.pool import Pool


def _id(value: object) -> str:
    return value.name.replace(" ", "-") if isinstance(value, Cell) else str(value)


def _exists(cell: Cell, dtype: torch.dtype, size: int, stage: int) -> bool:
    return dtype in parity.dtypes(cell)


@pytest.mark.parametrize(
    ("cell", "dtype", "size", "stage"),
    grid(CELLS, tuple(PARAMETER_BARS), WORLDS, (0, 1, 2, 3), allowed=_exists),
    ids=_id,
)
def test_the_steps_equal_those_of_one_process(
    pool: Pool, cell: Cell, size: int, stage: int, dtype: torch.dtype, full: bool
) -> None:
    steps = parity.STEPS if full else parity.FEW_STEPS
    parameters, gradients = parity.expected(cell, size, dtype, stage, steps)
    for found, first in pool.run(parity.boosted, size, cell, dtype, stage, steps=steps):
        assert largest_error(first, gradients) <= GRADIENT_BARS[dtype]
        assert largest_error(found, parameters) <= PARAMETER_BARS[dtype]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_changes_no_bit(pool: Pool, stage: int, full: bool) -> None:
    cell, steps = CELLS[8], parity.STEPS if full else parity.FEW_STEPS
    for with_overlap, without in zip(
        pool.run(parity.boosted, 3, cell, torch.float32, stage, True, steps),
        pool.run(parity.boosted, 3, cell, torch.float32, stage, False, steps),
        strict=True,
    ):
        for found, expected in zip(with_overlap, without, strict=True):
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_ddp_goes_through_the_same_loop(pool: Pool) -> None:
    cell = CELLS[0]
    parameters, gradients = parity.reference(cell, torch.float64)
    for found, first in pool.run(parity.boosted, 2, cell, torch.float64, None):
        assert largest_error(first, gradients) <= 1e-12
        assert largest_error(found, parameters) <= 1e-10


@pytest.mark.parametrize("cell", [CELLS[0], CELLS[8]], ids=["plain", "all"])
def test_one_process_without_a_launcher_takes_the_same_path(cell: Cell) -> None:
    world = World(0, 1, 0, torch.device("cpu"))
    parameters, gradients = parity.reference(cell, torch.float64)
    found, first = parity.boosted(world, cell, torch.float64, 2)
    assert largest_error(first, gradients) <= 1e-12
    assert largest_error(found, parameters) <= 1e-10


def _small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _sharded_sizes(world: World, stage: int) -> tuple[int, bool, int]:
    model, optimizer = _small()
    booster = Booster(LowLevelZeroPlugin(stage=stage, verbose=False))
    model, boosted, *_ = booster.boost(model, optimizer)
    booster.backward(model(torch.ones(2, 5).double()).sum(), boosted)
    boosted.step()
    state = sum(v.numel() for s in optimizer.state.values() for k, v in s.items() if k == "exp_avg")
    free = all(not c.chunk.gradients.collected for c in boosted.chunks)
    return state, free, booster.plan.memory.optimizer_state


def test_optimizer_state_is_sharded_and_reduced_gradients_are_freed(pool: Pool) -> None:
    whole = 5 * 7 + 7 + 7 * 3 + 3
    for stage in (1, 2):
        states, free, planned = zip(*pool.run(_sharded_sizes, 2, stage), strict=True)
        assert sum(states) == whole
        assert all(count <= -(-whole // 32) * 16 for count in states)
        assert all(free)
        assert all(p >= 2 * 8 * s for p, s in zip(planned, states, strict=True))


def _different_start(world: World) -> list[float]:
    torch.manual_seed(world.rank)
    model = nn.BatchNorm1d(3).double()
    model.running_mean += world.rank
    nn.init.normal_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Booster(LowLevelZeroPlugin(verbose=False)).boost(model, optimizer)
    return [*model.weight.tolist(), *model.running_mean.tolist()]


def test_ranks_start_from_the_parameters_and_buffers_of_rank_0(pool: Pool) -> None:
    first, second, third = pool.run(_different_start, 3)
    assert first == second == third


def test_gradients_are_added_in_place_into_the_chunk() -> None:
    model, optimizer = _small()
    _, boosted, *_ = Booster(LowLevelZeroPlugin(verbose=False)).boost(model, optimizer)
    with boosted.no_sync():
        boosted.backward(model(torch.ones(2, 5).double()).sum())
    chunk = boosted.chunks[0].chunk
    start, end = (
        chunk.gradients.buffer.data_ptr(),
        chunk.gradients.buffer.data_ptr() + chunk.gradients.buffer.nbytes,
    )
    for parameter in model.parameters():
        assert start <= parameter.grad.data_ptr() < end
        assert parameter.grad.abs().sum() > 0


def test_backward_called_on_the_loss_itself_is_reduced_at_the_step() -> None:
    model, optimizer = _small()
    twin, twin_optimizer = _small()
    _, boosted, *_ = Booster(LowLevelZeroPlugin(stage=2, verbose=False)).boost(model, optimizer)
    for _ in range(3):
        for net, opt in ((model, boosted), (twin, twin_optimizer)):
            F.mse_loss(net(torch.ones(2, 5).double()), torch.zeros(2, 3).double()).backward()
            opt.step()
            opt.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_gradients_add_up_over_backwards_and_steps_until_they_are_forgotten() -> None:
    model, optimizer = _small()
    twin, twin_optimizer = _small()
    _, boosted, *_ = Booster(LowLevelZeroPlugin(stage=1, verbose=False)).boost(model, optimizer)
    for step in range(4):
        for net, opt in ((model, boosted), (twin, twin_optimizer)):
            loss = net(torch.full((2, 5), step + 1.0).double()).square().sum()
            boosted.backward(loss) if opt is boosted else loss.backward()
            opt.step()
            if step == 2:
                opt.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=0)


def test_clipping_by_value_and_the_norm_are_torchs() -> None:
    model, optimizer = _small()
    twin, _ = _small()
    _, boosted, *_ = Booster(LowLevelZeroPlugin(verbose=False)).boost(model, optimizer)
    data = torch.randn(4, 5, generator=torch.Generator().manual_seed(3)).double()
    boosted.backward(model(data).square().sum())
    twin(data).square().sum().backward()
    boosted.clip_grad_by_value(0.5)
    nn.utils.clip_grad_value_(twin.parameters(), 0.5)
    norm = boosted.clip_grad_by_norm(1e-3)
    expected = nn.utils.clip_grad_norm_(twin.parameters(), 1e-3)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    gradients = boosted.full_gradients()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-11, atol=1e-20)


def test_a_norm_that_is_not_finite_shows() -> None:
    model, optimizer = _small()
    _, boosted, *_ = Booster(LowLevelZeroPlugin(verbose=False)).boost(model, optimizer)
    boosted.backward(model(torch.full((1, 5), float("inf")).double()).sum())
    assert not torch.isfinite(boosted.clip_grad_by_norm(1.0))


def test_a_scheduler_made_before_or_after_boost_steers_the_steps() -> None:
    results = []
    for when in ("never boosted", "before", "after"):
        model, optimizer = _small()
        make = torch.optim.lr_scheduler.ExponentialLR
        scheduler = None if when == "after" else make(optimizer, 0.5)
        stepper: torch.optim.Optimizer = optimizer
        if when != "never boosted":
            _, stepper, *_ = Booster(LowLevelZeroPlugin(verbose=False)).boost(model, optimizer)
        scheduler = scheduler or make(stepper, 0.5)
        for _ in range(4):
            model(torch.ones(1, 5).double()).square().sum().backward()
            stepper.step()
            scheduler.step()
            stepper.zero_grad()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(results[2], results[0], rtol=1e-12, atol=0)


class _Foreign(torch.optim.SGD):
    pass


_Foreign.__module__ = "elsewhere"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS.*AdamW"),
        (lambda m: _Foreign(m.parameters(), lr=0.1), "_Foreign.*assume_elementwise"),
        (
            lambda m: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1),
            "not parameters of the model",
        ),
    ],
)
def test_unshardable_optimizers_are_rejected(make, message: str) -> None:
    model, _ = _small()
    with pytest.raises(GulliverError, match=message):
        Booster(LowLevelZeroPlugin(verbose=False)).boost(model, make(model))


def test_assume_elementwise_is_trusted() -> None:
    model, _ = _small()
    plugin = LowLevelZeroPlugin(assume_elementwise=True, verbose=False)
    _, boosted, *_ = Booster(plugin).boost(model, _Foreign(model.parameters(), lr=0.1))
    before = model[0].weight.detach().clone()
    boosted.backward(model(torch.ones(1, 5).double()).sum())
    gradient = boosted.full_gradients()["0.weight"].clone()
    boosted.step()
    torch.testing.assert_close(model[0].weight, before - 0.1 * gradient)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: m.float(),
        lambda m: setattr(m[0].weight, "data", torch.zeros(2, 2).double()),
    ],
)
def test_a_model_changed_after_boost_is_refused_at_the_step(spoil) -> None:
    model, optimizer = _small()
    _, boosted, *_ = Booster(LowLevelZeroPlugin(verbose=False)).boost(model, optimizer)
    spoil(model)
    with pytest.raises(GulliverError, match="after boost"):
        boosted.step()


def test_frozen_and_empty_models_are_refused() -> None:
    model, optimizer = _small()
    model.requires_grad_(False)
    with pytest.raises(GulliverError, match="nothing to train"):
        Booster(LowLevelZeroPlugin(verbose=False)).boost(model, optimizer)


def test_closures_and_late_parameters_are_refused() -> None:
    model, optimizer = _small()
    _, boosted, *_ = Booster(LowLevelZeroPlugin(verbose=False)).boost(model, optimizer)
    with pytest.raises(GulliverError, match="closures"):
        boosted.step(lambda: 0.0)
    with pytest.raises(GulliverError, match="after boost"):
        boosted.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
