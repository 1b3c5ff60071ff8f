"""Updates during backward are the same updates; what comes too late for them is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gulliver.booster import Booster, LowLevelZeroPlugin
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.parallel import ZeroOptimizer
from gulliver.plan import Plan
from gulliver.plan.checks import check_plan
from gulliver.plan.tree import Mesh, Tiers, ZeroPlan
from tests.pool import Pool
from tests.tiers import (
    adamw,
    backward,
    boosted,
    differing,
    loss_of,
    manager_of,
    model_of,
    plain,
    result,
    steps,
)


def _trained(rank: int = 0, parts: int = 1, apart: int = 0, **options: Any) -> dict[str, Tensor]:
    model = model_of()
    optimizer = boosted(model, **options)
    steps(model, optimizer, rank=rank, parts=parts, apart=apart)
    optimizer.gatherer.finish_all()
    return result(model, optimizer)


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_has_the_bits_of_torch(stage: int) -> None:
    assert not differing(_trained(stage=stage, step_in_backward=True), plain())


def _ranks(world: World, share: float, plain: tuple[tuple[int, int], ...]) -> list[Any]:
    """Differences from updates in the step, by stage and parts; ranks use other layers.

    At stage 3 they use the same: what is not there is gathered by all.
    """
    found: list[Any] = []
    for stage, parts in plain:
        options: dict[str, Any] = {"rank": world.rank, "parts": parts, "stage": stage}
        options["apart"] = int(stage < 3)
        expected = _trained(**options)
        found.append(differing(_trained(**options, step_in_backward=True), expected))
    with manager_of(model_of(), share) as manager:
        options = {"rank": world.rank, "ordered": True}
        tiered = _trained(**options, manager=manager, step_in_backward=True)
        found.append(differing(tiered, _trained(**options)))
        found.append(manager.stats()["loads"] == 0)
    with manager_of(model_of(), share) as manager:
        options["max_norm"] = 0.05
        tiered = _trained(**options, manager=manager, step_in_backward=True)
        found.append(differing(tiered, _trained(**options)))
    return found


EVERY = tuple(product(range(4), (1, 2)))


@pytest.mark.parametrize(
    ("size", "plain"),
    [
        (2, ((0, 2), (1, 1), (2, 2), (3, 1))),
        pytest.param(2, EVERY, marks=pytest.mark.full),
        pytest.param(4, EVERY, marks=pytest.mark.full),
    ],
    ids=["2", "2-every", "4-every"],
)
def test_several_ranks_have_the_bits_of_updates_in_the_step(
    pool: Pool, size: int, plain: tuple[tuple[int, int], ...]
) -> None:
    for found in pool.run(_ranks, size, 0.5, plain):
        assert not any(found), found


def test_chunks_are_stepped_while_backward_goes_on() -> None:
    for stage in range(4):
        model, seen = model_of(), []
        optimizer = boosted(model, stage=stage, step_in_backward=True)
        model.layers[0].weight.register_hook(
            lambda _, o=optimizer, s=seen: s.append(sum(c.used_up for c in o.chunks))
        )
        backward(optimizer, loss_of(model, 1))
        assert seen[0] >= 0.7 * len(optimizer.chunks), seen
        assert optimizer.gradient_bytes() == 0
        optimizer.step()


def _gathered(world: World, stage: int) -> None:
    model = model_of()
    optimizer = boosted(model, stage=stage, step_in_backward=True)
    count, started = len(optimizer.chunks), []
    start, gatherer = optimizer.gatherer.start, optimizer.gatherer

    def noted(sharded: Any) -> None:
        started.append(optimizer.chunks.index(sharded))
        start(sharded)

    gatherer.start = noted  # type: ignore[method-assign]
    backward(optimizer, loss_of(model, 1, world.rank))
    early = list(range(count - 1, 2, -3))
    assert started == early
    assert early
    with pytest.raises(GulliverError, match="step_in_backward"):
        optimizer.chunks[0].chunk.members[0].sum()
    optimizer.step()
    assert started[len(early) :] == [n for n in range(count) if n not in early]
    assert optimizer.chunks[0].chunk.members[0].sum().isfinite()


@pytest.mark.parametrize("stage", [1, 2])
def test_a_third_of_gathers_goes_in_backward_and_the_rest_in_order(pool: Pool, stage: int) -> None:
    pool.run(_gathered, 2, stage)


def test_gradients_live_until_their_update_only() -> None:
    def most(**options: Any) -> int:
        model = model_of()
        optimizer = boosted(model, **options)
        steps(model, optimizer)
        return optimizer.held_bytes.peak["gradients"]

    assert most(step_in_backward=True) <= 0.3 * most()


def _refusals(world: World) -> list[str]:
    model = model_of()
    optimizer = boosted(model, step_in_backward=True)
    group, found = optimizer.param_groups[0], []

    def refused(call: Any) -> None:
        with pytest.raises(GulliverError) as caught:
            call()
        found.append(str(caught.value))

    def again() -> None:
        backward(optimizer, loss_of(model, 2, world.rank))

    for number in range(2):
        backward(optimizer, loss_of(model, number, world.rank))
        refused(again)
        refused(optimizer.zero_grad)
        refused(optimizer.full_gradients)
        refused(lambda: optimizer.clip_grad_by_norm(1.0))
        refused(lambda: optimizer.step(lambda: 0.0))
        before, group["lr"] = group["lr"], 0.5
        refused(optimizer.step)
        group["lr"] = before
        optimizer.step()
        refused(again)
        optimizer.zero_grad()
    reference = model_of()
    steps(reference, other := boosted(reference), 0, 2, world.rank)
    assert not differing(result(model, optimizer), result(reference, other))
    return found


def test_too_late_changes_are_rejected_on_all_ranks(pool: Pool) -> None:
    first, second = pool.run(_refusals, 2)
    assert first == second
    for line, part in zip(
        first[:7],
        ("was read", "zero_grad was", "read", "clipped", "closures", "0.5", "zero_grad after"),
        strict=True,
    ):
        assert part in line
        assert "\n" not in line


def _unlike(world: World) -> None:
    model = model_of()
    optimizer = boosted(model, step_in_backward=True)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + world.rank)
    with pytest.raises(GulliverError, match="lr of the optimizer's group 0"):
        backward(optimizer, loss_of(model, 0))


def test_options_that_differ_between_ranks_are_refused(pool: Pool) -> None:
    pool.run(_unlike, 2)


def test_hooks_of_a_step_run_once_and_schedulers_go_on() -> None:
    def run(**options: Any) -> dict[str, Tensor]:
        model, seen = model_of(), []
        optimizer = boosted(model, **options)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for number in range(3):
            steps(model, optimizer, number, number + 1)
            scheduler.step()
        assert seen == ["before", "after"] * 3
        return result(model, optimizer)

    assert not differing(run(step_in_backward=True), run())


def test_gradients_that_are_zeros_are_stepped_with() -> None:
    def run(**options: Any) -> dict[str, Tensor]:
        model = model_of()
        optimizer = boosted(model, **options)
        for number in range(4):
            backward(optimizer, loss_of(model, number))
            optimizer.step()
            if number == 2:
                model.zero_grad()
            optimizer.zero_grad(set_to_none=False)
        return result(model, optimizer)

    for stage in (0, 3):
        assert not differing(run(stage=stage, step_in_backward=True), run(stage=stage))


class _Late(nn.Module):
    """Backward of the first layer needs the weight of the second, by value only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) @ self.second.weight.detach())


