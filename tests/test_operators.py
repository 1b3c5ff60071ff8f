"""Operators shared one by one: forward, loss and every gradient are those of one process."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from gulliver.booster import Booster
from gulliver.booster.operators import (
    batch_of,
    find_operators,
    form_of,
    plan_from,
    problem_of,
)
from gulliver.comm import World
from gulliver.errors import GulliverError
from gulliver.hardware import Cluster, described
from gulliver.plan import Mesh, Plan
from gulliver.solve import Choice, JointPlan, OffloadLink, Pick, joint_cost, least_memory
from tests.operator_models import LocalBytes, build, loss_of, one_process
from tests.pool import Pool

BAR = 1e-10
MESHES = {2: ({"data": 2},), 4: ({"data": 4}, {"data": 2, "tensor": 2})}


def cluster_of(ranks: int) -> Cluster:
    found = described("cpu-loopback").resized(ranks)
    rates = {**found.device.matmul, "float64": 5e9}
    return replace(found, device=replace(found.device, matmul=rates))


def random_plan(kind: str, axes: dict[str, int], seed: int, fates: tuple[Choice, ...]) -> Plan:
    """Any picks that the search could make."""
    draw, (model, batch) = random.Random(seed), build(kind)
    ranks = 1
    for size in axes.values():
        ranks *= size
    problem = problem_of(model, batch_of(batch), tuple(axes.values()), cluster_of(ranks))
    picks = []
    for block in problem.blocks:
        row = []
        for number, operator in enumerate(block.operators):
            strategy = draw.randrange(len(operator.strategies))
            choice = draw.choice(fates)
            open_ = block.used_until(number, strategy) >= len(block.operators)
            if choice == "recompute" and (open_ or not operator.recomputable):
                choice = "keep"
            if choice == "offload" and not operator.strategies[strategy].movable:
                choice = "keep"
            row.append(Pick(strategy, choice))
        picks.append(tuple(row))
    cost = joint_cost(problem.blocks, picks, OffloadLink())
    found = JointPlan(tuple(picks), cost, 0.0, False, 0.0)
    return plan_from(problem, found, Mesh("cpu", axes), form_of(batch_of(batch)), 0)


def run(kind: str, plan: Plan) -> tuple[float, float]:
    """Largest relative errors of loss and gradients, of two steps of which the first updates."""
    wanted, grads = one_process(kind)
    model, batch = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    booster = Booster(plan=plan, verbose=False)
    boosted, stepper, *_ = booster.boost(model, optimizer)
    worst = 0.0
    for _ in range(2):
        loss = loss_of(boosted, batch)
        booster.backward(loss, stepper)
        found = stepper.full_gradients()
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            scale = max(float(grad.abs().max()), 1e-3)
            worst = max(worst, float((found[name] - grad).abs().max()) / scale)
        worst = max(worst, abs(float(loss.detach()) - wanted) / abs(wanted))
        stepper.step()
        stepper.zero_grad()
    booster.close()
    return worst, wanted


def _runs(world: World, cases: list[tuple[str, Plan]]) -> list[float]:
    torch.set_num_threads(1)
    return [run(kind, plan)[0] for kind, plan in cases]


FATES: tuple[Choice, ...] = ("keep", "keep", "recompute", "offload")


def _check_picks(pool: Pool, kind: str, ranks: int, seeds: range) -> None:
    cases = [
        (kind, random_plan(kind, axes, seed, ("keep",) if seed == 0 else FATES))
        for axes in MESHES[ranks]
        for seed in seeds
    ]
    for found in pool.run(_runs, ranks, cases):
        assert max(found) < BAR, found


@pytest.mark.parametrize(("kind", "ranks"), [("mlp", 2), ("llama", 4), ("gpt2", 2)])
def test_any_picks_have_the_loss_and_gradients_of_one_process(
    pool: Pool, kind: str, ranks: int
) -> None:
    _check_picks(pool, kind, ranks, range(1, 2))


@pytest.mark.full
@pytest.mark.deadline(300)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["mlp", "llama", "gpt2"])
def test_many_picks_have_the_loss_and_gradients_of_one_process(
    pool: Pool, kind: str, ranks: int
) -> None:
    _check_picks(pool, kind, ranks, range(6))


def found_plan(kind: str, axes: dict[str, int], above: float) -> tuple[Plan, int]:
    """What the joint search finds for a budget above the least, and that least."""
    model, batch = build(kind)
    cluster = cluster_of(4)
    problem = problem_of(model, batch_of(batch), tuple(axes.values()), cluster, 0)
    least = least_memory(problem.blocks).peak
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = int(above * least)
    return find_operators(model, batch, cluster, axes, memory, optimizer, states=4), memory


class _Measured:
    """Most bytes of a step, state included."""

    def __init__(self, kind: str, plan: Plan) -> None:
        model, batch = build(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        booster = Booster(plan=plan, verbose=False)
        boosted, stepper, *_ = booster.boost(model, optimizer)
        booster.backward(loss_of(boosted, batch), stepper)
        stepper.zero_grad()
        with LocalBytes() as counter:
            booster.backward(loss_of(boosted, batch), stepper)
        self.peak = stepper.parameter_bytes(boosted) + counter.peak
        booster.close()


def _peaks(world: World, cases: list[tuple[str, Plan]]) -> list[int]:
    torch.set_num_threads(1)
    return [_Measured(kind, plan).peak for kind, plan in cases]


def test_no_rank_has_more_bytes_than_the_budget_of_the_search(pool: Pool) -> None:
    cases = [
        (kind, *found_plan(kind, axes, above))
        for kind, axes, above in (
            ("mlp", {"data": 4}, 1.0),
            ("mlp", {"data": 2, "tensor": 2}, 1.3),
            ("llama", {"data": 4}, 1.0),
            ("llama", {"data": 4}, 1.5),
        )
    ]
    assert any("recompute" in plan.to_yaml() for _, plan, _ in cases)
    for peaks in pool.run(_peaks, 4, [(kind, plan) for kind, plan, _ in cases]):
        for (kind, plan, memory), peak in zip(cases, peaks, strict=True):
            assert plan.operators is not None
            assert peak <= plan.operators.peak <= memory, (kind, peak, plan.operators.peak)


def test_a_plan_of_operators_is_read_as_it_was_written() -> None:
    plan = random_plan("mlp", {"data": 4}, 3, ("keep", "recompute"))
    assert Plan.from_yaml(plan.to_yaml()) == plan


def _edited(world: World, text: str) -> str:
    try:
        model, _ = build("mlp")
        Booster(plan=Plan.from_yaml(text), verbose=False).boost(model, None)
    except GulliverError as error:
        return str(error)
    return ""


EDITS = [
    # What is edited, and what the message says beside the two lines.
    ("ddp: null", "ddp: {bucket_mb: 25}", ["operators: given (line", "ddp: given (line"]),
    (
        'data: "rows"',
        'data: "heads"',
        ["data: heads (line", "mesh.axes.data: 2 (line", "cannot lie so"],
    ),
    (
        '- "1"',
        '- "0"',
        ["blocks[0].blocks[0]: 0 (line", "blocks[1].blocks[0]: 0 (line", "one block"],
    ),
]


@pytest.mark.parametrize("number", range(3))
def test_contradictory_edits_name_both_lines(pool: Pool, number: int) -> None:
    old, new, told = EDITS[number]
    text = edited_plan().to_yaml()
    assert old in text, text
    for found in pool.run(_edited, 2, text.replace(old, new, 1)):
        assert all(part in found for part in told), found


def edited_plan() -> Plan:
    """A plan in which each block has operators of its own."""
    for seed in range(50):
        plan = random_plan("mlp", {"data": 2}, seed, ("keep",))
        assert plan.operators is not None
        if 'data: "rows"' in plan.to_yaml() and len(plan.operators.blocks) == 4:
            return plan
    raise AssertionError("no such plan")


def test_what_cannot_be_shared_exactly_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1))
    with pytest.raises(GulliverError, match=r"dropout in '1'.* draws random numbers.*set p to 0"):
        find_operators(model, torch.randn(4, 8), cluster_of(2))

    class InPlace(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x).mul_(2)

    with pytest.raises(GulliverError, match="mul_ in the model writes into what it takes"):
        find_operators(InPlace(8, 8), torch.randn(4, 8), cluster_of(2))


def _other_forward(world: World, plan: Plan) -> list[str]:
    model, batch = build("mlp")
    boosted, *_ = Booster(plan=plan, verbose=False).boost(model, None)
    found = []
    for given in (batch[:4], batch):
        try:
            boosted(given)
            found.append("ran")
        except GulliverError as error:
            found.append(str(error))
        boosted[1] = torch.nn.Tanh()
    return found


def test_another_batch_or_forward_than_planned_is_refused(pool: Pool) -> None:
    plan = random_plan("mlp", {"data": 2}, 0, ("keep",))
    for shorter, other in pool.run(_other_forward, 2, plan):
        assert "float64 8 x 16, and this one is 0 float64 4 x 16" in shorter
        assert "the forward differs from the one that was planned: tanh comes where" in other