def test_values_that_a_backward_still_needs_are_not_lost_silently() -> None:
    for stage in (1, 3):
        model = _Late()
        names = {p: name for name, p in model.named_parameters()}
        inner = adamw(model.parameters())
        optimizer = ZeroOptimizer(inner, names, stage, chunk_bytes=64, step_in_backward=True)
        optimizer.watch(model)
        with pytest.raises(RuntimeError, match="inplace operation"):
            optimizer.backward(model(torch.ones(2, 4)).sum())
        with pytest.raises(GulliverError, match="step_in_backward"):
            optimizer.step()


def test_a_backward_that_fails_before_any_update_can_be_repeated() -> None:
    model = model_of()
    optimizer = boosted(model, step_in_backward=True)
    hook = model.norm.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(optimizer, loss_of(model, 0))
    hook.remove()
    optimizer.zero_grad()
    steps(model, optimizer)
    assert not differing(result(model, optimizer), plain())


def _boosted_so(world: World) -> list[Any]:
    """Differences that the plugin's argument makes, and what the plan says of it."""
    found: list[Any] = []
    for stage in range(4):
        results = []
        for early in (False, True):
            model = model_of()
            plugin = LowLevelZeroPlugin(
                stage, chunk_mb=0.004, step_in_backward=early, verbose=False
            )
            booster = Booster(plugin)
            _, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
            steps(model, optimizer, end=2, rank=world.rank)
            optimizer.gatherer.finish_all()
            results.append(result(model, optimizer))
            assert optimizer.options.step_in_backward is booster.plan.zero.step_in_backward is early
            assert Plan.from_yaml(booster.plan.to_yaml()).zero.step_in_backward is early
        found.append(differing(*results))
    return found


def test_the_plugin_takes_it_at_every_stage(pool: Pool) -> None:
    assert not any(pool.run(_boosted_so, 2)[0])


def test_a_plan_that_says_it_twice_or_cuts_the_model_is_refused() -> None:
    zero = ZeroPlan(stage=3, step_in_backward=True)
    plan = Plan(plugin="LowLevelZeroPlugin", mesh=Mesh("cpu", {"data": 1}), zero=zero)
    check_plan(plan, 1)
    for wrong, message in (
        (replace(plan, zero=replace(zero, tiers=Tiers(2**30))), "with tiers only the second"),
        (replace(plan, mesh=Mesh("cpu", {"data": 1, "tensor": 1})), "omit the axis tensor"),
    ):
        with pytest.raises(GulliverError, match=message):
            check_plan(wrong, 1)
    plugin = LowLevelZeroPlugin(3, step_in_backward=True, memory_limit="1GiB", verbose=False)
    limited = plugin.choices(1).zero
    assert limited is not None
    assert limited.steps_in_backward
